"""Mistakes that an engine could have, each put into a driver's process on order, to see that the suite catches it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and how to make it so in this process."""

    what: str
    plant: Callable[[], None]


def _resend_a_step() -> None:
    from cortex_training.errors import OutcomeUnknown
    from cortex_training.training import operations

    async def optimizer_step(driver: Any, step: int, meanwhile: Any = None) -> int:
        rate = driver.plan.learning_rate.at(step, driver.plan.steps)
        while True:
            try:
                sent = await driver.submit("step", step, partial(driver.client.step, driver.segment.job_id, rate))
            except OutcomeUnknown:
                continue
            return await operations.step_result(driver, sent)

    operations.optimizer_step = optimizer_step


def _skip_the_takeover() -> None:
    from cortex_training.training.journal import JournalWriter, last_number

    take_over = JournalWriter.take_over.__func__

    def begin(cls: Any, store: Any, epoch: int, token: str, *rest: Any) -> Any:
        last = last_number(store)
        return cls(store, epoch, token, last) if last else take_over(cls, store, epoch, token, *rest)

    JournalWriter.take_over = classmethod(begin)


def _sync_nothing() -> None:
    os.fsync = lambda handle: None


def _keep_the_segment() -> None:
    from cortex_training.training.driver import Driver

    record = Driver.record

    async def recording(self: Any, type_: str, body: dict[str, Any]) -> Any:
        if type_ == "segment":
            body = {**body, "segment": 0}
        return await record(self, type_, body)

    Driver.record = recording


def _skip_the_count() -> None:
    from cortex_training.training import operations

    async def confirm(driver: Any, operation: Any, global_steps: int, norm: float | None) -> int:
        await operations._close(driver, operation, "done", {"global_steps": global_steps})
        return global_steps

    async def look_away(*_: Any) -> None:
        return None

    operations._confirm_step, operations._require_expected_count = confirm, look_away


def _publish_early() -> None:
    from cortex_training.training import operations
    from cortex_training.training.state import Segment

    save = operations.save

    async def save_and_publish(driver: Any, step: int) -> None:
        await save(driver, step)
        await operations.publish_verified(driver)

    operations.save = save_and_publish
    Segment.weights_are_finite = lambda self, step: True


def _adopt_a_dead_job() -> None:
    from cortex_training.training import segments
    from cortex_training.training.driver import Driver

    running = segments.ensure_running

    async def ensure(driver: Any) -> None:
        if await driver.job() is None:
            await running(driver)

    async def look_away(self: Any, said: str) -> None:
        return None

    segments.ensure_running, Driver.raise_if_job_lost = ensure, look_away


def _drop_the_window() -> None:
    from cortex_training.training import driver

    driver.SendingWindow.__call__ = lambda self: None
    driver._may_still_be_sent = lambda state: False


def _reuse_the_attempt() -> None:
    from cortex_training.training.state import Segment

    Segment.attempts_failed = lambda self, step, micro_batch: 0


MISTAKES = {
    "resend": Mistake("a step whose answer is missing is sent again", _resend_a_step),
    "takeover": Mistake("a driver goes on with a run without a takeover record", _skip_the_takeover),
    "fsync": Mistake("nothing that is written is synced", _sync_nothing),
    "segment": Mistake("a replaced job goes on under the old segment's number", _keep_the_segment),
    "count": Mistake("nobody looks at global_steps", _skip_the_count),
    "early": Mistake("a save is published before a loss was measured on it", _publish_early),
    "dead": Mistake("a job that has ended is adopted", _adopt_a_dead_job),
    "window": Mistake("permission to send never ends", _drop_the_window),
    "attempt": Mistake("a batch that failed is sent again under its old name", _reuse_the_attempt),
}
