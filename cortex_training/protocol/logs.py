"""Following a job's logs page by page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cortex_training.answers import LogPage
from cortex_training.errors import ApiError
from cortex_training.protocol.context import Context
from cortex_training.protocol.jobs import get_job
from cortex_training.protocol.messages import Flow, Sleep
from cortex_training.protocol.operations import tail_logs
from cortex_training.protocol.pace import Bounds, Pace
from cortex_training.protocol.polling import POLL_REFUSALS
from cortex_training.states import is_terminal_job

_LOOK_AT_JOB_EVERY_S = 15.0


@dataclass
class LogStream:
    """Where a reader of the logs stands. `follow` reads on until the job has ended and its last lines were read."""

    context: Context
    job_id: str
    sub_job_id: str | None = None
    sub_job_type: str | None = None
    cursor: str | None = None
    max_lines: int | None = None
    follow: bool = True
    poll_interval: float | None = None
    _ended: bool = field(default=False, init=False)
    _began: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        shortest_s = self.poll_interval or self.context.policy.poll_interval or 0.5
        longest_s = max(shortest_s, self.context.policy.poll_max_interval or 6.0)
        self._bounds = Bounds(shortest_s, longest_s, self.context.policy.poll_backoff_multiplier or 1.25)
        self._looked_at_job = -math.inf

    def next_entries(self) -> Flow[list[Any] | None]:
        """The next page that holds entries; None when there will be no more."""
        pace = Pace(self._bounds, self.context.random)
        while True:
            page = yield from self._page()
            if page is None:
                return None
            # A page that repeats under an unmoved cursor is the same page: yielding it again would never end.
            fresh = self._advance(page.get("next_cursor")) or not self._began
            self._began = True
            entries = page.get("entries")
            if isinstance(entries, list) and entries and fresh:
                return entries
            if self._ended or not self.follow:
                return None
            self._ended = yield from self._job_has_ended()
            if not self._ended:
                yield Sleep(pace.delay_s(0.0))

    def _page(self) -> Flow[LogPage | None]:
        """The page after the cursor; None when the job has ended since the last one, and its logs are closed.

        A service serves the logs of jobs that run. One that ended before anything was read is the caller's to hear of.
        """
        try:
            return (
                yield from tail_logs(
                    self.context,
                    self.job_id,
                    sub_job_id=self.sub_job_id,
                    sub_job_type=self.sub_job_type,
                    cursor=self.cursor,
                    max_lines=self.max_lines,
                )
            )
        except ApiError as refusal:
            if not self._began or refusal.status not in POLL_REFUSALS:
                raise
            self._looked_at_job = -math.inf
            if not (yield from self._job_has_ended()):
                raise
            return None

    def _advance(self, following: object) -> bool:
        # An empty cursor must not replace the known one: reading would start again at the first line.
        if not isinstance(following, str) or not following or following == self.cursor:
            return False
        self.cursor = following
        return True

    def _job_has_ended(self) -> Flow[bool]:
        now = self.context.clock()
        if now - self._looked_at_job < _LOOK_AT_JOB_EVERY_S:
            return False
        self._looked_at_job = now
        try:
            job = yield from get_job(self.context, self.job_id)
        except ApiError:
            return False
        return is_terminal_job(job.get("status"))
