"""Chunks: a large frame cut into frames that the service accepts one by one, and put together again.

A chunk is itself a frame. Its value is ``{"payload": <1-D uint8 tensor>}`` and its operation metadata
``{"request_chunk" | "result_chunk": descriptor}``; the descriptor binds the chunk to the SHA-256 and the length of
the whole frame.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cortex_training._frames import (
    WIRE_FORMAT_VERSION,
    FrameBytes,
    bytes_view,
    frame_buffers,
    loads,
    read_metadata,
)
from cortex_training._safetensors import WireError, encode_header
from cortex_training._tensors import Buffer, Framework
from cortex_training._tree import to_json

CHUNK_OVERHEAD_BYTES = 8192
"""Room that a chunk keeps for its header: a chunk of `max_bytes` carries `max_bytes - 8192` bytes of the frame."""

_KINDS = ("request", "result")

_CHUNK_TREE = to_json({"v": WIRE_FORMAT_VERSION, "tree": ["d", [["payload", ["t", "payload"]]]]}, "the tree of a chunk")


def frame_sha256(frame: FrameBytes | Sequence[Buffer]) -> str:
    """SHA-256 in hex of a frame, given whole or as the buffers of `frame_buffers`."""
    digest = hashlib.sha256()
    for buffer in _as_buffers(frame, "frame_sha256"):
        digest.update(buffer)
    return digest.hexdigest()


def encode_byte_chunks(
    frame: FrameBytes | Sequence[Buffer],
    *,
    kind: str,
    operation: str | None = None,
    max_bytes: int = 0,
    chunk_group_id: str | None = None,
    force_chunk: bool = False,
) -> list[bytes]:
    """All chunks of `iter_byte_chunks` at once."""
    return list(
        iter_byte_chunks(
            frame,
            kind=kind,
            operation=operation,
            max_bytes=max_bytes,
            chunk_group_id=chunk_group_id,
            force_chunk=force_chunk,
        )
    )


def iter_byte_chunks(
    frame: FrameBytes | Sequence[Buffer],
    *,
    kind: str,
    operation: str | None = None,
    max_bytes: int = 0,
    chunk_group_id: str | None = None,
    force_chunk: bool = False,
) -> Iterator[bytes]:
    """Cut a frame, given whole or as the buffers of `frame_buffers`, into frames of at most `max_bytes` bytes.

    A frame that fits, or any frame when `max_bytes` is not positive, is yielded as it is, unless `force_chunk` asks for
    the envelope; `max_bytes` not positive then means one chunk. `kind` is ``"request"`` or ``"result"``; requests carry
    `chunk_group_id`, a random one if None, results never do. The same arguments give the same bytes.

    The frame is hashed once, before the first chunk; then each chunk is built when it is asked for, and the iterator
    keeps none. Raises `WireError` at once, not at the first chunk: for a `max_bytes` that leaves no room beside
    `CHUNK_OVERHEAD_BYTES`, an unknown `kind`, an empty frame.
    """
    if not isinstance(max_bytes, int):
        raise WireError(f"max_bytes must be a whole number of bytes, got {max_bytes!r}")
    for name, text in (("operation", operation), ("chunk_group_id", chunk_group_id)):
        if not isinstance(text, str | None):
            raise WireError(f"{name} must be text, got {text!r:.80}")
    buffers = _as_buffers(frame, "encode_byte_chunks")
    size = sum(len(buffer) for buffer in buffers)
    if not force_chunk and (max_bytes <= 0 or size <= max_bytes):
        return iter([frame if isinstance(frame, bytes) else b"".join(buffers)])
    if size == 0:
        raise WireError("cannot chunk an empty frame; frames are what wire.dumps returns")
    if kind not in _KINDS:
        raise WireError(f"unknown byte chunk kind {kind!r}; use 'request' or 'result'")
    if kind == "result":
        chunk_group_id = None
    elif chunk_group_id is None:
        chunk_group_id = str(uuid.uuid4())
    plan = _ChunkPlan(kind, operation, chunk_group_id, frame_sha256(frame), size, payload_bytes=size)
    if max_bytes > 0:
        plan = plan.fitted(max_bytes)
    return plan.chunks(buffers)


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    kind: str
    operation: str | None
    chunk_group_id: str | None
    frame_sha256: str
    frame_bytes: int
    payload_bytes: int

    @property
    def count(self) -> int:
        return -(-self.frame_bytes // self.payload_bytes)

    def fitted(self, max_bytes: int) -> _ChunkPlan:
        """The plan whose chunks have at most `max_bytes` bytes.

        The payload is halved while a very long operation name or group id makes the header outgrow its reserve.
        """
        if max_bytes <= CHUNK_OVERHEAD_BYTES:
            raise WireError(f"max_bytes must exceed {CHUNK_OVERHEAD_BYTES} bytes, got {max_bytes}")
        payload_bytes = max_bytes - CHUNK_OVERHEAD_BYTES
        while payload_bytes:
            plan = replace(self, payload_bytes=payload_bytes)
            largest = min(payload_bytes, self.frame_bytes)
            if len(plan.header(plan.count - 1, largest)) + largest <= max_bytes:
                return plan
            payload_bytes //= 2
        raise WireError(f"max_bytes {max_bytes} is too small to hold one DSSST1 byte chunk frame")

    def header(self, index: int, payload_bytes: int) -> bytes:
        descriptor: dict[str, Any] = {
            "chunk_idx": index,
            "total_chunks": self.count,
            "frame_sha256": self.frame_sha256,
            "frame_size_bytes": self.frame_bytes,
        }
        if self.chunk_group_id is not None:
            descriptor["chunk_group_id"] = self.chunk_group_id
        if self.operation is not None:
            descriptor["operation"] = self.operation
        op = to_json({f"{self.kind}_chunk": descriptor}, "the chunk descriptor")
        return encode_header({"dss": _CHUNK_TREE, "op": op}, [("payload", "U8", (payload_bytes,), payload_bytes)])

    def chunks(self, buffers: list[memoryview]) -> Iterator[bytes]:
        for index, slices in enumerate(_slices(buffers, self.payload_bytes)):
            yield b"".join([self.header(index, sum(map(len, slices))), *slices])


def _slices(buffers: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Groups of views that hold `size` bytes each, in order; the last group may hold fewer."""
    group: list[memoryview] = []
    room = size
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            view = buffer[start : start + room]
            group.append(view)
            start += len(view)
            room -= len(view)
            if room == 0:
                yield group
                group, room = [], size
    if group:
        yield group


