"""Arrays of numpy and tensors of torch as (dtype, shape, bytes), and back, without a copy where that is possible.

Neither library is imported to encode: a value can only be an ndarray or a Tensor if its library is loaded already.
Decoding imports numpy when the frame holds a tensor, and torch only when torch is what the caller asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cortex_training._safetensors import ITEM_BYTES, WireError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Framework: TypeAlias = Literal["numpy", "torch"]
Buffer: TypeAlias = bytes | memoryview

_NUMPY = {
    "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8", "F32": "<f4", "U32": "<u4", "I32": "<i4", "F16": "<f2",
    "U16": "<u2", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_TORCH = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64", "F32": "float32", "U32": "uint32",
    "I32": "int32", "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
_WIRE_OF_NAME = {name: dtype for dtype, name in _TORCH.items()}
"""numpy, ml_dtypes and torch use the same names for the dtypes a frame can carry."""

_FLOAT8 = {"F8_E4M3": (4, 7), "F8_E5M2": (5, 15), "F8_E4M3FNUZ": (4, 8), "F8_E5M2FNUZ": (5, 16)}
"""Exponent bits and exponent bias."""


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor of a dtype that numpy lacks: ``BF16`` or one of the four ``F8_…``.

    `data` is the little-endian row-major content. `loads(framework="numpy")` returns these dtypes in this form whatever
    else is installed, and `dumps` takes it back unchanged. ``numpy.asarray(raw)`` gives the exact values as float32;
    ``raw.view(ml_dtypes.bfloat16)`` reinterprets the bytes as any dtype of the same item size without a copy.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        if self.dtype != "BF16" and self.dtype not in _FLOAT8:
            raise WireError(f"RawTensor is for BF16 and F8_… only, got dtype {self.dtype!r}; use a numpy array")
        expected = ITEM_BYTES[self.dtype] * prod(self.shape)
        if memoryview(self.data).nbytes != expected:
            found = memoryview(self.data).nbytes
            raise WireError(f"RawTensor {self.dtype} {self.shape} needs {expected} bytes of data, got {found}")

    def view(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The same bytes as an array of `dtype`, whose items must be as large; read-only, not copied."""
        import numpy as np

        target = np.dtype(dtype)
        if target.itemsize != ITEM_BYTES[self.dtype]:
            raise WireError(f"cannot view {self.dtype} as {target}, whose items have {target.itemsize} bytes")
        bits = np.frombuffer(memoryview(self.data).toreadonly(), np.uint8)
        return bits.view(target).reshape(self.shape)

    def reshape(self, shape: tuple[int, ...]) -> RawTensor:
        """The same content under another shape with as many elements."""
        return RawTensor(self.dtype, shape, self.data)

    def float32(self) -> npt.NDArray[np.float32]:
        """The values as float32, which holds every one of them exactly."""
        import numpy as np

        if self.dtype == "BF16":
            bits = self.view("<u2").astype(np.uint32) << 16
            return bits.view(np.float32)
        table = np.array(_float8_values(self.dtype), np.float32)
        return np.asarray(table[self.view("u1")])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("RawTensor has no array form without a copy; use .view(dtype)")
        import numpy as np

        with np.errstate(invalid="ignore"):  # signalling NaNs are values like any other here
            return self.float32().astype(np.float32 if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"RawTensor({self.dtype}, shape={self.shape})"


@lru_cache
def _float8_values(dtype: str) -> tuple[float, ...]:
    """The value of each of the 256 bit patterns."""
    exponent_bits, bias = _FLOAT8[dtype]
    mantissa_bits = 7 - exponent_bits
    top = 2**exponent_bits - 1
    values = []
    for bits in range(256):
        sign = -1.0 if bits & 0x80 else 1.0
        exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        if bits == 0x80 and dtype.endswith("FNUZ"):
            value = float("nan")  # the pattern of negative zero, which these two kinds do without
        elif dtype == "F8_E4M3" and bits & 0x7F == 0x7F:
            value = float("nan")
        elif dtype == "F8_E5M2" and exponent == top:
            value = float("nan") if mantissa else sign * float("inf")
        elif exponent == 0:
            value = sign * fraction * 2.0 ** (1 - bias)
        else:
            value = sign * (1 + fraction) * 2.0 ** (exponent - bias)
        values.append(value)
    return tuple(values)


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor ready to be written: row-major little-endian `data` that may still be the caller's own memory."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def is_tensor(value: object) -> bool:
    """Whether `value` is written as a tensor: an ndarray, a torch tensor, or a `RawTensor`."""
    return (
        isinstance(value, RawTensor)
        or _is_instance(value, "numpy", "ndarray")
        or _is_instance(value, "torch", "Tensor")
    )


def is_numpy_scalar(value: object) -> bool:
    return _is_instance(value, "numpy", "generic")


def numpy_scalar(value: Any, path: str) -> str | int | float | bool:
    """The Python value equal to a numpy scalar, for JSON. Raises `WireError` where there is no equal one."""
    if not is_numpy_scalar(value):
        raise WireError(f"{path}: a {type(value).__qualname__} cannot be written as JSON")
    dtype = value.dtype
    if dtype.kind in "biuU" or (dtype.kind == "f" and dtype.itemsize <= 8):
        return value.item()  # type: ignore[no-any-return]
    raise WireError(f"{path}: a numpy scalar of dtype {dtype} has no equal JSON value; convert it first")


def _is_instance(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def tensor_bytes(value: Any, path: str) -> TensorBytes:
    """The content of `value`, copied only when it is not row-major already; `path` names it in errors.

    Raises `WireError` for a dtype or layout that a frame cannot carry.
    """
    if isinstance(value, RawTensor):
        return TensorBytes(value.dtype, value.shape, memoryview(value.data).cast("B") if value.data else b"")
    if _is_instance(value, "torch", "Tensor"):
        return _torch_bytes(value, path)
    return _numpy_bytes(value, path)


def _numpy_bytes(array: Any, path: str) -> TensorBytes:
    import numpy as np

    if isinstance(array, np.ma.MaskedArray):
        raise WireError(f"{path}: a masked array would lose its mask; pass .filled(...) or data and mask apart")
    array = np.asarray(array)
    dtype = _WIRE_OF_NAME.get(array.dtype.name)
    if dtype is None:
        raise _unsupported(path, str(array.dtype))
    if array.nbytes == 0:
        return TensorBytes(dtype, array.shape, b"")
    if dtype in _NUMPY:
        array = array.astype(_NUMPY[dtype], copy=False)
    array = np.asarray(array, order="C")
    return TensorBytes(dtype, array.shape, memoryview(array.reshape(-1).view(np.uint8)))


def _torch_bytes(tensor: Any, path: str) -> TensorBytes:
    torch = sys.modules["torch"]
    dtype = _WIRE_OF_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise _unsupported(path, str(tensor.dtype))
    if tensor.is_nested:
        raise WireError(f"{path}: a nested tensor cannot be sent; pad it, or send its parts as a list")
    if tensor.layout is not torch.strided:
        raise WireError(
            f"{path}: a tensor of layout {tensor.layout} cannot be sent; make it dense, e.g. with .to_dense()"
        )
    if tensor.device.type == "meta":
        raise WireError(f"{path}: a meta tensor has no data to send")
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return TensorBytes(dtype, shape, b"")
    # A conjugate or negative view only carries a flag; its memory holds the values before that operation.
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return TensorBytes(dtype, shape, memoryview(dense.reshape(-1).view(torch.uint8).numpy()))


def _unsupported(path: str, dtype: str) -> WireError:
    advice = (
        "convert it to complex64, or send real and imaginary parts"
        if dtype.endswith("complex128")
        else "convert it first"
    )
    return WireError(f"{path}: dtype {dtype} cannot be sent, {advice}; supported: {', '.join(_TORCH.values())}")


def choose_framework(framework: str | None) -> Framework:
    """`framework` checked; for None, torch if the caller has imported it, else numpy."""
    if framework is None:
        return "torch" if hasattr(sys.modules.get("torch"), "Tensor") else "numpy"
    if framework == "numpy":
        return "numpy"
    if framework == "torch":
        return "torch"
    raise WireError(f"framework must be 'numpy', 'torch' or None, got {framework!r}")


def build_tensor(framework: Framework, dtype: str, shape: tuple[int, ...], data: memoryview) -> Any:
    """A tensor over `data`: an ndarray or `RawTensor` that is read-only and shares the memory, or a torch tensor.

    torch has no read-only tensors, so it shares writable memory and copies what it must not change. Either copies data
    that is not aligned to its element size. Raises `WireError` when the library cannot represent the tensor.
    """
    import numpy as np

    if dtype == "BOOL" and data.nbytes and np.frombuffer(data, np.uint8).max() > 1:
        raise WireError("a BOOL tensor holds bytes other than 0 and 1")
    try:
        if framework == "torch":
            return _torch_tensor(dtype, shape, data)
        if dtype not in _NUMPY:
            return RawTensor(dtype, shape, data.toreadonly())
        array = np.frombuffer(data.toreadonly(), np.uint8)
        if array.ctypes.data % ITEM_BYTES[dtype] and array.nbytes:
            array = array.copy()
            array.flags.writeable = False
        return array.view(_NUMPY[dtype]).reshape(shape)
    except (ValueError, OverflowError, RuntimeError, TypeError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{framework} cannot hold a tensor {dtype} {shape!r:.80}: {error}") from None


def _torch_tensor(dtype: str, shape: tuple[int, ...], data: memoryview) -> Any:
    import numpy as np
    import torch

    kind = getattr(torch, _TORCH[dtype], None)
    if kind is None:
        raise WireError(f"torch {torch.__version__} has no dtype for {dtype}; pass framework='numpy'")
    if data.nbytes == 0:
        return torch.empty(shape, dtype=kind)
    address = np.frombuffer(data, np.uint8).ctypes.data
    if data.readonly or address % ITEM_BYTES[dtype]:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=kind).reshape(shape)
