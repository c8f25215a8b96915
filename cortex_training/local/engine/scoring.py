"""A batch measured without learning from it, and batches cut to what memory holds."""

from __future__ import annotations

from typing import Any

import torch

from cortex_training.local.engine.batch import Batch, next_tokens
from cortex_training.local.engine.language_model import LanguageModel
from cortex_training.local.engine.losses import loss_of, scaled, token_log_probabilities

_LOGITS_AT_ONCE = 64 * 1024 * 1024
"""Most logits in memory at a time (256 MiB as float32): a larger batch goes through a few rows at a time."""


@torch.no_grad()
def score(model: LanguageModel, batch: Batch) -> dict[str, Any]:
    """`avg_loss`, and with compute_logprobs the log-probabilities, float32 [batch, sequence].

    They are shifted: column i is the log-probability of input_ids[:, i + 1], and the last column is 0.
    """
    batch = batch.to(model.device)
    loss = loss_of(batch)
    mean, parts = 0.0, []
    for rows in in_parts(batch, model.vocabulary):
        logits = model.logits(rows)
        mean += float(loss(logits, rows, batch))
        if batch.wants_log_probabilities:
            log_probabilities = token_log_probabilities(scaled(logits, rows), next_tokens(rows.input_ids))
            log_probabilities[:, -1] = 0
            parts.append(log_probabilities.cpu())
    outputs = {"logprobs_shifted": torch.cat(parts)} if parts else {}
    return {"avg_loss": mean, "metrics": {"loss": mean}, "post_process_outputs": outputs}


def in_parts(batch: Batch, vocabulary: int) -> list[Batch]:
    """The batch in groups of rows whose logits fit in memory."""
    length = batch.input_ids.shape[1]
    rows = max(1, _LOGITS_AT_ONCE // (length * vocabulary))
    if rows >= batch.rows:
        return [batch]
    return [batch.only_rows(slice(first, first + rows)) for first in range(0, batch.rows, rows)]
