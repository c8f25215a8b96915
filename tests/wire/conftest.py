"""Recorded frames of the public client, and comparison of values bit for bit."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from cortex_training import wire

# No deadline: how long an example takes says nothing on a shared machine. The same examples in each run.
settings.register_profile("repository", deadline=None, database=None, derandomize=True)
settings.load_profile("repository")

FOLDER = Path(__file__).with_name("vectors")

NUMPY_DTYPES = {
    "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8", "F32": "<f4", "U32": "<u4", "I32": "<i4", "F16": "<f2",
    "U16": "<u2", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
TORCH_DTYPES = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64", "F32": "float32", "U32": "uint32",
    "I32": "int32", "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


class Vectors:
    """The recorded frames; values are described in JSON that keeps types (see `manifest["typed_json"]`)."""

    def __init__(self) -> None:
        self.manifest: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())

    def read(self, file: str) -> bytes:
        return (FOLDER / file).read_bytes()

    def build(self, typed: dict[str, Any], framework: str = "numpy") -> Any:
        """The value that `typed` describes."""
        kind = typed["t"]
        if kind == "tensor":
            return tensor(framework, typed["dtype"], tuple(typed["shape"]), bytes.fromhex(typed["data_hex"]))
        if kind == "dict":
            keys = [key if isinstance(key, str) else self.build(key) for key, _ in typed["items"]]
            return dict(zip(keys, (self.build(item, framework) for _, item in typed["items"]), strict=True))
        if kind in ("list", "tuple"):
            items = [self.build(item, framework) for item in typed["items"]]
            return items if kind == "list" else tuple(items)
        if kind == "int":
            return int(typed["v"])
        if kind == "float":
            return float(typed["v"]) if typed["v"] in ("nan", "inf", "-inf") else float.fromhex(typed["v"])
        return None if kind == "none" else typed["v"]


@pytest.fixture(scope="session")
def vectors() -> Vectors:
    return Vectors()


def tensor(framework: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    """A tensor with exactly these bytes, made without the code under test."""
    if framework == "torch":
        import torch

        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(getattr(torch, TORCH_DTYPES[dtype])).reshape(shape)
    if dtype not in NUMPY_DTYPES:
        return wire.RawTensor(dtype, shape, data)
    return np.frombuffer(data, NUMPY_DTYPES[dtype]).reshape(shape)


@pytest.fixture(scope="session")
def make_tensor() -> Any:
    return tensor


def fingerprint(value: Any) -> Any:
    """A value that is equal for equal types and equal bits: -0.0 differs from 0.0, 1 from True and from 1.0."""
    if isinstance(value, dict):
        return ("dict", [(key, fingerprint(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [fingerprint(item) for item in value])
    if isinstance(value, wire.RawTensor):
        return ("tensor", value.dtype, value.shape, bytes(value.data))
    if isinstance(value, np.ndarray):
        name = next(name for name, dtype in NUMPY_DTYPES.items() if np.dtype(dtype) == value.dtype)
        return ("tensor", name, value.shape, value.tobytes())
    if type(value).__module__ == "torch":
        import torch

        name = next(name for name, dtype in TORCH_DTYPES.items() if getattr(torch, dtype) == value.dtype)
        flat = value.detach().contiguous().reshape(-1)
        return ("tensor", name, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("<d", value))
    return (type(value).__name__, value)


@pytest.fixture(scope="session")
def same() -> Any:
    """A function that tells whether two values have equal types, keys in equal order and equal bits."""
    return lambda one, other: fingerprint(one) == fingerprint(other)


def with_sorted_metadata(frame: bytes) -> bytes:
    """The same frame with its metadata in order of key: the public client writes ``dss`` and ``op`` in random order."""
    size = int.from_bytes(frame[:8], "little")
    header = json.loads(frame[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    assert len(text) <= size
    return frame[:8] + text.ljust(size) + frame[8 + size :]


@pytest.fixture(scope="session")
def sorted_metadata() -> Any:
    return with_sorted_metadata
