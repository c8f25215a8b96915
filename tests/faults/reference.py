"""The training that a run stands for, as a loop of plain PyTorch: the oracle that knows nothing of runs or services."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cortex_training import wire

Weights = dict[str, torch.Tensor]


@dataclass
class Reference:
    """What every step of an undisturbed training must show. Steps count from 1, micro-batches from 0."""

    steps: int
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """Mean loss of (step, micro-batch), measured on the weights of ``step - 1``; the last one behind the end."""
    frames: dict[tuple[int, int], str] = field(default_factory=dict)
    """SHA-256 of the frame of (step, micro-batch)."""
    weights: dict[int, Weights] = field(default_factory=dict)
    """The weights that so many steps made; 0 are the initial ones."""
    later: Reference | None = None
    """Where a run goes back and does something else from there: what every segment behind the first must show."""

    def of_segment(self, number: int) -> Reference:
        return self.later if number and self.later is not None else self

    def weights_sha256(self, step: int) -> str:
        """What an execution log says of these weights: SHA-256 over names, dtypes, shapes and bytes, by name."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights[step].items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def mean_loss(self, step: int) -> float:
        found = [loss for (at, _), loss in self.losses.items() if at == step]
        return sum(found) / len(found)


def train(
    model_folder: Path, frames: dict[tuple[int, int], bytes], *, steps: int, micro_batches: int, peak_rate: float
) -> Reference:
    """AdamW with torch's defaults on gradients that add up over a step; the rate falls linearly from `peak_rate`."""
    torch.set_num_threads(1)
    # As the service does: the gradient of an embedding is a sum over tokens, and its order is part of the result too.
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, local_files_only=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate)
    found = Reference(steps)
    found.weights[0] = _copy(model)
    for step in range(1, steps + 2):
        for micro_batch in range(micro_batches if step <= steps else 1):
            frame = frames[step, micro_batch]
            found.frames[step, micro_batch] = hashlib.sha256(frame).hexdigest()
            loss = _loss(model, wire.loads(frame, framework="torch"))
            # One gradient at a time, then added: the order of floating-point additions is part of the result.
            before = [p.grad for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            loss.backward()
            for parameter, earlier in zip(model.parameters(), before, strict=True):
                if earlier is not None:
                    parameter.grad = earlier + parameter.grad
            found.losses[step, micro_batch] = float(loss.detach())
        if step > steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * (1.0 - (step - 1) / steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.weights[step] = _copy(model)
    return found


def _loss(model: torch.nn.Module, frame: dict) -> torch.Tensor:
    inputs, mask = frame["kwargs"], frame["context"]["loss_mask"]
    ids, positions = inputs["input_ids"].long(), inputs["position_ids"].long()
    logits = model(
        input_ids=ids,
        attention_mask=_own_document_only(positions, inputs["attention_mask"].bool()),
        position_ids=positions,
        use_cache=False,
    ).logits.float()
    weights = mask.clone()
    weights[:, -1] = 0
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = 0
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none"
    ).view(targets.shape)
    return (losses * weights).sum() / weights.sum()


def _own_document_only(positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
    """[batch, 1, query, key], 0 where a token may look and the lowest number elsewhere; positions restart a document.

    None for whole documents without padding: causal attention alone goes through another kernel, with other last bits.
    """
    length = positions.shape[1]
    begins = torch.ones_like(positions)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    document = begins.cumsum(1)
    if bool(tokens.all()) and bool((document == 1).all()):
        return None
    looks = (document[:, :, None] == document[:, None, :]) & torch.ones(length, length).tril().bool()
    looks = (looks & tokens[:, None, :]) | torch.eye(length).bool()
    return torch.zeros(looks.shape).masked_fill(~looks, torch.finfo(torch.float32).min)[:, None]


def _copy(model: torch.nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
