"""Frames that are posted in chunks, and the one restart a call makes when the service lost the first ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from cortex_training import wire
from cortex_training._safetensors import read_header_text
from cortex_training.errors import ChunkGroupRestartError, ConfigurationError, ProtocolError
from cortex_training.protocol import calls
from cortex_training.protocol.calls import Permit
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import exchange_json, required_text
from cortex_training.protocol.messages import Flow, Kind, computed

MAX_REQUEST_BYTES = 60 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChunkedCall:
    """One logical operation. `final_kind` is the kind of its last chunk, the one that schedules the work."""

    path: str
    operation: str
    job_id: str
    frame: memoryview = field(repr=False)
    group_id: str
    final_kind: Kind
    permit: Permit = field(repr=False, default=None)
    max_bytes: int = MAX_REQUEST_BYTES

    def chunks(self) -> Iterator[bytes]:
        """The same bytes every time: a chunk sent again must not differ from what the service already holds."""
        return wire.iter_byte_chunks(
            self.frame,
            kind="request",
            operation=self.operation,
            max_bytes=self.max_bytes,
            chunk_group_id=self.group_id,
            force_chunk=True,
        )


def checked_frame(function: str, frame: object) -> memoryview:
    """A view of a DSSST1 frame. Raises `ConfigurationError` for anything the service could not read."""
    if not isinstance(frame, bytes | bytearray | memoryview):
        kind = type(frame).__name__
        raise ConfigurationError(f"{function}: the frame must be bytes made by wire.dumps, got {kind}", field="frame")
    view = memoryview(frame)
    view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    if not _is_frame(view):
        raise ConfigurationError(
            f"{function}: these {view.nbytes} bytes are not a DSSST1 frame; make it with wire.dumps or "
            "serialize_forward_backward_args",
            field="frame",
        )
    return view


def _is_frame(view: memoryview) -> bool:
    try:
        metadata = read_header_text(view)[0].get("__metadata__")
    except wire.WireError:
        return False
    return isinstance(metadata, dict) and "dss" in metadata


def send_chunks(context: Context, call: ChunkedCall) -> Flow[str]:
    """Post all chunks in order; the id of the request that the last one scheduled."""
    try:
        return (yield from _send_once(context, call))
    except ChunkGroupRestartError:
        # The workers came back without the first chunks. Nothing was executed under this id, and the same bytes under
        # the same id are the same operation, so starting over is safe. Twice in a row is the caller's to see.
        return (yield from _send_once(context, call))


def _send_once(context: Context, call: ChunkedCall) -> Flow[str]:
    chunks = yield from computed(call.chunks, call.frame.nbytes)
    for index in itertools.count():
        # One chunk is in memory at a time; it says itself how many there are.
        chunk = yield from computed(lambda: next(chunks), min(call.frame.nbytes, call.max_bytes))
        described = wire.read_byte_chunk_metadata(chunk) or {}
        is_last = index + 1 == described.get("total_chunks")
        kind = call.final_kind if is_last else Kind.IDEMPOTENT
        request = calls.post_frame(
            context, call.path, call.operation, chunk, kind, job_id=call.job_id, permit=call.permit
        )
        reply = yield from exchange_json(context, request)
        if is_last:
            request_id = required_text(request, reply, "request_id")
            context.remember_request(call.job_id, request_id, call.operation)
            return request_id
        if "request_id" in reply:
            raise ProtocolError(
                f"chunk {index} of {call.operation} on job {call.job_id} unexpectedly returned a request_id before the "
                "last chunk was sent"
            )
    raise AssertionError("unreachable: the last chunk returns")
