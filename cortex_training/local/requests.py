"""Data-plane requests: an execution that happens once, the request ids that stand for it, and the pages polls get."""

from __future__ import annotations

import base64
import hashlib
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from cortex_training import wire
from cortex_training.local.refusals import Refusal, bad_field
from cortex_training.states import RequestState

DEFAULT_EVENTS, MAX_EVENTS = 16, 512


class CancelledWhileRunning(Exception):
    """Raised by work that noticed `Execution.stop`, having changed nothing that lasts."""


@dataclass(frozen=True)
class OnDisk:
    """A result that is not in memory."""

    read: Callable[[], Any]


@dataclass(frozen=True)
class Delivery:
    """How the caller asked to get the result, in the frame's `response_options`."""

    framed: bool = False
    chunked: bool = False


@dataclass
class Execution:
    """Something that runs once. Several requests may stand for it."""

    operation: str
    job_id: str
    sub_job_id: str
    delivery: Delivery = field(default_factory=Delivery)
    chunk_group_id: str | None = None
    frame_sha256: str | None = None
    execution_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: RequestState = RequestState.PENDING
    result: Any = None
    """What a poll's `result` is, once done; or OnDisk, which reads it."""
    result_chunks: Sequence[bytes] = field(default_factory=list, repr=False)
    """Chunk frames instead of `result`, when it is large."""
    streaming: bool = False
    events: deque[dict[str, Any]] = field(default_factory=deque, repr=False)
    """What a streaming request has to tell; what a poll took is gone."""
    error: str = ""
    updated_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    """When the sub-job's thread had done it, in epoch seconds: the order in which things really happened."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when a cancel-request wants it to end early."""
    drop_from_queue: Callable[[], bool] = lambda: False
    """Takes it out of its sub-job's queue; False when it has begun."""
    failure: str | None = None
    """Why it shows as failed, whatever becomes of it."""
    busy_s: float = 0.0
    """How long a sub-job's thread worked on it."""
    when_over: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Called in the event loop when it is over."""

    def move_to(self, state: RequestState, *, error: str = "") -> None:
        self.state, self.error, self.updated_at = state, error, time.time()
        if self.is_over:
            for tell in self.when_over:
                tell()

    @property
    def is_over(self) -> bool:
        return self.state in (RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED)


@dataclass
class Request:
    """One id that a caller polls."""

    execution: Execution
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    created_at: float = field(default_factory=time.time)

    def page(self, cursor: str | None, max_events: str | None) -> dict[str, Any]:
        """The body of a poll. Raises Refusal (400) for a cursor or a count that cannot be."""
        count = min(_read_count("max_events", max_events, DEFAULT_EVENTS, least=1), MAX_EVENTS)
        if self.execution.streaming:
            return self._stream_page(count)
        chunks = self.execution.result_chunks
        first = _read_count("cursor", cursor, 0, least=0)
        if first > len(chunks):
            raise bad_field("cursor", cursor, f"is not a cursor of this request, which has {len(chunks)} result chunks")
        last = min(first + count, len(chunks))
        events = [_chunk_event(chunk) for chunk in chunks[first:last]]
        return self._page(self.execution.state, events, str(last) if last < len(chunks) else "")

    def _stream_page(self, count: int) -> dict[str, Any]:
        waiting = self.execution.events
        events = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        going_on = self.execution.state == RequestState.RUNNING or (
            self.execution.state == RequestState.DONE and waiting
        )
        return self._page(RequestState.STREAMING if going_on else self.execution.state, events, "")

    def _page(self, state: RequestState, events: list[dict[str, Any]], next_cursor: str) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "status": str(state),
            "created_at": timestamp(self.created_at),
            "updated_at": timestamp(self.execution.updated_at),
            "result": self.execution.result.read()
            if isinstance(self.execution.result, OnDisk)
            else self.execution.result,
            "error": self.execution.error,
            "events": events,
            "next_cursor": next_cursor,
        }


def read_delivery(metadata: object) -> Delivery:
    """Read ``response_options`` from a frame's operation metadata. Raises Refusal (400) for a value it cannot have."""
    options = metadata.get("response_options") if isinstance(metadata, dict) else None
    if options is None:
        return Delivery()
    if not isinstance(options, dict):
        raise bad_field("response_options", options, "must be an object")
    form: Literal["json", "dssst1"] = options.get("format", "json")
    if form not in ("json", "dssst1"):
        raise bad_field("response_options.format", form, "must be json or dssst1")
    return Delivery(framed=form == "dssst1", chunked=options.get("delivery") == "chunked")


def deliver(result: Any, delivery: Delivery, *, chunk_bytes: int) -> tuple[Any, list[bytes]]:
    """Turn a result into what polls show: (`result`, no chunks) or (None, chunks). `result` may hold torch tensors."""
    if not delivery.framed:
        return plain_json(result), []
    frame = wire.dumps(result)
    if delivery.chunked and len(frame) > chunk_bytes:
        return None, wire.encode_result_chunks(result, chunk_bytes)
    payload = base64.b64encode(frame).decode()
    return {
        "content_type": "application/octet-stream",
        "encoding": "base64",
        "wire_format": wire.WIRE_FORMAT_VERSION,
        "payload_b64": payload,
    }, []


def plain_json(value: Any) -> Any:
    """`value` with tensors as lists, and numbers that JSON does not have (a loss that is not a number) as null."""
    if isinstance(value, dict):
        return {key: plain_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return plain_json(value.tolist())
    return value


def timestamp(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _chunk_event(chunk: bytes) -> dict[str, Any]:
    return {
        "type": "result_chunk",
        "payload_b64": base64.b64encode(chunk).decode(),
        "payload_sha256": hashlib.sha256(chunk).hexdigest(),
    }


def _read_count(name: str, text: str | None, default: int, *, least: int) -> int:
    if text is None or text == "":
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
        raise bad_field(name, text, f"must be a whole number of at least {least}")
    return int(text)


def refuse_unknown(request_id: str, job_id: str) -> Refusal:
    return Refusal(404, f"request {request_id!r} of job {job_id} does not exist")
