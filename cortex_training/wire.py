"""DSSST1, the binary format of the Cortex Training service: frames, and the chunks that carry large frames.

A frame is a safetensors file that holds nested dicts, lists and tuples of tensors and JSON values; nothing in it is
ever executed. Frames written here are the same bytes for the same value, on every machine, because a forward-backward
that is sent again must be the same message.

What a frame does not keep: a tuple below a dict or list *without any tensor* comes back as a list; in such a dict the
keys 1, 1.5, True and None come back as text (keys that would become equal are refused); a named tuple comes back as a
tuple; a numpy scalar comes back as the Python number of the same value. Views of one storage are written in full
each.

Tensors are numpy arrays, torch tensors if the caller has loaded torch, or `RawTensor` for dtypes that numpy lacks.
Dtypes: bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, complex64 and four kinds of float8.
"""

from __future__ import annotations

import hashlib
import mmap
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cortex_training._safetensors import (
    MAX_HEADER_BYTES,
    WireError,
    encode_header,
    file_order,
    parse,
    read_header_text,
)
from cortex_training._tensors import Buffer, Framework, RawTensor, TensorBytes, build_tensor, choose_framework
from cortex_training._tree import MAX_NESTING, PLACEHOLDER, TreeEncoder, decode_tree, from_json, to_json

__all__ = [
    "CHUNK_OVERHEAD_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_NESTING",
    "WIRE_FORMAT_VERSION",
    "RawTensor",
    "WireError",
    "decode_byte_chunks",
    "decode_result_chunks",
    "dumps",
    "encode_byte_chunks",
    "encode_result_chunks",
    "frame_buffers",
    "frame_sha256",
    "iter_byte_chunks",
    "loads",
    "read_byte_chunk_metadata",
    "read_metadata",
]

WIRE_FORMAT_VERSION = "DSSST1"

CHUNK_OVERHEAD_BYTES = 8192
"""Room that a chunk keeps for its header: a chunk of `max_bytes` carries `max_bytes - 8192` bytes of the frame."""

FrameBytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
ChunkKind: TypeAlias = Literal["request", "result"]

