"""A training sub-job: forward-backwards add up gradients, a step spends them, and the state is saved and loaded."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cortex_training.local.assumptions import Assumptions
from cortex_training.local.engine.batch import Batch, read_batch
from cortex_training.local.engine.checkpoint_files import (
    TrainingState,
    read_base_weights,
    read_training_state,
    read_weights,
    write_adapter,
    write_model,
    write_training_state,
)
from cortex_training.local.engine.language_model import LanguageModel, Weights, load_language_model
from cortex_training.local.engine.losses import Loss, loss_of
from cortex_training.local.engine.optimizer import Optimizer
from cortex_training.local.engine.randomness import RandomStream
from cortex_training.local.engine.scoring import in_parts, score
from cortex_training.local.job_spec import SubJobSpec
from cortex_training.local.memory import memory


@dataclass(frozen=True)
class Measured:
    """What one forward-backward measured."""

    avg_loss: float
    metrics: dict[str, float]


class TrainingEngine:
    """One model that learns. Used by one thread."""

    def __init__(self, spec: SubJobSpec, folder: Path, assumptions: Assumptions) -> None:
        if spec.optimizer is None:
            raise ValueError(f"a {spec.kind} sub-job has no optimizer, so it cannot train")
        self._spec = spec
        self._assumptions = assumptions
        self._random = RandomStream(spec.seed)
        self._model: LanguageModel = load_language_model(
            folder, dtype=spec.dtype, lora=spec.lora, random=self._random, window=spec.max_seq_len
        )
        self._model.module.train()
        self._optimizer = Optimizer(self._model.trained_parameters(), spec.optimizer)
        self._accumulated = 0
        self._last_loss: float | None = None
        self.global_steps = 0

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the last forward-backward, None before the first."""
        return self._last_loss

    def forward_backward(self, frame: object) -> Measured:
        """Add the gradient of the batch's mean loss to those there are. Raises ValueError, having changed nothing."""
        batch = read_batch(frame, vocabulary=self._model.vocabulary, max_seq_len=self._spec.max_seq_len)
        if self._accumulated and self._assumptions.accumulation == "refuse":
            raise ValueError("a forward-backward is already accumulated; send a step first")
        batch = batch.to(self._model.device)
        loss = loss_of(batch)
        before = self._take_gradients()
        try:
            mean = self._backward(batch, loss)
        except BaseException:
            self._put_gradients(before)
            raise
        self._add_gradients(before)
        self._accumulated += 1
        self._last_loss = mean
        return Measured(
            mean,
            {
                "loss": mean,
                "loss_tokens": float(batch.weights.sum()),
                "sequences": float(batch.rows),
                "tokens": float(batch.tokens),
            },
        )

    def forward(self, frame: object) -> dict[str, Any]:
        """Measure a batch without learning from it: no gradient, no dropout."""
        batch = read_batch(frame, vocabulary=self._model.vocabulary, max_seq_len=self._spec.max_seq_len)
        self._model.module.eval()
        try:
            return score(self._model, batch)
        finally:
            self._model.module.train()

    def step(self, learning_rate: float | None) -> dict[str, Any]:
        """Spend the accumulated gradients. A given learning rate stays for the steps after it, as in torch."""
        if learning_rate is not None:
            self._optimizer.set_learning_rate(learning_rate)
        norm = self._optimizer.step(self._spec.gradient_clipping)
        self._accumulated = 0
        self.global_steps += 1
        result: dict[str, Any] = {
            "global_steps": self.global_steps,
            "last_lr": self._optimizer.learning_rate,
            "metrics": {"grad_norm": norm},
        }
        if self._spec.block.get("step_peak_memory_log"):
            result["peak_memory"] = memory()
        return result

    def save_resumable(self, folder: Path) -> None:
        """Write what `load` needs to go on bit for bit. Accumulated gradients are not part of it."""
        if self._model.lora is None:
            write_model(folder, self._model.module, self._model.tokenizer_files())
        else:
            base = None if self._model.base_is_original else self._model.base_weights()
            write_adapter(folder, self._model.adapter_weights(), self._model.lora, base)
        state = TrainingState(
            self.global_steps,
            self._optimizer.learning_rate,
            self._random.state,
            self._optimizer.tensors(),
            self._last_loss,
        )
        write_training_state(folder, state)

    def save_weights(self, folder: Path) -> None:
        """Write a plain Hugging Face model, any adapter merged, that `transformers` opens by itself."""
        write_model(folder, self._model.merged(), self._model.tokenizer_files())

    def load(self, folder: Path) -> None:
        """Take weights, and the optimizer's state if the checkpoint has one and the sub-job wants it.

        Raises ValueError when the checkpoint is of a model of another shape.
        """
        weights, lora = read_weights(folder)
        state = read_training_state(folder)
        if lora is not None and lora != self._model.lora:
            raise ValueError(f"the checkpoint's adapter is {lora}, and this sub-job's is {self._model.lora}")
        if state is not None and self._spec.load_optimizer_states:
            self._optimizer.require_same_parameters(state.optimizer)
        if lora is None:
            self._model.set_full_weights(weights)
        else:
            self._model.set_base_weights(read_base_weights(folder))
            self._model.set_adapter_weights(weights)
        self._optimizer.take_weights()
        if self._assumptions.load_gradients == "clear":
            self.lose_gradients()
        self._last_loss = state.last_loss if state is not None else None
        if state is not None and self._spec.load_optimizer_states:
            self._optimizer.restore(state.optimizer, state.learning_rate)
            self._random.state = state.random
        if self._assumptions.global_steps == "zero":
            self.global_steps = 0
        elif state is not None and self._assumptions.global_steps == "restored":
            self.global_steps = state.global_steps

    def lose_gradients(self) -> None:
        """Forget what is accumulated, as a worker that restarts does."""
        self._optimizer.clear_gradients()
        self._accumulated = 0

    def weights_sha256(self) -> str:
        """SHA-256 over names, dtypes and bytes of the parameters that train."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self._model.trained_parameters().items()):
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def full_weights(self) -> Weights:
        return self._model.full_weights()

    def adapter_weights(self) -> Weights:
        """Raises ValueError when the sub-job trains all weights."""
        if self._model.lora is None:
            raise ValueError("the training sub-job has no LoRA adapter; create it with training_config.peft_config")
        return self._model.adapter_weights()

    def _backward(self, batch: Batch, loss: Loss) -> float:
        """Leave the gradient of the batch's mean loss in `.grad`, and return that loss."""
        total = 0.0
        with self._random.drawing() if self._model.has_dropout else nullcontext():
            for rows in in_parts(batch, self._model.vocabulary):
                mean: Any = loss(self._model.logits(rows), rows, batch)
                mean.backward()
                total += float(mean.detach())
        return total

    def _take_gradients(self) -> dict[str, torch.Tensor]:
        """Set the accumulated gradients aside, so that a batch that fails half-way leaves no trace in them."""
        aside: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.trained_parameters().items():
            if parameter.grad is not None:
                aside[name] = parameter.grad
                parameter.grad = None
        return aside

    def _put_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._model.trained_parameters().items():
            parameter.grad = gradients.get(name)

    def _add_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._model.trained_parameters().items():
            if name in gradients:
                parameter.grad = gradients[name] if parameter.grad is None else gradients[name].add_(parameter.grad)
