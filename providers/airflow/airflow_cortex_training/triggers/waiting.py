"""One wait in the triggerer: look, sleep, look again, until there is something to tell or the deadline is over."""

from __future__ import annotations

import asyncio
import random
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from airflow.triggers.base import TriggerEvent

from airflow_cortex_training.triggers.events import Status, event
from airflow_cortex_training.triggers.stored import StoredArguments
from cortex_training.errors import (
    AuthError,
    ConfigurationError,
    CortexTrainingError,
    NotFoundError,
    RateLimitedError,
    ServiceError,
    TransportError,
)
from cortex_training.protocol.durations import Durations
from cortex_training.protocol.pace import Bounds, Pace

LOST_AFTER_S = 60.0
"""A 404 is believed after so long: ids created on one node may be unknown to another for some seconds."""

_COMPLAIN_EVERY_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """Why a wait is over, and the state that ended it."""

    status: Status
    state: str = ""
    error: str = ""


Look = Callable[[], Awaitable[Outcome | None]]


class Wait(StoredArguments):
    """What a trigger of one wait has beside its arguments: it waits, holds back what came too soon, and fires once.

    Classes give `outcome` and `told`. Times are UTC epoch seconds: when the wait began, when an event may be fired,
    when to give up.
    """

    started: float
    not_before: float
    deadline: float
    log: Any

    @abstractmethod
    async def outcome(self) -> Outcome:
        """Wait, usually with `wait`."""

    @abstractmethod
    def told(self, outcome: Outcome) -> dict[str, Any]:
        """What the task must know beside status and error: ids and numbers."""

    async def wait(self, look: Look, what: str, bounds: Bounds, durations: Durations | None = None) -> Outcome:
        """`wait_for` with this trigger's times and log."""
        return await wait_for(
            look,
            what=what,
            started=self.started,
            deadline=self.deadline,
            bounds=bounds,
            durations=durations,
            log=self.log,
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.check_version()
        outcome = await self.outcome()
        await sleep_until(self.not_before)
        yield TriggerEvent(event(outcome.status, error=outcome.error, **self.told(outcome)))
        return


async def wait_for(
    look: Look,
    *,
    what: str,
    started: float,
    deadline: float,
    bounds: Bounds,
    durations: Durations | None = None,
    log: Any,
) -> Outcome:
    """Call `look` until it returns an outcome. `started` and `deadline` are UTC epoch seconds and survive restarts.

    What is transient (see `is_transient`) is waited for until the deadline: giving up would make the task retry, and a
    retry can cost a second job. Anything else that goes wrong is an outcome. `durations` say when to look, and learn
    from a wait that ended with what it waited for.
    """
    pace = Pace(bounds, random.Random(), durations.recent() if durations is not None else ())
    pending_until_s = 0.0
    unknown_since: float | None = None
    complained = 0.0
    while True:
        asked_at_s = max(0.0, time.time() - started)
        try:
            outcome = await look()
            unknown_since = None
            pending_until_s = asked_at_s if outcome is None else pending_until_s
        except AuthError as error:
            outcome = Outcome(Status.DENIED, error=str(error))
        except ConfigurationError as error:
            outcome = Outcome(Status.REFUSED, error=str(error))
        except NotFoundError as error:
            unknown_since = unknown_since or time.monotonic()
            outcome = None
            if time.monotonic() - unknown_since >= LOST_AFTER_S:
                outcome = Outcome(Status.LOST, error=str(error))
        except CortexTrainingError as error:
            outcome = None
            if not is_transient(error):
                outcome = Outcome(Status.REFUSED, error=str(error))
            elif time.monotonic() - complained >= _COMPLAIN_EVERY_S:
                log.warning("still waiting for %s although it could not be asked: %s", what, error)
                complained = time.monotonic()
        if outcome is not None:
            if durations is not None and outcome.status == Status.SETTLED:
                durations.observe(pending_until_s, time.time() - started)
            return outcome
        now = time.time()
        if now >= deadline:
            return Outcome(Status.TIMEOUT)
        await asyncio.sleep(min(pace.delay_s(max(0.0, now - started)), deadline - now))


def is_transient(error: BaseException) -> bool:
    """Whether a later look may find what this one did not: nobody answered, or only to say "not now".

    A root that is not there counts as well: its file system may be mounted again, and who publishes first makes it.
    """
    from cortex_training.publication.errors import RootError, StoreError

    if isinstance(error, ConfigurationError):
        # A store whose package is not installed is one, too.
        return False
    return isinstance(error, (TransportError, RateLimitedError, ServiceError, StoreError, RootError))


async def sleep_until(moment: float) -> None:
    """`moment` in UTC epoch seconds."""
    await asyncio.sleep(max(0.0, moment - time.time()))
