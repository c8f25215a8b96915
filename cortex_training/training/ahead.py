"""Forward-backwards that are sent behind a step before its result is there. Experimental, and off by default.

The service then goes from a step to the next batch without waiting for its answer to travel. It trains the same only
if requests are run in the order of their arrival, which nobody promises; so what was sent ahead is compared with the
service's own times before anything that may contain it is saved.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

from cortex_training.errors import NotFoundError
from cortex_training.states import is_terminal_request
from cortex_training.training import operations
from cortex_training.training.driver import Driver, SegmentLost
from cortex_training.training.frames import Frames
from cortex_training.training.state import Operation


class Ahead:
    """What is sent ahead in one segment, by one driver."""

    def __init__(self, driver: Driver, frames: Frames) -> None:
        self._driver = driver
        self._frames = frames
        self._sent: dict[tuple[int, int], Operation] = {}
        saves = driver.segment.saves()
        self._checked = saves[-1].step if saves else driver.segment.start_step
        """The last step that is known to have run before the batches behind it."""

    async def send_behind(self, step: int) -> None:
        """Send the batches of the next step behind `step`, whose result is not there yet.

        Not where something else comes first: a save of these weights would keep a random state that is one batch on.
        """
        plan, segment = self._driver.plan, self._driver.segment
        if not plan.submit_ahead or step >= plan.steps or self._driver.budget_is_spent:
            return
        every = plan.weight_sync_every_steps
        if plan.save_is_due(step, time.time() - segment.saved_at) or (every is not None and step % every == 0):
            return
        for micro_batch in range(plan.micro_batches_per_step):
            self._sent[step + 1, micro_batch] = await operations.send_forward_backward(
                self._driver, self._frames, step + 1, micro_batch, ahead=True
            )
        # The service is busy now, so this costs nothing.
        await self.require_order(step - 1)

    def sent(self, step: int, micro_batch: int) -> Operation | None:
        return self._sent.pop((step, micro_batch), None)

    async def require_order(self, step: int) -> None:
        """Compare up to the batches behind `step`; raises `SegmentLost` when one of them ran before its step."""
        segment = self._driver.segment
        while self._checked < step:
            following = self._checked + 1
            if segment.was_sent_ahead(following + 1):
                await self._require_order_behind(following)
            self._checked = following

    async def _require_order_behind(self, step: int) -> None:
        segment = self._driver.segment
        stepped = next(o for o in segment.of("step", step) if o.status == "done")
        batches = [o for o in segment.of("forward_backward", step + 1) if o.ahead]
        ended, *others = await asyncio.gather(*(self._ended_at(o) for o in (stepped, *batches)))
        if ended is not None and any(other is not None and other < ended for other in others):
            raise SegmentLost(
                f"job {segment.job_id} ran a batch of step {step + 1} before step {step}, behind which it was sent; "
                "this service changes the order of requests: leave submit_ahead and assume_fifo out of the plan"
            )

    async def _ended_at(self, operation: Operation) -> float | None:
        """When a request ended, in UTC seconds; None when it has not, or the service does not know or say."""
        job_id, request_id = self._driver.segment.job_id, operation.request_id
        if request_id is None:
            return None
        try:
            status: dict[str, Any] = await self._driver.on_job(
                f"look at {operation.op} of step {operation.step}",
                lambda: self._driver.client.get_request_status(job_id, request_id, max_events=1),
            )
        except NotFoundError:
            return None
        return _time_of(status) if is_terminal_request(status.get("status")) else None


def _time_of(status: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(status.get("updated_at"))).timestamp()
    except ValueError:
        return None
