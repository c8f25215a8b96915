"""The safetensors container, written and read as bytes.

``u64 little-endian header length N | N bytes of UTF-8 JSON, padded with spaces to a multiple of 8 | tensor bytes``

The header maps ``__metadata__`` to text -> text and each tensor's name to ``{"dtype", "shape", "data_offsets"}``,
where the offsets are [begin, end] counted from the byte after the header. The library of that name builds the whole
file in memory and orders metadata at random; frames that are hashed, replayed and cut into chunks need a fixed order
and no copy, so the container lives here. Nothing in this module touches tensor bytes or needs numpy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

MAX_HEADER_BYTES = 64 * 1024 * 1024
"""Readers of the service refuse a longer header, so a writer that makes one has lost the data."""

MAX_DIMENSIONS = 64
"""As many as numpy has; fewer than would make the number of elements a number too long to compute."""

ITEM_BYTES = {
    "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element. The order is the order of tensors in a file: first by dtype as listed here, then by name."""

_RANK = {dtype: rank for rank, dtype in enumerate(ITEM_BYTES)}


class WireError(ValueError):
    """Bytes that are not a valid DSSST1 frame, or a value that a frame cannot carry."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the header; `begin` and `end` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `length` is the offset of the first tensor byte in the file."""

    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    length: int


def file_order(dtype: str, name: str) -> tuple[int, bytes]:
    """Sort key that puts tensors where the safetensors library does: larger elements first, so that all are aligned."""
    return _RANK[dtype], name.encode()


def encode_header(metadata: dict[str, str], tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Length field and header for `tensors`, rows of (name, dtype, shape, bytes) that follow in this very order.

    Raises `WireError` when the header would be longer than readers accept.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape, size in tensors:
        if len(shape) > MAX_DIMENSIONS:
            raise WireError(f"tensor {name!r} has {len(shape)} dimensions, a frame holds at most {MAX_DIMENSIONS}")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise WireError(
            f"the frame's header would have {len(text)} bytes, more than the {MAX_HEADER_BYTES} that readers accept; "
            "JSON values travel in the header, so pass long lists of numbers (token ids) as arrays"
        )
    return len(text).to_bytes(8, "little") + text


def read_header_text(frame: memoryview) -> tuple[dict[str, Any], int]:
    """The header's JSON object and the offset of the first tensor byte; says nothing about the tensor table.

    Raises `WireError`.
    """
    if len(frame) < 8:
        raise WireError(f"header too small: {len(frame)} bytes, a frame starts with an 8-byte header length")
    size = int.from_bytes(frame[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise WireError(f"header too large: {size} bytes, the limit is {MAX_HEADER_BYTES}")
    if size > len(frame) - 8:
        raise WireError(f"invalid header length: {size} bytes announced, {len(frame) - 8} left")
    raw = bytes(frame[8 : 8 + size])
    if not raw.startswith(b"{"):
        raise WireError("invalid header: it does not start with '{'")
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise WireError(f"invalid UTF-8 in header: {error}") from None
    except RecursionError:
        raise WireError("invalid JSON in header: nested too deeply") from None
    except WireError:
        raise
    except ValueError as error:
        raise WireError(f"invalid JSON in header: {error}") from None
    return header, 8 + size


def parse(frame: memoryview) -> Header:
    """Read and check the header against the length of `frame`: every byte after it belongs to exactly one tensor.

    Raises `WireError`.
    """
    entries, start = read_header_text(frame)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise WireError("invalid header: __metadata__ must map text to text")
    infos = sorted(
        (_tensor_info(name, entry) for name, entry in entries.items()), key=lambda info: (info.begin, info.end)
    )
    expected = 0
    for info in infos:
        if info.begin != expected:
            raise WireError(f"invalid offset for tensor {info.name!r}: begins at {info.begin}, expected {expected}")
        expected = info.end
    if expected != len(frame) - start:
        raise WireError(f"tensors cover {expected} bytes, the frame holds {len(frame) - start} after its header")
    return Header(metadata, {info.name: info for info in infos}, start)


def _tensor_info(name: str, entry: object) -> TensorInfo:
    if not isinstance(entry, dict):
        raise WireError(f"invalid header: tensor {name!r} is not described by an object")
    dtype = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise WireError(f"tensor {name!r} has the unsupported dtype {dtype!r}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise WireError(f"tensor {name!r} has an invalid shape {shape!r:.80}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise WireError(f"tensor {name!r} has invalid data_offsets {offsets!r:.80}")
    if ITEM_BYTES[dtype] * prod(shape) != offsets[1] - offsets[0]:
        raise WireError(f"tensor {name!r}: {dtype} {shape!r:.80} does not fill bytes {offsets[0]} to {offsets[1]}")
    return TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise WireError(f"invalid header: {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise WireError(f"invalid JSON in header: {name}")
