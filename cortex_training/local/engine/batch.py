"""A forward-backward's frame, checked: token ids, masks, and what each position's prediction is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

_MODEL_INPUTS = {"input_ids", "attention_mask", "position_ids", "labels", "use_cache", "temperature"}
_POST = {"compute_logprobs"}
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """Tensors are [batch, sequence].

    `weights[:, i]` is what predicting `targets[:, i]`, the token after position i, counts in the loss; the last column
    is 0. The tensors after it follow the same shift.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    """None when every position is a token."""
    position_ids: torch.Tensor | None
    targets: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor | None
    old_log_probabilities: torch.Tensor | None
    """Of the targets under the policy that sampled them; None when it was the model as it is now."""
    temperature: torch.Tensor | None
    """What logits are divided by; None for 1."""
    loss_fn: str
    config: Mapping[str, Any]
    wants_log_probabilities: bool

    @property
    def rows(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.attention_mask.sum()) if self.attention_mask is not None else self.input_ids.numel()

    def only_rows(self, rows: slice) -> Batch:
        """The same batch with some of its rows."""
        return self._with_tensors(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> Batch:
        """The same batch, where the model is."""
        return self._with_tensors(lambda tensor: tensor.to(device))

    def _with_tensors(self, changed: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors: dict[str, Any] = {
            field.name: changed(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **tensors)


def read_batch(value: object, *, vocabulary: int, max_seq_len: int) -> Batch:
    """Check a decoded frame against the model and the sub-job. Raises ValueError naming the part that is wrong."""
    kwargs = _model_inputs(value)
    input_ids = _token_ids("kwargs.input_ids", kwargs.get("input_ids"), vocabulary)
    shape = tuple(input_ids.shape)
    if shape[1] > max_seq_len:
        raise ValueError(
            f"kwargs.input_ids: sequences of {shape[1]} tokens, and the sub-job's max_seq_len is {max_seq_len}"
        )
    context = _mapping("context", _of(value, "context"))
    processing = _mapping("processing", _of(value, "processing"))
    loss_fn = processing.get("loss_fn")
    if loss_fn is None:
        targets, weights = _from_labels(kwargs.get("labels"), shape, vocabulary)
        loss_fn = "causal_cross_entropy"
    elif not isinstance(loss_fn, str):
        raise ValueError(f"processing.loss_fn: must be a name, got {loss_fn!r}")
    else:
        targets, weights = _from_loss_mask(context, input_ids, vocabulary)
    return Batch(
        input_ids=input_ids,
        attention_mask=_attention_mask(kwargs.get("attention_mask"), shape),
        position_ids=_position_ids(kwargs.get("position_ids"), shape, max_seq_len),
        targets=targets,
        weights=weights,
        advantages=_numbers("context.advantages", context.get("advantages"), shape),
        old_log_probabilities=_numbers("context.old_logprobs", context.get("old_logprobs"), shape),
        temperature=_temperature(kwargs.get("temperature"), shape),
        loss_fn=loss_fn,
        config=_mapping("processing.config", processing.get("config")),
        wants_log_probabilities="compute_logprobs" in _post(processing.get("post")),
    )


def _model_inputs(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("kwargs"), dict):
        raise ValueError("the frame must hold an object with `args` and `kwargs`")
    args = value.get("args")
    if args is not None and (not isinstance(args, list | tuple) or args):
        raise ValueError("args: the model's inputs are given by name, in kwargs; args must be empty")
    kwargs: dict[str, Any] = value["kwargs"]
    unknown = sorted(set(kwargs) - _MODEL_INPUTS)
    if unknown:
        raise ValueError(f"kwargs: unknown input {unknown[0]!r}; the inputs are {', '.join(sorted(_MODEL_INPUTS))}")
    if kwargs.get("use_cache") not in (None, False):
        raise ValueError("kwargs.use_cache: training keeps no cache; leave it out or send false")
    return kwargs


def _of(value: object, part: str) -> object:
    return value.get(part) if isinstance(value, dict) else None


def _post(names: object) -> Sequence[str]:
    if names is None:
        return ()
    if not isinstance(names, list | tuple) or any(not isinstance(name, str) or name not in _POST for name in names):
        raise ValueError(f"processing.post: must be a list of {', '.join(sorted(_POST))}, got {names!r:.200}")
    return names


def _attention_mask(value: object, shape: tuple[int, ...]) -> torch.Tensor | None:
    mask = _same_shape("kwargs.attention_mask", value, shape)
    if mask is None or bool(mask.bool().all()):
        return None
    return mask.bool()


def _position_ids(value: object, shape: tuple[int, ...], max_seq_len: int) -> torch.Tensor | None:
    positions = _same_shape("kwargs.position_ids", value, shape)
    if positions is None:
        return None
    positions = _integers("kwargs.position_ids", positions)
    if int(positions.min()) < 0 or int(positions.max()) >= max_seq_len:
        raise ValueError(f"kwargs.position_ids: positions must be from 0 to {max_seq_len - 1}")
    return positions


def _temperature(value: object, shape: tuple[int, ...]) -> torch.Tensor | None:
    temperature = _numbers("kwargs.temperature", value, shape)
    if temperature is not None and not bool((temperature > 0).all()):
        raise ValueError("kwargs.temperature: must be greater than 0")
    return temperature


def _numbers(name: str, value: object, shape: tuple[int, ...]) -> torch.Tensor | None:
    numbers = _same_shape(name, value, shape)
    if numbers is not None and not bool(torch.isfinite(numbers).all()):
        raise ValueError(f"{name}: must hold finite numbers")
    return None if numbers is None else numbers.float()


def next_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """The token after each position, [batch, sequence]; 0 in the last column, which has none."""
    following = torch.zeros_like(input_ids)
    following[:, :-1] = input_ids[:, 1:]
    return following


def _from_labels(labels: object, shape: tuple[int, ...], vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels as a Hugging Face model takes them: label i belongs to token i, and the model shifts them itself."""
    checked = _same_shape("kwargs.labels", labels, shape)
    if checked is None:
        raise ValueError("kwargs.labels: needed, because processing names no loss_fn")
    checked = _integers("kwargs.labels", checked)
    counted = checked != IGNORED_LABEL
    if bool((counted & ((checked < 0) | (checked >= vocabulary))).any()):
        raise ValueError(f"kwargs.labels: must be {IGNORED_LABEL} or from 0 to {vocabulary - 1}")
    weights = torch.zeros(checked.shape, dtype=torch.float32)
    weights[:, :-1] = counted[:, 1:].float()
    return next_tokens(torch.where(counted, checked, 0)), weights


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
    mask = _numbers("context.loss_mask", context.get("loss_mask"), shape)
    weights = torch.ones(shape, dtype=torch.float32) if mask is None else mask
    if bool((weights < 0).any()):
        raise ValueError("context.loss_mask: weights must not be negative")
    weights = weights.clone()
    # Nothing comes after the last token.
    weights[:, -1] = 0
    return next_tokens(ids), weights


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
