"""How every sensor of this provider waits: in the worker, coming back to it, or in the triggerer, to one deadline.

``timeout`` counts from the first look of a generation of the task. It is written to the task's state, so that neither
a retry nor a deferral nor a restart moves the deadline; clearing the task does. A service or store that does not answer
is waited for in all three modes: what fails a sensor is what no later look can mend, or the deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator, PokeReturnValue, timezone
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    AirflowTaskTimeout,
)

from airflow_cortex_training.connection import Target
from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.operators.base import BACKSTOP_S, DEFER_GRACE_S, INLINE_S, default_deferrable
from airflow_cortex_training.triggers import waiting
from airflow_cortex_training.triggers.events import Status, is_of_another_wait
from airflow_cortex_training.triggers.waiting import is_transient
from cortex_training.errors import NotFoundError

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.triggers.base import BaseTrigger

INLINE_LOOK_S = 2.0

_BY_TIMEOUT, _BY_EXECUTION_TIMEOUT = "timeout", "execution_timeout"


class CortexTrainingSensor(BaseSensorOperator):
    """A sensor that looks at the service, or at what was published.

    Args:
        conn_id, database, schema, endpoint: as in every operator of this provider.
        deferrable: wait in the triggerer; default is Airflow's ``[operators] default_deferrable``. Otherwise `mode`
            chooses between holding the worker (``poke``) and coming back (``reschedule``).
        inline_s: how long a deferrable sensor looks on the worker first.

    `soft_fail` turns a timeout, and whatever no later look can mend, into a skip.

    Subclasses give `check`, `source`, `look`, `trigger`, `ids` and `concluded`.
    """

    template_fields: Sequence[str] = ("conn_id", "database", "schema", "endpoint")
    ui_color = "#dff3fb"
    ui_fgcolor = "#0b3d4f"

    def __init__(
        self,
        *,
        conn_id: str = CortexTrainingHook.default_conn_name,
        database: str | None = None,
        schema: str | None = None,
        endpoint: str | None = None,
        deferrable: bool | None = None,
        inline_s: float = INLINE_S,
        poke_interval: timedelta | float = 15.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.conn_id = conn_id
        self.database = database
        self.schema = schema
        self.endpoint = endpoint
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self.inline_s = inline_s
        self._started = 0.0

    @property
    def target(self) -> Target:
        return Target(self.conn_id, self.database, self.schema, self.endpoint)

    # What a sensor says about itself

    def check(self) -> None:
        """Validate the arguments, before anything remote. Raises `ConfigurationError`."""

    def source(self) -> AbstractContextManager[Any]:
        """What `look` looks at, for as long as one process looks: a client of the service, unless overridden."""
        return CortexTrainingHook.for_target(self.target).get_watching_conn()

    def look(self, source: Any) -> Any | None:
        """What the sensor waits for, as it goes into XCom; None while it is not there.

        Raises `AirflowFailException` when it can't come any more.
        """
        raise NotImplementedError

    def trigger(self, *, started: float, not_before: float, deadline: float) -> BaseTrigger:
        """Waits for the same in the triggerer. Times are UTC epoch seconds."""
        raise NotImplementedError

    def concluded(self, event: dict[str, Any]) -> Any:
        """What `look` would give, of an event that is about the wait's end; raises as `look` does."""
        raise NotImplementedError

    def ids(self) -> dict[str, Any]:
        """Fields of every event of `trigger` that tell it from an event of another wait."""
        raise NotImplementedError

    def awaited(self) -> str:
        """What is waited for, in words."""
        raise NotImplementedError

    # The legs

    def execute(self, context: Context) -> Any:
        with self._verdicts():
            with clear_failures():
                self.check()
            started = self._started = self._first_look_at(DurableRecord(context))
            with self._source() as source:
                if not self.deferrable:
                    return self._look_to_the_end(source, started)
                now = time.time()
                found = self._look_inline(source, until=min(now + self.inline_s, started + float(self.timeout)))
            if found is not None:
                return found
        return self._defer(started, now)

    def poke(self, context: Context) -> PokeReturnValue:
        """One look, for those who call a sensor by hand."""
        with self._source() as source, clear_failures():
            found = self.look(source)
        return PokeReturnValue(found is not None, found)

    def execute_complete(
        self,
        context: Context,
        event: dict[str, Any] | None = None,
        limit: str = _BY_TIMEOUT,
        ids: dict[str, Any] | None = None,
    ) -> Any:
        """The worker leg after the trigger's event. `limit` says which limit the trigger's deadline was, `ids` what
        was waited for: an event about anything else is no word about that, which is looked for again."""
        event = event or {}
        status = event.get("status")
        if is_of_another_wait(event, **(ids or {})):
            self.log.warning("%s: looking again, %s is about something else", self.awaited(), event)
            return self.execute(context)
        with self._verdicts():
            if status == Status.TIMEOUT:
                raise self._timed_out(limit)
            if status in (Status.DENIED, Status.REFUSED, Status.LOST):
                raise AirflowFailException(f"{self.awaited()}: {event.get('error') or 'the wait ended'}")
            return self.concluded(event)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        with self._verdicts():
            return super().resume_execution(next_method, next_kwargs, context)

    # Steps of the legs

    def _first_look_at(self, record: DurableRecord) -> float:
        """When this generation of the task looked first, UTC epoch seconds."""
        started = (record.current or {}).get("started")
        if started is None:
            started = time.time()
            record.write(started=started)
        return float(started)

    @contextlib.contextmanager
    def _source(self) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            with clear_failures():
                source = stack.enter_context(self.source())
            yield source

    def _look_inline(self, source: Any, *, until: float) -> Any | None:
        while True:
            found = self._look(source)
            left_s = until - time.time()
            if found is not None or left_s <= 0:
                return found
            time.sleep(min(INLINE_LOOK_S, left_s))

    def _look_to_the_end(self, source: Any, started: float) -> Any:
        deadline, looks = started + float(self.timeout), 0
        while True:
            looks += 1
            found = self._look(source)
            if found is not None:
                return found
            now = time.time()
            if now >= deadline:
                raise self._timed_out(_BY_TIMEOUT)
            interval_s = self._get_next_poke_interval(started, lambda: time.time() - started, looks)
            pause_s = min(max(interval_s, 0.0), deadline - now)
            if self.reschedule:
                raise AirflowRescheduleException(timezone.utcnow() + timedelta(seconds=pause_s))
            time.sleep(pause_s)

    def _look(self, source: Any) -> Any | None:
        """One look; None also when nobody answered, because giving up would not make the answer come sooner."""
        try:
            with clear_failures():
                return self._look_for_a_new_id(source)
        except AirflowFailException:
            raise
        except Exception as error:
            if not self.silent_fail and not is_transient(error):
                raise
            self.log.warning("%s: could not look, trying on: %s", self.awaited(), error)
            return None

    def _look_for_a_new_id(self, source: Any) -> Any | None:
        try:
            return self.look(source)
        except NotFoundError as error:
            # An id that was made on one node of the service may be unknown to another for some seconds.
            if time.time() - self._started >= waiting.LOST_AFTER_S:
                raise
            self.log.info("%s: not known yet: %s", self.awaited(), error)
            return None

    def _defer(self, started: float, now: float) -> NoReturn:
        deadline, limit = started + float(self.timeout), _BY_TIMEOUT
        if isinstance(self.execution_timeout, timedelta):
            # Airflow does not enforce it over a deferral.
            of_this_try = now + self.execution_timeout.total_seconds()
            if of_this_try < deadline:
                deadline, limit = of_this_try, _BY_EXECUTION_TIMEOUT
        self.defer(
            trigger=self.trigger(started=started, not_before=time.time() + DEFER_GRACE_S, deadline=deadline),
            method_name="execute_complete",
            kwargs={"limit": limit, "ids": self.ids()},
            # The trigger ends at its own deadline, with an event. This is for the night no triggerer runs.
            timeout=timedelta(seconds=max(0.0, deadline - time.time()) + BACKSTOP_S),
        )

    def _timed_out(self, limit: str) -> BaseException:
        if limit == _BY_EXECUTION_TIMEOUT:
            assert isinstance(self.execution_timeout, timedelta)
            seconds = self.execution_timeout.total_seconds()
            return AirflowTaskTimeout(f"{self.awaited()}: not within this try's execution_timeout of {seconds:.0f} s")
        return AirflowSensorTimeout(f"{self.awaited()}: not within {float(self.timeout):.0f} s of the first look")

    @contextlib.contextmanager
    def _verdicts(self) -> Iterator[None]:
        """`soft_fail` and `never_fail`, the same on every leg."""
        try:
            yield
        except (AirflowSkipException, AirflowRescheduleException):
            raise
        except (AirflowSensorTimeout, AirflowTaskTimeout, AirflowFailException) as error:
            if self.soft_fail or self.never_fail:
                raise AirflowSkipException(str(error)) from error
            raise
        except Exception as error:
            if self.never_fail:
                raise AirflowSkipException(str(error)) from error
            raise
