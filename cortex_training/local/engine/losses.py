"""The losses that a frame can name, each a mean over the whole batch computed from some of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cortex_training.local.engine.batch import Batch

Loss = Callable[[torch.Tensor, Batch, Batch], torch.Tensor]
"""(logits [rows, sequence, vocabulary], those rows, the whole batch) -> what the rows add to the batch's mean loss."""

_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def loss_of(batch: Batch) -> Loss:
    """The loss that the batch names. Raises ValueError for another name, a missing tensor or a bad configuration."""
    if batch.loss_fn not in _LOSSES:
        names = ", ".join(sorted(_LOSSES))
        raise ValueError(f"processing.loss_fn: {batch.loss_fn!r} is not a loss of this service; there are {names}")
    if not bool(batch.weights.any()):
        raise ValueError("the loss has nothing to learn from: every weight of the batch is 0")
    if batch.loss_fn == "grpo":
        _check_grpo(batch)
    return _LOSSES[batch.loss_fn]


def token_log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log p(targets[:, i] | tokens up to i), [rows, sequence], in float32 whatever the logits' dtype."""
    vocabulary = logits.shape[-1]
    losses = torch.nn.functional.cross_entropy(logits.view(-1, vocabulary), targets.reshape(-1), reduction="none")
    return -losses.view(targets.shape)


def scaled(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The logits in float32, divided by the temperature they were sampled with."""
    logits = logits.float()
    return logits if batch.temperature is None else logits / batch.temperature[..., None]


def causal_cross_entropy(logits: torch.Tensor, rows: Batch, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood of the next tokens, a mean over their weights."""
    return -(token_log_probabilities(scaled(logits, rows), rows.targets) * rows.weights).sum() / batch.weights.sum()


def grpo(logits: torch.Tensor, rows: Batch, batch: Batch) -> torch.Tensor:
    """The clipped policy-gradient loss, with advantages that the caller has computed.

    Without `old_logprobs` the samples are taken as the present model's own, so that every ratio is 1 and the gradient
    that of the plain policy gradient. `config` has eps_clip (0.2), loss_agg_mode (token-mean), entropy_coeff (0) and
    global_batch_size (the batch's rows), which sequence means are divided by.
    """
    logits = scaled(logits, rows)
    new = token_log_probabilities(logits, rows.targets)
    old = new.detach() if rows.old_log_probabilities is None else rows.old_log_probabilities
    advantages = rows.advantages if rows.advantages is not None else torch.zeros_like(new)
    clip = float(batch.config.get("eps_clip", 0.2))
    ratio = torch.exp(new - old)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    entropy_coefficient = float(batch.config.get("entropy_coeff", 0.0))
    if entropy_coefficient:
        logs = torch.log_softmax(logits, dim=-1)
        losses = losses + entropy_coefficient * (logs.exp() * logs).sum(dim=-1)
    return _aggregated(losses, rows, batch)


def _aggregated(losses: torch.Tensor, rows: Batch, batch: Batch) -> torch.Tensor:
    mode = batch.config.get("loss_agg_mode", "token-mean")
    if mode == "token-mean":
        return (losses * rows.weights).sum() / batch.weights.sum()
    sequences = (losses * rows.weights).sum(dim=1)
    if mode == "seq-mean-token-mean":
        sequences = sequences / rows.weights.sum(dim=1).clamp(min=1e-8)
    return sequences.sum() / float(batch.config.get("global_batch_size", batch.rows))


def _check_grpo(batch: Batch) -> None:
    if batch.advantages is None:
        raise ValueError("context.advantages: grpo needs a tensor like input_ids")
    mode = batch.config.get("loss_agg_mode", "token-mean")
    if mode not in _AGGREGATIONS:
        raise ValueError(f"processing.config.loss_agg_mode: must be one of {', '.join(_AGGREGATIONS)}, got {mode!r}")
    _number(batch.config, "eps_clip", 0.2, least=0.0)
    _number(batch.config, "entropy_coeff", 0.0, least=0.0)
    _number(batch.config, "global_batch_size", batch.rows, least=1.0)


def _number(config: Mapping[str, Any], name: str, default: float, *, least: float) -> None:
    value = config.get(name, default)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= least
    if not good:
        raise ValueError(f"processing.config.{name}: must be a number of at least {least:g}, got {value!r}")


_LOSSES: Mapping[str, Loss] = {"causal_cross_entropy": causal_cross_entropy, "grpo": grpo}
