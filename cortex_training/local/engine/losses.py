"""The losses that a frame can name, each a sum over positions: the caller divides by the batch's weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from cortex_training.local.engine.batch import Batch

LossSum = Callable[[torch.Tensor, Batch], torch.Tensor]


def token_log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log p(targets[:, i] | tokens up to i), [batch, sequence], in float32 whatever the logits' dtype."""
    vocabulary = logits.shape[-1]
    losses = torch.nn.functional.cross_entropy(
        logits.float().view(-1, vocabulary), targets.reshape(-1), reduction="none"
    )
    return -losses.view(targets.shape)


def causal_cross_entropy(log_probabilities: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood of each next token, times its weight, summed."""
    return -(log_probabilities * batch.weights).sum()


LOSSES: Mapping[str, LossSum] = {"causal_cross_entropy": causal_cross_entropy}


def loss_named(name: str) -> LossSum:
    """Raises ValueError naming the losses there are."""
    if name not in LOSSES:
        raise ValueError(
            f"processing.loss_fn: {name!r} is not a loss of this service; there are {', '.join(sorted(LOSSES))}"
        )
    return LOSSES[name]
