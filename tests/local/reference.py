"""The same model in plain transformers and PyTorch, to compare the service with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from cortex_training.local.models import model_folder


def tiny(dtype: torch.dtype = torch.float32) -> Any:
    """The model that the service serves as `tiny`, in training mode."""
    return opened(model_folder("tiny"), dtype).train()


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


def masked_loss(model: Any, input_ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of token i + 1 with weight loss_mask[:, i]; arguments are [batch, sequence]."""
    logits = model(input_ids=input_ids).logits.float()
    chosen = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    weights = loss_mask[:, :-1]
    return -(chosen * weights).sum() / weights.sum()


def weights_of(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    """The tensors of an exported checkpoint's weights."""
    return load(files["model.safetensors"])
