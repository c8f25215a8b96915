"""Reading a streamed generation event by event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cortex_training.answers import RequestStatus
from cortex_training.errors import DeadlineExceeded, RequestFailed
from cortex_training.protocol.context import Context
from cortex_training.protocol.jobs import checked_timeout
from cortex_training.protocol.messages import Flow, Sleep
from cortex_training.protocol.polling import MAX_EVENTS, get_request_status
from cortex_training.states import RequestState, is_terminal_request, request_state

_LAST_LOOK_S = 5.0


@dataclass
class EventStream:
    """Where a reader of a stream's events stands.

    The service delivers each event once. A look whose answer is lost therefore ends the reading with `TransportError`
    rather than going on without the events that were in it.
    """

    context: Context
    job_id: str
    request_id: str
    timeout_s: float | None = None
    _ended: bool = field(default=False, init=False)
    _state: str = field(default="not seen", init=False)

    def __post_init__(self) -> None:
        self._limit_s = checked_timeout(self.context, self.timeout_s)
        self._deadline = self.context.clock() + self._limit_s

    def next_events(self) -> Flow[list[Any] | None]:
        """The next events that came; None when there will be no more. Raises `RequestFailed`, `DeadlineExceeded`."""
        pace = self.context.pace()
        quiet_since = self.context.clock()
        while not self._ended:
            status = yield from self._look()
            events = status.get("events")
            if isinstance(events, list) and events:
                return events
            state = self._state = request_state(status.get("status"))
            self._ended = is_terminal_request(state)
            if state in (RequestState.FAILED, RequestState.CANCELLED):
                error = str(status.get("error") or "")
                raise RequestFailed(job_id=self.job_id, request_id=self.request_id, state=state, error=error)
            if self._ended:
                return None
            now = self.context.clock()
            if now >= self._deadline:
                raise self._too_late()
            yield Sleep(min(pace.delay_s(now - quiet_since), self._deadline - now))
        return None

    def _look(self) -> Flow[RequestStatus]:
        now = self.context.clock()
        # Who was slow to take the events before gets those that came meanwhile.
        deadline = self._deadline if now < self._deadline else now + _LAST_LOOK_S
        try:
            return (
                yield from get_request_status(
                    self.context, self.job_id, self.request_id, max_events=MAX_EVENTS, deadline=deadline
                )
            )
        except DeadlineExceeded as error:
            raise self._too_late() from error

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the stream of request {self.request_id} of job {self.job_id} did not end within {self._limit_s:g} s "
            f"(last state: {self._state})",
            timeout_s=self._limit_s,
        )
