"""Waiting for a request: when to ask, what a page of its answer means, and when nothing more will come."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from cortex_training.answers import RequestResult, RequestStatus
from cortex_training.errors import (
    ApiError,
    ConfigurationError,
    DeadlineExceeded,
    ProtocolError,
    RequestFailed,
)
from cortex_training.protocol import calls, results
from cortex_training.protocol.context import Context, Submitted
from cortex_training.protocol.exchange import exchange_json
from cortex_training.protocol.jobs import checked_timeout, get_job, job_failed
from cortex_training.protocol.messages import Flow, Kind, Sleep, computed
from cortex_training.protocol.urls import segment
from cortex_training.states import RequestState, is_terminal_job, is_terminal_request, request_state

_log = logging.getLogger("cortex_training")

MAX_EVENTS = 512
POLL_REFUSALS = frozenset({400, 404, 409, 410, 412})
"""Statuses by which a poll may be refused because its job does not run; the job's own state tells."""

_MAX_REREADS = 3
"""How often one damaged or empty page of a finished result is asked for again."""
_STATES_IN_FLIGHT = frozenset({RequestState.PENDING, RequestState.RUNNING, RequestState.STREAMING})


def get_request_status(
    context: Context,
    job_id: str,
    request_id: str,
    max_events: int | None = None,
    cursor: str | None = None,
    *,
    deadline: float | None = None,
) -> Flow[RequestStatus]:
    if max_events is not None and (type(max_events) is not int or not 1 <= max_events <= MAX_EVENTS):
        raise ConfigurationError.of("max_events", max_events, f"must be a whole number from 1 to {MAX_EVENTS}")
    # Asking for a stream's events makes the service forget them; asking by cursor, or for the state, does not.
    drains = max_events is not None and not cursor
    submitted = context.submitted.get((job_id, request_id))
    drains = drains or (submitted is not None and submitted.operation == "generate-stream")
    kind = Kind.DRAINED if drains else Kind.SAFE
    status = yield from _read_status(
        context, job_id, request_id, cursor, max_events=max_events, kind=kind, deadline=deadline
    )
    events = status.get("events")
    if isinstance(events, list):
        opened = yield from computed(lambda: [results.event_opened(event) for event in events], _rough_size(events))
        status = {**status, "events": opened}
    return cast(RequestStatus, status)


def _read_status(
    context: Context,
    job_id: str,
    request_id: str,
    cursor: str | None,
    *,
    max_events: int | None = None,
    kind: Kind = Kind.SAFE,
    deadline: float | None = None,
) -> Flow[dict[str, Any]]:
    path = f"{calls.job_path(job_id)}/requests/{segment('request_id', request_id)}"
    query = {"max_events": max_events, "cursor": cursor or None}
    request = calls.get(context, path, "get-request-status", job_id=job_id, query=query)
    request = replace(request, kind=kind, names=(job_id, request_id))
    status = yield from exchange_json(context, request, deadline=deadline)
    return status


def poll_request(
    context: Context, job_id: str, request_id: str, *, timeout_s: float | None = None
) -> Flow[RequestResult]:
    """The result of a request.

    Raises `RequestFailed`, `JobFailed` when the job ended under it, `DeadlineExceeded` after `timeout_s` seconds (the
    client's poll timeout by default), `ProtocolError`.
    """
    limit_s = checked_timeout(context, timeout_s)
    wait = _Wait(context, job_id, request_id, limit_s)
    try:
        if wait.is_too_early():
            yield from _pause(context, wait)
        result: RequestResult = yield from _poll(context, wait)
    except DeadlineExceeded as error:
        raise wait.too_late() from error
    return result