_SIGNATURES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""Pickle protocols 2 to 5, and the zip that torch.save writes."""


def dumps(value: object, metadata: Any = None) -> bytes:
    """One frame that holds `value`, and `metadata` as its operation metadata unless that is empty.

    Raises `WireError` for what a frame cannot carry, with the path to it: other types, unsupported dtypes, keys that
    would not come back, a value that contains itself, nesting beyond `MAX_NESTING`, JSON beyond `MAX_HEADER_BYTES`.
    """
    return b"".join(frame_buffers(value, metadata))


def frame_buffers(value: object, metadata: Any = None) -> list[Buffer]:
    """The bytes of `dumps` as a list: the header, then each tensor in file order.

    Row-major tensors in CPU memory are not copied, so their content must not change until the buffers are used. Raises
    `WireError` as `dumps` does.
    """
    encoder = TreeEncoder()
    tree = encoder.encode(value)
    texts = {"dss": to_json({"v": WIRE_FORMAT_VERSION, "tree": tree}, "the value")}
    if metadata:
        texts["op"] = to_json(metadata, "metadata")
    tensors = encoder.tensors or [(PLACEHOLDER, TensorBytes("U8", (1,), b"\0"))]
    tensors.sort(key=lambda item: file_order(item[1].dtype, item[0]))
    header = encode_header(texts, [(name, t.dtype, t.shape, len(t.data)) for name, t in tensors])
    return [header, *(t.data for _, t in tensors if len(t.data))]


def loads(frame: FrameBytes, *, framework: Framework | None = None) -> Any:
    """The value of a frame.

    `framework` says what tensors become: ``"numpy"``, ``"torch"``, or for None torch if it is loaded and numpy
    otherwise. Arrays of numpy are read-only views of `frame`, whatever its type; dtypes that numpy lacks become
    `RawTensor`. torch tensors share the memory of a writable frame (bytearray) and copy from a read-only one, since
    torch cannot protect it.

    Raises `WireError`, and nothing else, for any malformed frame.
    """
    library = choose_framework(framework)
    view = _bytes_view(frame, "loads")
    try:
        header = parse(view)
    except WireError as error:
        if bytes(view[:4]).startswith(_SIGNATURES):
            raise WireError(
                "refusing to deserialize a legacy pickle/torch.save payload; "
                "the peer must use the DSSST1 safetensors wire protocol"
            ) from None
        raise WireError(f"not a valid DSSST1 safetensors payload: {error}") from None
    tree = _tree_of(header.metadata)
    infos = header.tensors
    infos.pop(PLACEHOLDER, None)
    body = view[header.length :]
    built: dict[str, Any] = {}

    def tensor(name: str) -> Any:
        if name not in built:
            if name not in infos:
                raise WireError(f"the tree refers to tensor {name!r:.80}, which the frame does not hold")
            info = infos[name]
            built[name] = build_tensor(library, info.dtype, info.shape, body[info.begin : info.end])
        return built[name]

    try:
        return decode_tree(tree, tensor)
    except RecursionError:
        raise WireError("the DSSST1 tree nests too deeply for this process") from None


def _tree_of(metadata: dict[str, str]) -> Any:
    if "dss" not in metadata:
        raise WireError("DSSST1 structure missing from safetensors header")
    document = from_json(metadata["dss"], "the DSSST1 structure")
    if not isinstance(document, dict):
        raise WireError(f"the DSSST1 structure must be an object, got {document!r:.80}")
    if document.get("v") != WIRE_FORMAT_VERSION:
        raise WireError(f"unsupported DSSST1 wire version {document.get('v')!r:.80}")
    if "tree" not in document:
        raise WireError("the DSSST1 structure has no tree")
    return document["tree"]


def read_metadata(frame: FrameBytes) -> Any:
    """The operation metadata of a frame, ``{}`` without metadata or header; tensors may be missing or cut off.

    An object in every frame of the service, though the format allows any JSON value. Raises `WireError` when the
    metadata is not JSON, or `frame` not bytes.
    """
    view = _bytes_view(frame, "read_metadata")
    try:
        texts = read_header_text(view)[0].get("__metadata__")
    except WireError:
        return {}
    text = texts.get("op") if isinstance(texts, dict) else None
    return from_json(text, "operation metadata") if isinstance(text, str) else {}


def frame_sha256(buffers: FrameBytes | Sequence[Buffer]) -> str:
    """SHA-256 in hex of a frame, given whole or as the buffers of `frame_buffers`."""
    digest = hashlib.sha256()
    for buffer in _as_buffers(buffers):
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
    """Cut a frame (whole, or the buffers of `frame_buffers`) into chunks of at most `max_bytes` bytes, frames themselves.

    A frame that fits, or any frame when `max_bytes` is not positive, is yielded as it is, unless `force_chunk` asks for
    the envelope; `max_bytes` not positive then means one chunk. `kind` is ``"request"`` or ``"result"``; requests carry
    `chunk_group_id`, a random one if None, results never do. The same arguments give the same bytes.

    The frame is hashed once, before the first chunk; then each chunk is built when it is asked for, and only that one
    is in memory. Raises `WireError` at once, not at the first chunk.
    """
    buffers = _as_buffers(frame)
    total = sum(len(buffer) for buffer in buffers)
    if not force_chunk and (max_bytes <= 0 or total <= max_bytes):
        whole = frame if isinstance(frame, bytes) else b"".join(buffers)
        return iter([whole])
    if total == 0:
        raise WireError("cannot chunk an empty frame; forward_backward and generate send what wire.dumps returns")
    if kind not in ("request", "result"):
        raise WireError(f"unknown byte chunk kind {kind!r}")
    group = None if kind == "result" else str(uuid.uuid4()) if chunk_group_id is None else chunk_group_id
    plan = _ChunkPlan(kind, operation, group, frame_sha256(buffers), total, total)
    if max_bytes > 0:
        plan = plan.fitted(max_bytes)
    return plan.chunks(buffers)


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    kind: str
    operation: str | None
    group: str | None
    sha256: str
    frame_bytes: int
    payload_bytes: int

    @property
    def count(self) -> int:
        return -(-self.frame_bytes // self.payload_bytes)

    def fitted(self, max_bytes: int) -> _ChunkPlan:
        """The plan whose chunks have at most `max_bytes` bytes: the reserve for the header, and half as much payload
        again and again for a header that needs more (a very long operation name or group id)."""
        if max_bytes <= CHUNK_OVERHEAD_BYTES:
            raise WireError(f"max_bytes must exceed {CHUNK_OVERHEAD_BYTES} bytes, got {max_bytes}")
        size = max_bytes - CHUNK_OVERHEAD_BYTES
        while True:
            plan = _ChunkPlan(self.kind, self.operation, self.group, self.sha256, self.frame_bytes, size)
            largest = min(size, self.frame_bytes)
            if len(plan.header(plan.count - 1, largest)) + largest <= max_bytes:
                return plan
            if size == 1:
                raise WireError(f"max_bytes {max_bytes} is too small to hold one DSSST1 byte chunk frame")
            size //= 2

    def header(self, index: int, size: int) -> bytes:
        described: dict[str, Any] = {
            "chunk_idx": index,
            "total_chunks": self.count,
            "frame_sha256": self.sha256,
            "frame_size_bytes": self.frame_bytes,
        }
        if self.group is not None:
            described["chunk_group_id"] = self.group
        if self.operation is not None:
            described["operation"] = self.operation
        tree = {"v": WIRE_FORMAT_VERSION, "tree": ["d", [["payload", ["t", "payload"]]]]}
        texts = {"dss": to_json(tree, "tree"), "op": to_json({f"{self.kind}_chunk": described}, "chunk descriptor")}
        return encode_header(texts, [("payload", "U8", (size,), size)])

    def chunks(self, buffers: list[memoryview]) -> Iterator[bytes]:
        for index, slices in enumerate(_slices(buffers, self.payload_bytes)):
            yield b"".join([self.header(index, sum(map(len, slices))), *slices])


def _slices(buffers: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Groups of views that hold `size` bytes each, in order; the last group may be smaller."""
    group: list[memoryview] = []
    room = size
    for buffer in buffers:
        while len(buffer):
            group.append(buffer[:room])
            buffer = buffer[room:]
            room = size - sum(map(len, group))
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
    for kind in ("request", "result"):
        described = metadata.get(f"{kind}_chunk")
        if described is None:
            continue
        if not isinstance(described, dict):
            raise WireError(f"the {kind}_chunk descriptor must be an object, got {described!r:.80}")
        return {**described, "kind": kind}
    return None