def read_byte_chunk_metadata(frame: FrameBytes) -> dict[str, Any] | None:
    """The descriptor of a chunk, with its ``kind`` added; None for a frame that is not a chunk. Raises `WireError`."""
    metadata = read_metadata(frame)
    if not isinstance(metadata, dict):
        return None
    for kind in _KINDS:
        descriptor = metadata.get(f"{kind}_chunk")
        if isinstance(descriptor, dict):
            return {**descriptor, "kind": kind}
        if descriptor is not None:
            raise WireError(f"the {kind}_chunk descriptor must be an object, got {descriptor!r:.80}")
    return None


def decode_byte_chunks(chunks: Iterable[FrameBytes], *, kind: str | None = None) -> bytes:
    """Put a frame together from all its chunks, in any order, and verify its length and SHA-256.

    A single frame that is not a chunk is returned unchanged. `kind`, if given, is what the chunks must be. Raises
    `WireError`.
    """
    frames = list(chunks)
    if not frames:
        raise WireError("decode_byte_chunks requires at least one frame")
    if len(frames) == 1 and read_byte_chunk_metadata(frames[0]) is None:
        return bytes(frames[0])
    parts = [_ChunkPart.read(frame) for frame in frames]
    payloads = _ordered_payloads(parts, kind)
    expected = parts[0]
    size = sum(map(len, payloads))
    if size != expected.frame_bytes:
        raise WireError(f"reassembled frame size mismatch: {size} bytes, the chunks announce {expected.frame_bytes}")
    frame = b"".join(payloads)
    digest = hashlib.sha256(frame).hexdigest()
    if digest != expected.frame_sha256:
        announced = expected.frame_sha256
        raise WireError(f"reassembled frame sha256 mismatch: {digest}, the chunks announce {announced!r:.80}")
    return frame