@dataclass
class _Wait:
    """One wait: its times, what has arrived so far, and what it has already complained about."""

    context: Context
    job_id: str
    request_id: str
    limit_s: float
    cursor: str | None = None
    state: str = "not seen"
    chunks: results.ResultChunks = field(default_factory=results.ResultChunks)
    stream: list[dict[str, Any]] = field(default_factory=list)
    fruitless: int = 0
    """Pages in a row, after the end of the request, that brought nothing new."""
    damaged: bool = False
    """Whether the last page held a chunk that was not what the service hashed."""

    def __post_init__(self) -> None:
        self.began = self.context.clock()
        self.deadline = self.began + self.limit_s
        self.submitted: Submitted | None = self.context.submitted.get((self.job_id, self.request_id))
        self.durations = (
            self.context.durations_of(self.job_id, self.submitted.operation) if self.submitted is not None else None
        )
        self.pace = self.context.pace(self.durations.recent() if self.durations is not None else ())
        self.pending_until_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Since the submission where this client made it, else since the wait began."""
        return self.context.clock() - (self.submitted.at if self.submitted is not None else self.began)

    def is_too_early(self) -> bool:
        """Just submitted, and such requests are known never to be done this soon."""
        return self.submitted is not None and self.pace.is_too_early(self.elapsed_s)

    def saw(self, state: str, asked_at_s: float) -> None:
        if state not in _STATES_IN_FLIGHT and not is_terminal_request(state) and state != self.state:
            _log.warning(
                "request %s of job %s is in the unknown state %r; waiting on until the deadline",
                self.request_id,
                self.job_id,
                state,
            )
        self.state = state
        if not is_terminal_request(state):
            self.pending_until_s = asked_at_s

    def learn(self) -> None:
        """Remember how long it took, once, for the waits that follow."""
        if self.submitted is None or self.durations is None:
            return
        if self.context.submitted.pop((self.job_id, self.request_id)) is not None:
            self.durations.observe(self.pending_until_s, self.elapsed_s)

    def too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"request {self.request_id} of job {self.job_id} had no result within {self.limit_s:g} s (last state: "
            f"{self.state}). The work goes on: poll the same id again.",
            timeout_s=self.limit_s,
        )


def _poll(context: Context, wait: _Wait) -> Flow[Any]:
    while True:
        asked_at_s = wait.elapsed_s
        status = yield from _look(context, wait)
        if status is None:
            yield from _pause(context, wait)
            continue
        state = request_state(status.get("status"))
        wait.saw(state, asked_at_s)
        arrived = yield from _take_events(wait, status)
        if state in (RequestState.FAILED, RequestState.CANCELLED):
            wait.learn()
            raise RequestFailed(
                job_id=wait.job_id, request_id=wait.request_id, state=state, error=_text(status.get("error"))
            )
        if state == RequestState.DONE:
            wait.learn()
            if _nothing_more(wait, status, arrived):
                return (yield from _result(wait, status))
        if arrived and context.clock() < wait.deadline:
            continue
        yield from _pause(context, wait)


def _look(context: Context, wait: _Wait) -> Flow[dict[str, Any] | None]:
    """One page of the request's status; None when the service refuses it although the job may still run.

    A job that ended answers polls of its requests with a refusal. Then the job's own state is the answer.
    """
    try:
        return (yield from _read_status(context, wait.job_id, wait.request_id, wait.cursor, deadline=wait.deadline))
    except ApiError as refusal:
        if refusal.status not in POLL_REFUSALS:
            raise
        try:
            job = yield from get_job(context, wait.job_id, deadline=wait.deadline)
        except ApiError:
            raise refusal from None
        if is_terminal_job(job.get("status")):
            raise job_failed(wait.job_id, job) from refusal
        if refusal.status != 409:
            raise
        return None


def _pause(context: Context, wait: _Wait) -> Flow[None]:
    remaining_s = wait.deadline - context.clock()
    if remaining_s <= 0:
        raise wait.too_late()
    yield Sleep(wait.pace.delay_within_s(wait.elapsed_s, remaining_s))


def _take_events(wait: _Wait, status: Mapping[str, Any]) -> Flow[bool]:
    """Keep what a page brought; True if any of it is new."""
    events = status.get("events")
    events = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    chunk_events = [event for event in events if event.get("type") == "result_chunk"]
    try:
        new_chunks = yield from computed(
            lambda: [wait.chunks.add(event) for event in chunk_events], _rough_size(chunk_events)
        )
    except results.CorruptChunk:
        wait.damaged = True
        wait.fruitless += 1
        if wait.fruitless > _MAX_REREADS:
            raise
        return False  # without a new cursor the same page is read again
    wait.damaged = False
    others = [event for event in events if event.get("type") != "result_chunk"]
    if others:
        wait.stream += yield from computed(
            lambda: [results.event_opened(event) for event in others], _rough_size(others)
        )
    following = status.get("next_cursor")
    moved = isinstance(following, str) and following != "" and following != wait.cursor
    if moved:
        wait.cursor = following
    if any(new_chunks) or others:
        wait.fruitless = 0
        return True
    return False


def _nothing_more(wait: _Wait, status: Mapping[str, Any], arrived: bool) -> bool:
    """Whether a finished request has delivered everything that will ever come."""
    if wait.chunks.complete:
        return True
    if arrived or wait.damaged:
        return False  # chunks or stream events came; the next page may bring more
    has_cursor = isinstance(status.get("next_cursor"), str) and status["next_cursor"] != ""
    if not wait.chunks.frames and not has_cursor:
        return True
    wait.fruitless += 1
    if wait.fruitless <= _MAX_REREADS:
        return False
    if wait.chunks.frames:
        raise ProtocolError(
            f"request {wait.request_id} of job {wait.job_id} is done, but only {len(wait.chunks.frames)} of "
            f"{wait.chunks.total} result chunks can be read"
        )
    return True


def _result(wait: _Wait, status: Mapping[str, Any]) -> Flow[Any]:
    raw = status.get("result")
    if wait.chunks.frames:
        value = yield from computed(wait.chunks.value, wait.chunks.size)
        return results.final(results.with_metrics(value, raw))
    value = yield from computed(lambda: results.opened(raw), _rough_size([raw]))
    value = results.final(value)
    if wait.stream:
        value = _with_stream(wait, value)
    return value


def _with_stream(wait: _Wait, value: Any) -> Any:
    """The events of a streamed generation beside its result, in the order of their prompts, errors included."""
    failed = [event for event in wait.stream if event.get("type") == "error"]
    for event in failed:
        _log.warning("request %s of job %s: %s", wait.request_id, wait.job_id, _text(event.get("error")))
    if any(event.get("index") is None for event in failed):
        errors = "; ".join(_text(event.get("error")) for event in failed)
        raise RequestFailed(job_id=wait.job_id, request_id=wait.request_id, state="failed", error=errors)
    delivered = sum(event.get("type") in ("result", "error") for event in wait.stream)
    announced = sum(
        _count(event.get("completed")) + _count(event.get("failed"))
        for event in wait.stream
        if event.get("type") == "done"
    )
    if announced > delivered:
        raise ProtocolError(
            f"request {wait.request_id} of job {wait.job_id} finished {announced} prompts and delivered {delivered}: "
            "events of a stream are delivered once, and some were lost with an answer that did not arrive or were read "
            "by somebody else"
        )
    ordered = sorted(wait.stream, key=lambda event: (event.get("type") == "done", _count(event.get("index"))))
    return {**value, "events": ordered} if isinstance(value, dict) else {"result": value, "events": ordered}


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _text(error: object) -> str:
    if error is None or isinstance(error, str):
        return error or ""
    try:
        return json.dumps(error)
    except (TypeError, ValueError):
        return repr(error)


def _rough_size(events: list[Any]) -> int:
    """About how many bytes of base64 a list of events holds."""
    size = 0
    for event in events:
        for value in event.values() if isinstance(event, dict) else ():
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, dict):
                size += sum(len(part) for part in value.values() if isinstance(part, str))
    return size