def decode_byte_chunks(chunks: Iterable[FrameBytes], *, kind: str | None = None) -> bytes:
    """Put a frame together from all its chunks, in any order, and verify its length and SHA-256.

    A single frame that is not a chunk is returned unchanged. `kind`, if given, is what the chunks must be. Raises
    `WireError`.
    """
    frames = list(chunks)
    if not frames:
        raise WireError("decode_byte_chunks requires at least one frame")
    described = [read_byte_chunk_metadata(frame) for frame in frames]
    if len(frames) == 1 and described[0] is None:
        return frames[0] if isinstance(frames[0], bytes) else bytes(_bytes_view(frames[0], "decode_byte_chunks"))
    parts = [_ChunkPart.read(frame, descriptor) for frame, descriptor in zip(frames, described, strict=True)]
    payloads = _ordered_payloads(parts, kind)
    first = parts[0]
    size = sum(map(len, payloads))
    if size != first.frame_bytes:
        raise WireError(f"reassembled frame size mismatch: {size} bytes, the chunks announce {first.frame_bytes}")
    frame = b"".join(payloads)
    found = hashlib.sha256(frame).hexdigest()
    if found != first.sha256:
        raise WireError(f"reassembled frame sha256 mismatch: {found}, the chunks announce {first.sha256!r:.80}")
    return frame


