"""A forward-backward's frame, checked: token ids, masks, and what each position's prediction is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cortex_training import wire

_MODEL_INPUTS = {"input_ids", "attention_mask", "position_ids", "labels", "use_cache", "temperature"}
_POST = {"compute_logprobs"}
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """Tensors are [batch, sequence].

    `weights[:, i]` is what predicting `targets[:, i]`, the token after position i, counts in the loss; the last column
    is 0.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    """None when every position is a token."""
    position_ids: torch.Tensor | None
    targets: torch.Tensor
    weights: torch.Tensor
    loss_fn: str
    config: Mapping[str, Any]
    context: Mapping[str, Any]

    @property
    def rows(self) -> int:
        return int(self.input_ids.shape[0])


def decode_frame(frame: bytes) -> object:
    """Decode to torch tensors. Raises wire.WireError for anything that is not a well-formed frame."""
    return wire.loads(frame, framework="torch")


def read_batch(value: object, *, vocabulary: int, max_seq_len: int) -> Batch:
    """Check a decoded frame against the model and the sub-job. Raises ValueError naming the part that is wrong."""
    if not isinstance(value, dict) or not isinstance(value.get("kwargs"), dict):
        raise ValueError("the frame must hold an object with `args` and `kwargs`")
    if len(value.get("args") or ()):
        raise ValueError("args: the model's inputs are given by name, in kwargs; args must be empty")
    kwargs = value["kwargs"]
    unknown = sorted(set(kwargs) - _MODEL_INPUTS, key=str)
    if unknown:
        raise ValueError(f"kwargs: unknown input {unknown[0]!r}; the inputs are {', '.join(sorted(_MODEL_INPUTS))}")
    if kwargs.get("use_cache"):
        raise ValueError("kwargs.use_cache: training keeps no cache; leave it out or send false")
    input_ids = _token_ids("kwargs.input_ids", kwargs.get("input_ids"), vocabulary)
    shape = tuple(input_ids.shape)
    if shape[1] > max_seq_len:
        raise ValueError(
            f"kwargs.input_ids: sequences of {shape[1]} tokens, and the sub-job's max_seq_len is {max_seq_len}"
        )
    attention_mask = _same_shape("kwargs.attention_mask", kwargs.get("attention_mask"), shape)
    if attention_mask is not None:
        attention_mask = attention_mask.bool()
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    position_ids = _same_shape("kwargs.position_ids", kwargs.get("position_ids"), shape)
    if position_ids is not None:
        position_ids = position_ids.long()
        if int(position_ids.min()) < 0 or int(position_ids.max()) >= max_seq_len:
            raise ValueError(f"kwargs.position_ids: positions must be from 0 to {max_seq_len - 1}")
    context = _mapping("context", value.get("context"))
    processing = _mapping("processing", value.get("processing"))
    unknown_post = [name for name in processing.get("post") or () if name not in _POST]
    if unknown_post:
        raise ValueError(f"processing.post: unknown {unknown_post[0]!r}; there is {', '.join(sorted(_POST))}")
    loss_fn = processing.get("loss_fn")
    if loss_fn is None:
        targets, weights = _from_labels(kwargs.get("labels"), shape, vocabulary)
        loss_fn = "causal_cross_entropy"
    elif not isinstance(loss_fn, str):
        raise ValueError(f"processing.loss_fn: must be a name, got {loss_fn!r}")
    else:
        targets, weights = _from_loss_mask(context, input_ids, vocabulary)
    if not float(weights.abs().sum()) > 0:
        raise ValueError("the loss has nothing to learn from: every weight of the batch is 0")
    config = _mapping("processing.config", processing.get("config"))
    return Batch(input_ids, attention_mask, position_ids, targets, weights, loss_fn, config, context)


def _from_labels(labels: object, shape: tuple[int, ...], vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels as a Hugging Face model takes them: label i belongs to token i, and the model shifts them itself."""
    checked = _same_shape("kwargs.labels", labels, shape)
    if checked is None:
        raise ValueError("kwargs.labels: needed, because processing names no loss_fn")
    checked = _integers("kwargs.labels", checked)
    counted = checked != IGNORED_LABEL
    if bool((counted & ((checked < 0) | (checked >= vocabulary))).any()):
        raise ValueError(f"kwargs.labels: must be {IGNORED_LABEL} or from 0 to {vocabulary - 1}")
    targets = torch.zeros_like(checked)
    weights = torch.zeros(checked.shape)
    targets[:, :-1] = torch.where(counted, checked, 0)[:, 1:]
    weights[:, :-1] = counted[:, 1:].float()
    return targets, weights


def _from_loss_mask(
    context: Mapping[str, Any], input_ids: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask whose column i is the weight of predicting token i + 1 of `context.input_ids`."""
    shape = tuple(input_ids.shape)
    ids = input_ids
    if context.get("input_ids") is not None:
        ids = _token_ids("context.input_ids", context["input_ids"], vocabulary)
        if tuple(ids.shape) != shape:
            raise ValueError(f"context.input_ids: shape {tuple(ids.shape)}, and kwargs.input_ids has {shape}")
    mask = _same_shape("context.loss_mask", context.get("loss_mask"), shape)
    weights = torch.ones(shape) if mask is None else mask.float()
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise ValueError("context.loss_mask: weights must be finite and not negative")
    targets = torch.zeros_like(ids)
    targets[:, :-1] = ids[:, 1:]
    weights = weights.clone()
    # Nothing comes after the last token.
    weights[:, -1] = 0
    return targets, weights


def _token_ids(name: str, value: object, vocabulary: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or 0 in value.shape:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name}: must be a tensor [batch, sequence] of token ids, got {shown}")
    ids = _integers(name, value)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"{name}: token {low if low < 0 else high} is outside the model's vocabulary of {vocabulary}")
    return ids


def _integers(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name}: must hold integers, got {value.dtype}")
    return value.long()


def _same_shape(name: str, value: object, shape: tuple[int, ...]) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{name}: must be a tensor of shape {shape} like input_ids, got {shown}")
    return value


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: must be an object, got {type(value).__name__}")
    return value