@dataclass(frozen=True, slots=True)
class _ChunkPart:
    """One received chunk; text fields hold whatever the descriptor holds, to be compared only."""

    kind: str
    index: int
    total_chunks: int
    frame_sha256: Any
    frame_bytes: int
    chunk_group_id: Any
    operation: Any
    payload: memoryview

    @classmethod
    def read(cls, frame: FrameBytes) -> _ChunkPart:
        descriptor = read_byte_chunk_metadata(frame)
        if descriptor is None:
            raise WireError("decode_byte_chunks received a frame without byte chunk metadata")
        return cls(
            kind=descriptor["kind"],
            index=_whole_number(descriptor, "chunk_idx"),
            total_chunks=_whole_number(descriptor, "total_chunks"),
            frame_sha256=descriptor.get("frame_sha256"),
            frame_bytes=_whole_number(descriptor, "frame_size_bytes"),
            chunk_group_id=descriptor.get("chunk_group_id"),
            operation=descriptor.get("operation"),
            payload=_payload(frame),
        )


_SHARED_FIELDS = {
    "total_chunks": "total_chunks",
    "frame_sha256": "frame_sha256",
    "frame_size_bytes": "frame_bytes",
    "chunk_group_id": "chunk_group_id",
    "operation": "operation",
}
"""What all chunks of a frame agree on: the name in the descriptor and here."""


def _ordered_payloads(parts: list[_ChunkPart], kind: str | None) -> list[memoryview]:
    """Payloads by index, after checking that `parts` are all the chunks of one frame."""
    first = parts[0]
    if any(part.kind != first.kind for part in parts):
        raise WireError("mixed byte chunk kinds")
    if kind is not None and first.kind != kind:
        raise WireError(f"expected {kind} chunks, got {first.kind} chunks")
    for name, field in _SHARED_FIELDS.items():
        if any(getattr(part, field) != getattr(first, field) for part in parts):
            raise WireError(f"byte chunk {name} differs across frames")
    if len(parts) != first.total_chunks:
        raise WireError(f"expected {first.total_chunks} byte chunks, got {len(parts)}")
    payloads: dict[int, memoryview] = {}
    for part in parts:
        if not 0 <= part.index < first.total_chunks:
            raise WireError(f"byte chunk_idx out of range: {part.index} of {first.total_chunks}")
        if part.index in payloads:
            raise WireError(f"duplicate byte chunk_idx {part.index}")
        payloads[part.index] = part.payload
    return [payloads[index] for index in range(len(parts))]


def _whole_number(descriptor: dict[str, Any], field: str) -> int:
    """Servers that pass a descriptor through text or floating point may send ``"3"`` or ``3.0``."""
    value = descriptor.get(field)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise WireError(f"byte chunk {field} must be a whole number, got {value!r:.80}")


def _payload(frame: FrameBytes) -> memoryview:
    """The bytes that a chunk carries, as a view of `frame`."""
    value = loads(frame, framework="numpy")
    payload: Any = value.get("payload") if isinstance(value, dict) else None
    if not hasattr(payload, "dtype"):
        raise WireError("byte chunk payload must be a tensor")
    if payload.dtype != "uint8":
        raise WireError(f"byte chunk payload tensor must be uint8, got {payload.dtype}")
    if len(payload.shape) != 1:
        raise WireError(f"byte chunk payload tensor must be 1-D, got shape {payload.shape}")
    return memoryview(payload)


def encode_result_chunks(value: object, max_bytes: int) -> list[bytes]:
    """`value` as a frame without metadata, in result chunks of at most `max_bytes` bytes. Raises `WireError`."""
    return encode_byte_chunks(frame_buffers(value), kind="result", max_bytes=max_bytes)


def decode_result_chunks(chunks: Iterable[FrameBytes], *, framework: Framework | None = None) -> Any:
    """The value in result chunks, as `loads` returns it. Raises `WireError`."""
    return loads(decode_byte_chunks(chunks, kind="result"), framework=framework)


def _as_buffers(frame: FrameBytes | Sequence[Buffer], function: str) -> list[memoryview]:
    if isinstance(frame, list | tuple):
        return [bytes_view(buffer, function) for buffer in frame]
    return [bytes_view(frame, function)]