@dataclass(frozen=True, slots=True)
class _ChunkPart:
    kind: str
    index: int
    total_chunks: int
    sha256: Any
    frame_bytes: int
    group: Any
    operation: Any
    payload: memoryview

    @classmethod
    def read(cls, frame: FrameBytes, descriptor: dict[str, Any] | None) -> _ChunkPart:
        if descriptor is None:
            raise WireError("decode_byte_chunks received a frame without byte chunk metadata")
        return cls(
            descriptor["kind"],
            _count(descriptor, "chunk_idx"),
            _count(descriptor, "total_chunks"),
            descriptor.get("frame_sha256"),
            _count(descriptor, "frame_size_bytes"),
            descriptor.get("chunk_group_id"),
            descriptor.get("operation"),
            _payload(frame),
        )


def _ordered_payloads(parts: list[_ChunkPart], kind: str | None) -> list[memoryview]:
    """Payloads by index, after checking that `parts` are all the chunks of one frame."""
    first = parts[0]
    if len({part.kind for part in parts}) > 1:
        raise WireError("mixed byte chunk kinds")
    if kind is not None and first.kind != kind:
        raise WireError(f"expected {kind} chunks, got {first.kind} chunks")
    for name, field in _SHARED_FIELDS.items():
        if any(getattr(part, field) != getattr(first, field) for part in parts):
            raise WireError(f"byte chunk {name} differs across frames")
    if len(parts) != first.total_chunks:
        raise WireError(f"expected {first.total_chunks} byte chunks, got {len(parts)}")
    ordered: dict[int, memoryview] = {}
    for part in parts:
        if not 0 <= part.index < first.total_chunks:
            raise WireError(f"byte chunk_idx out of range: {part.index} of {first.total_chunks}")
        if part.index in ordered:
            raise WireError(f"duplicate byte chunk_idx {part.index}")
        ordered[part.index] = part.payload
    return [ordered[index] for index in range(len(parts))]


_SHARED_FIELDS = {
    "total_chunks": "total_chunks",
    "frame_sha256": "sha256",
    "frame_size_bytes": "frame_bytes",
    "chunk_group_id": "group",
    "operation": "operation",
}


def _count(descriptor: dict[str, Any], field: str) -> int:
    """A whole number; servers that pass descriptors through text or floating point may send ``"3"`` or ``3.0``."""
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
    if payload.ndim != 1:
        raise WireError(f"byte chunk payload tensor must be 1-D, got shape {payload.shape}")
    return memoryview(payload)


def encode_result_chunks(value: object, max_bytes: int) -> list[bytes]:
    """`value` as a frame without metadata, in result chunks of at most `max_bytes` bytes. Raises `WireError`."""
    return encode_byte_chunks(frame_buffers(value), kind="result", max_bytes=max_bytes)


def decode_result_chunks(chunks: Iterable[FrameBytes], *, framework: Framework | None = None) -> Any:
    """The value in result chunks, as `loads` returns it. Raises `WireError`."""
    return loads(decode_byte_chunks(chunks, kind="result"), framework=framework)


def _bytes_view(frame: object, function: str) -> memoryview:
    if not isinstance(frame, bytes | bytearray | memoryview | mmap.mmap):
        raise WireError(f"wire.{function} expects bytes, got {type(frame).__qualname__}")
    view = memoryview(frame)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _as_buffers(frame: FrameBytes | Sequence[Buffer]) -> list[memoryview]:
    if isinstance(frame, list | tuple):
        return [_bytes_view(buffer, "encode_byte_chunks") for buffer in frame]
    return [_bytes_view(frame, "encode_byte_chunks")]
