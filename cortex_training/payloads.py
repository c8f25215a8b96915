"""Forward-backward frames from Python values, and from JSON that a person can write.

The JSON of `build_forward_backward_payload` (at the top, or under ``payload``) has either ``kwargs``, the model's
arguments as they are to be sent, or ``input_ids`` or ``texts`` with ``tokenizer``, from which the arguments are made:

* ``attention_mask``: data ``[batch, sequence]``, sent if ``include_attention_mask`` is true; or true to send the one of
  the tokenizer or all ones
* ``position_ids``: data, or true or ``"arange"``; ``include_position_ids`` is the same as true
* ``labels``: ``"next_token"`` (the default: ``labels[:, i] = input_ids[:, i + 1]``, the last column ignored),
  ``"input_ids"``, ``"none"``, data, or ``{"strategy", "ignore_index", "mask_padding"}``; ``label_strategy``,
  ``ignore_index`` (-100) and ``mask_padding`` (true) say the same outside
* ``texts`` go through ``tokenizer``, see `cortex_training._texts`
* ``args``, ``context`` and ``processing`` are sent along; in ``context``, ``{"data", "dtype"}`` becomes a tensor

Data is nested lists, or ``{"data": …, "dtype": "long"}`` for another dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cortex_training import wire
from cortex_training._tensors import is_tensor
from cortex_training._texts import TEXT_FIELDS, tokenize_texts
from cortex_training.errors import ConfigurationError

RESPONSE_OPTIONS = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
"""Operation metadata that asks the service for results as frames, in chunks when they are large."""

Ids: TypeAlias = npt.NDArray[np.integer[Any]]
Tensor: TypeAlias = "npt.NDArray[Any] | wire.RawTensor"

_DTYPES = {
    "bool": "?", "boolean": "?", "float": "<f4", "float32": "<f4", "float64": "<f8", "double": "<f8",
    "bfloat16": "BF16", "bf16": "BF16", "float16": "<f2", "fp16": "<f2", "int": "<i4", "int32": "<i4",
    "int64": "<i8", "long": "<i8",
}  # fmt: skip

_FIELDS = {
    "kwargs", "args", "context", "processing", "input_ids", "attention_mask", "include_attention_mask", "position_ids",
    "include_position_ids", "labels", "label_strategy", "ignore_index", "mask_padding", *TEXT_FIELDS,
}  # fmt: skip

_COMMAND_FIELDS = {"poll", "job", "job_id"}
"""What the command line keeps in the same JSON object."""


def serialize_forward_backward_args(
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    context: Mapping[str, Any] | None = None,
    processing: Mapping[str, Any] | None = None,
) -> bytes:
    """A forward-backward frame: the model's arguments, and what the backend's loss needs beside them.

    Tensors are ``[batch, sequence]``. Raises ConfigurationError for arguments of the wrong kind and `wire.WireError`
    for values that a frame cannot carry.
    """
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ConfigurationError.of("args", args, "pass a tuple or list of positional arguments")
    value: dict[str, Any] = {"args": tuple(args), "kwargs": dict(_mapping("kwargs", {} if kwargs is None else kwargs))}
    for name, extra in (("context", context), ("processing", processing)):
        if extra is not None:
            value[name] = dict(_mapping(name, extra))
    return wire.dumps(value, metadata=RESPONSE_OPTIONS)


def build_forward_backward_payload(spec: Mapping[str, Any]) -> bytes:
    """A forward-backward frame from readable JSON, described at the top of this module.

    Raises ConfigurationError that names the field, its value and the fix.
    """
    fields = _checked_fields(spec)
    args = fields.get("args", [])
    if not isinstance(args, list | tuple):
        raise ConfigurationError.of("args", args, "must be a JSON list of positional arguments")
    kwargs = _keyword_arguments(fields)
    context = fields.get("context")
    if context is not None:
        context = {
            name: _context_value(f"context.{name}", value) for name, value in _mapping("context", context).items()
        }
    return serialize_forward_backward_args(tuple(args), kwargs, context=context, processing=fields.get("processing"))


def build_forward_backward_kwargs(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Only the model's arguments of that JSON, ``[batch, sequence]``, for a frame that is put together by hand.

    They are numpy arrays (`wire.RawTensor` for bfloat16), which `wire.dumps` takes as it takes torch tensors.
    """
    return _keyword_arguments(_checked_fields(payload))


def _keyword_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = fields.get("kwargs")
    if given is None:
        return _model_arguments(fields)
    if not fields.keys().isdisjoint({"input_ids", "texts"}):
        raise ConfigurationError(
            "payload has kwargs, which are sent as they are, and input_ids or texts: give one", field="kwargs"
        )
    return _given_arguments(_mapping("kwargs", given))


def _checked_fields(spec: object) -> Mapping[str, Any]:
    spec = _mapping("the forward-backward JSON", spec)
    fields = _mapping("payload", spec["payload"]) if "payload" in spec else spec
    unknown = sorted(str(name) for name in set(fields) - _FIELDS - _COMMAND_FIELDS)
    if unknown:
        raise ConfigurationError(
            f"payload has unknown field(s) {unknown}: known are {sorted(_FIELDS)}; what the loss needs beside the "
            "model's arguments goes under context, and its settings under processing",
            field=unknown[0],
        )
    return fields


def _given_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tensor_from_json(f"kwargs.{name}", value) if isinstance(value, list) or _is_data(value) else value
        for name, value in kwargs.items()
    }


def _context_value(name: str, value: Any) -> Any:
    return tensor_from_json(name, value) if _is_data(value) else value


def _model_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments from token ids or texts; all tensors are ``[batch, sequence]``."""
    if fields.get("input_ids") is not None:
        input_ids = _matrix("input_ids", fields["input_ids"])
        padding_mask: Ids | None = None
    elif fields.get("tokenizer") is not None:
        input_ids, padding_mask = tokenize_texts(fields)
    else:
        raise ConfigurationError("payload needs kwargs, input_ids, or texts with tokenizer", field="input_ids")
    asked_mask = fields.get("attention_mask")
    if asked_mask is not None and not isinstance(asked_mask, bool):
        padding_mask = _matrix("attention_mask", asked_mask, like=input_ids)
    arguments: dict[str, Any] = {"input_ids": input_ids}
    if asked_mask is True or (asked_mask is not False and _flag(fields, "include_attention_mask", False)):
        arguments["attention_mask"] = np.ones(input_ids.shape, np.int64) if padding_mask is None else padding_mask
    position_ids = _position_ids(fields, input_ids)
    if position_ids is not None:
        arguments["position_ids"] = position_ids
    labels = _labels(fields, input_ids, padding_mask)
    if labels is not None:
        arguments["labels"] = labels
    return arguments


def _position_ids(fields: Mapping[str, Any], input_ids: Ids) -> Ids | None:
    asked = fields.get("position_ids")
    if asked is None:
        asked = _flag(fields, "include_position_ids", False)
    if asked is False:
        return None
    if asked is True or (isinstance(asked, str) and asked == "arange"):
        return np.broadcast_to(np.arange(input_ids.shape[1], dtype=np.int64), input_ids.shape)
    return _matrix("position_ids", asked, like=input_ids)


def _labels(fields: Mapping[str, Any], input_ids: Ids, padding_mask: Ids | None) -> Ids | None:
    asked = fields["labels"] if "labels" in fields else fields.get("label_strategy", "next_token")
    if isinstance(asked, list) or _is_data(asked) or is_tensor(asked):
        return _matrix("labels", asked, like=input_ids)
    options = dict(fields)
    if isinstance(asked, Mapping):
        unknown = set(asked) - {"strategy", "ignore_index", "mask_padding"}
        if unknown:
            raise ConfigurationError.of("labels", asked, "give strategy, ignore_index and mask_padding, or data")
        options |= asked
        asked = asked.get("strategy", fields.get("label_strategy", "next_token"))
    if asked is None or asked == "none":
        return None
    labels = input_ids.copy()
    ignore_index = _ignore_index(options, labels.dtype)
    if padding_mask is not None and _flag(options, "mask_padding", True):
        labels[padding_mask == 0] = ignore_index
    if asked in ("input_ids", "self"):
        return labels
    if asked in ("next_token", "shifted_input_ids"):
        shifted = np.full_like(labels, ignore_index)
        shifted[:, :-1] = labels[:, 1:]
        return shifted
    raise ConfigurationError.of("labels", asked, "use 'next_token', 'input_ids', 'none', or data [batch, sequence]")


def _ignore_index(options: Mapping[str, Any], dtype: np.dtype[Any]) -> int:
    value = options.get("ignore_index", -100)
    limits = np.iinfo(dtype)
    if not isinstance(value, int) or isinstance(value, bool) or not limits.min <= value <= limits.max:
        raise ConfigurationError.of("ignore_index", value, f"must be an integer that fits {dtype}")
    return value


def _matrix(name: str, value: Any, *, like: Ids | None = None) -> Ids:
    """Whole numbers ``[batch, sequence]``, of the shape of `like` if that is given."""
    tensor = tensor_from_json(name, value)
    if isinstance(tensor, wire.RawTensor) or tensor.dtype.kind not in "iu":
        raise ConfigurationError.of(name, value, "must hold whole numbers: use dtype 'long' or 'int'")
    if tensor.ndim != 2:
        raise ConfigurationError(
            f"{name} must have shape [batch, seq_len], got {list(tensor.shape)}; write one sequence as [[1, 2, 3]]",
            field=name,
        )
    if like is not None and tensor.shape != like.shape:
        raise ConfigurationError(
            f"{name} must have the same shape as input_ids: {list(tensor.shape)} is not {list(like.shape)}", field=name
        )
    return tensor


def tensor_from_json(name: str, value: Any) -> Tensor:
    """Nested lists, or ``{"data": nested lists, "dtype": name}``, as an array; dtype ``long`` unless given.

    Values must fit the dtype: 1.5 is no ``long`` and 2 no ``bool``. Raises ConfigurationError, naming `name`.
    """
    data, dtype = value, None
    if _is_data(value):
        unknown = set(value) - {"data", "dtype"}
        if unknown:
            raise ConfigurationError.of(
                name, value, f"has unknown field(s) {sorted(map(str, unknown))} beside data, dtype"
            )
        data, dtype = value["data"], value.get("dtype")
    dtype = "long" if dtype is None else dtype
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ConfigurationError.of(f"{name}.dtype", dtype, f"unsupported tensor dtype; use one of {sorted(_DTYPES)}")
    try:
        array = np.asarray(data)
    except ValueError:
        raise ConfigurationError.of(name, data, "rows must all have the same length") from None
    if array.dtype.kind not in "biuf":
        raise ConfigurationError.of(name, data, "must hold numbers in 64 bits, or booleans")
    converted = _converted(name, array, _DTYPES[dtype])
    if converted is None:
        raise ConfigurationError.of(
            name, data, f'has values that {dtype} cannot hold; give a fitting "dtype" with "data"'
        )
    return converted


def _converted(name: str, array: npt.NDArray[Any], dtype: str) -> Tensor | None:
    """`array` in `dtype`, rounded only between floating-point types; None when a value does not fit."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "BF16":
            single = array.astype("<f4")
            fits = np.isfinite(single) | ~np.isfinite(array)
            return _bfloat16(single) if fits.all() else None
        # Half precision goes through single, as torch does; rounding twice differs from rounding once in rare values.
        converted = array.astype("<f4").astype(dtype) if dtype == "<f2" else array.astype(dtype)
        if converted.dtype.kind == "f":
            fits = np.isfinite(converted) | ~np.isfinite(array)
        else:
            fits = converted == array
        return converted if fits.all() else None


def _bfloat16(values: npt.NDArray[np.float32]) -> wire.RawTensor:
    """The nearest bfloat16, ties to even: the upper half of a float32 after adding half of what is cut off."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(values), 0x7FC0, rounded)
    return wire.RawTensor("BF16", values.shape, rounded.astype("<u2").tobytes())


def _is_data(value: object) -> bool:
    return isinstance(value, Mapping) and "data" in value


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError.of(name, value, "must be an object")
    return value


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ConfigurationError.of(name, value, "must be true or false")
    return value
