"""What sub-jobs compute with in a simulation: results shaped like real ones, after the time that was drawn.

The state is a digest that every step advances by the batches before it, so that two runs that executed the same
operations in the same order have equal weights, and others have not.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from cortex_training import wire
from cortex_training.local.assumptions import Assumptions
from cortex_training.local.generation_request import Prompt
from cortex_training.local.job_spec import SubJobSpec
from cortex_training.local.memory import memory
from cortex_training.local.requests import CancelledWhileRunning
from cortex_training.local.simulation import Pace

_VOCABULARY = 512
_STOP_EVERY_S = 0.02
_WEIGHTS, _STATE = "model.safetensors", "training_state.json"
Weights = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Measured:
    """What one forward-backward measured."""

    avg_loss: float
    metrics: dict[str, float]


class SimulatedTraining:
    """Stands where a TrainingEngine stands. Used by one thread."""

    def __init__(self, spec: SubJobSpec, assumptions: Assumptions, pace: Pace) -> None:
        self._spec = spec
        self._assumptions = assumptions
        self._pace = pace
        self._state = hashlib.sha256(f"{spec.model_name}/{spec.seed}".encode()).digest()
        self._accumulated: list[bytes] = []
        self._learning_rate = spec.optimizer.lr if spec.optimizer is not None else 0.0
        self.last_loss: float | None = None
        self.global_steps = 0

    def forward_backward(self, frame: object) -> Measured:
        """Raises ValueError for a frame without token ids, as the real engine does, and for accumulation refused."""
        if self._accumulated and self._assumptions.accumulation == "refuse":
            raise ValueError("a forward-backward is already accumulated; send a step first")
        batch = _token_ids(frame)
        time.sleep(self._pace.next("forward-backward"))
        digest = hashlib.sha256(batch.tobytes()).digest()
        self._accumulated.append(digest)
        self.last_loss = self._loss(digest)
        rows, length = batch.shape
        metrics = {
            "loss": self.last_loss,
            "loss_tokens": float(rows * (length - 1)),
            "sequences": float(rows),
            "tokens": float(rows * length),
        }
        return Measured(self.last_loss, metrics)

    def forward(self, frame: object) -> dict[str, Any]:
        return _scored(frame, self._pace, self._loss)

    def step(self, learning_rate: float | None) -> dict[str, Any]:
        time.sleep(self._pace.next("step"))
        if learning_rate is not None:
            self._learning_rate = learning_rate
        self._state = hashlib.sha256(b"".join([self._state, *self._accumulated])).digest()
        norm = 1.0 if self._accumulated else 0.0
        self._accumulated.clear()
        self.global_steps += 1
        result: dict[str, Any] = {
            "global_steps": self.global_steps,
            "last_lr": self._learning_rate,
            "metrics": {"grad_norm": norm},
        }
        if self._spec.block.get("step_peak_memory_log"):
            result["peak_memory"] = memory()
        return result

    def save_resumable(self, folder: Path) -> None:
        self.save_weights(folder)
        state = {
            "v": 1,
            "global_steps": self.global_steps,
            "learning_rate": self._learning_rate,
            "last_loss": self.last_loss,
        }
        (folder / _STATE).write_text(json.dumps(state) + "\n")

    def save_weights(self, folder: Path) -> None:
        time.sleep(self._pace.next("save"))
        save_file(_as_weights(self._state), folder / _WEIGHTS)
        (folder / "config.json").write_text(json.dumps({"model_type": "simulated", "vocab_size": _VOCABULARY}) + "\n")

    def load(self, folder: Path) -> None:
        time.sleep(self._pace.next("load"))
        self._state = _read_state(folder)
        state = json.loads((folder / _STATE).read_text()) if (folder / _STATE).is_file() else None
        if self._assumptions.load_gradients == "clear":
            self.lose_gradients()
        self.last_loss = state["last_loss"] if state else None
        if state and self._spec.load_optimizer_states:
            self._learning_rate = state["learning_rate"]
        if self._assumptions.global_steps == "zero":
            self.global_steps = 0
        elif state and self._assumptions.global_steps == "restored":
            self.global_steps = state["global_steps"]

    def lose_gradients(self) -> None:
        self._accumulated.clear()

    def weights_sha256(self) -> str:
        return hashlib.sha256(self._state).hexdigest()

    def full_weights(self) -> Weights:
        time.sleep(self._pace.next("weight-sync"))
        return _as_weights(self._state)

    def adapter_weights(self) -> Weights:
        return self.full_weights()

    def _loss(self, batch_sha256: bytes) -> float:
        """Falls slowly with the steps, and is a little different for every batch."""
        return 6.0 * math.pow(1 + self.global_steps, -0.1) + batch_sha256[0] / 2550


class SimulatedSampling:
    """Stands where a SamplingEngine stands. Used by one thread."""

    def __init__(self, spec: SubJobSpec, pace: Pace) -> None:
        self._spec = spec
        self._pace = pace
        self._state = hashlib.sha256(f"{spec.model_name}/{spec.seed}".encode()).digest()

    def set_full_weights(self, weights: Weights) -> None:
        self._state = weights["state"].tobytes()

    def set_adapter_weights(self, weights: Weights) -> None:
        self.set_full_weights(weights)

    def load(self, folder: Path) -> None:
        time.sleep(self._pace.next("load"))
        self._state = _read_state(folder)

    def forward(self, frame: object) -> dict[str, Any]:
        return _scored(frame, self._pace, lambda digest: 6.0 + digest[0] / 2550)

    def generate(self, prompts: Sequence[Prompt], stopped: Callable[[], bool]) -> list[dict[str, Any]]:
        _sleep_unless(stopped, self._pace.next("generate"))
        return [self._sample(index, prompt) for index, prompt in enumerate(prompts)]

    def sample(
        self,
        prompts: Sequence[Prompt],
        stopped: Callable[[], bool],
        finished: Callable[[int, dict[str, Any]], None],
        refused: Callable[[int, str], None],
    ) -> None:
        """Results come one after another, spread over the time."""
        seconds = self._pace.next("generate-stream") / len(prompts)
        for index, prompt in enumerate(prompts):
            _sleep_unless(stopped, seconds)
            try:
                finished(index, self._sample(index, prompt))
            except ValueError as error:
                refused(index, str(error))

    @staticmethod
    def as_tensors(result: dict[str, Any]) -> dict[str, Any]:
        """A result as a DSSST1 frame carries it: ids int64 [tokens], log-probabilities float32 [tokens]."""
        ids, logprobs = np.array(result["token_ids"], np.int64), np.array(result["logprobs"], np.float32)
        return {**result, "token_ids": ids, "logprobs": logprobs}

    def _sample(self, index: int, prompt: Prompt) -> dict[str, Any]:
        """Raises ValueError for a prompt that leaves no room in the window."""
        ids = list(prompt.token_ids) if prompt.token_ids is not None else list(prompt.text.encode(errors="replace"))
        room = self._spec.max_seq_len - len(ids)
        if room <= 0:
            window = self._spec.max_seq_len
            raise ValueError(f"prompts[{index}]: {len(ids)} tokens leave no room in the window of {window}")
        params = prompt.params
        origin = f"{self._state.hex()}/{params.seed}/{index}/{ids}".encode()
        count = min(params.max_tokens, room)
        drawn = np.random.default_rng(list(hashlib.sha256(origin).digest()))
        token_ids = [int(one) for one in drawn.integers(97, 123, count)]
        return {
            "text": bytes(token_ids).decode("ascii"),
            "token_ids": token_ids,
            "logprobs": [round(float(one), 6) for one in -drawn.exponential(1.0, count)],
            "finish_reason": "length",
            "prompt_tokens": len(ids),
        }


def _scored(frame: object, pace: Pace, loss_of: Callable[[bytes], float]) -> dict[str, Any]:
    batch = _token_ids(frame)
    time.sleep(pace.next("forward"))
    loss = loss_of(hashlib.sha256(batch.tobytes()).digest())
    outputs: dict[str, Any] = {}
    processing = frame.get("processing") if isinstance(frame, dict) else None
    if isinstance(processing, dict) and "compute_logprobs" in (processing.get("post") or []):
        logprobs = np.full(batch.shape, -loss, np.float32)
        logprobs[:, -1] = 0
        outputs = {"logprobs_shifted": logprobs}
    return {"avg_loss": loss, "metrics": {"loss": loss}, "post_process_outputs": outputs}


def _token_ids(frame: object) -> np.ndarray[Any, Any]:
    """The batch's token ids, int64 [batch, sequence]. Raises ValueError when there are none."""
    kwargs = frame.get("kwargs") if isinstance(frame, dict) else None
    ids = kwargs.get("input_ids") if isinstance(kwargs, dict) else None
    if isinstance(ids, wire.RawTensor) or not isinstance(ids, np.ndarray) or ids.ndim != 2 or not ids.size:
        raise ValueError("kwargs.input_ids: must be a tensor of token ids [batch, sequence]")
    return ids


def _sleep_unless(stopped: Callable[[], bool], seconds: float) -> None:
    """Raises CancelledWhileRunning when told to stop."""
    until = time.monotonic() + seconds
    while not stopped():
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _STOP_EVERY_S))
    raise CancelledWhileRunning


def _as_weights(state: bytes) -> Weights:
    return {"state": np.frombuffer(state, np.uint8).copy()}


def _read_state(folder: Path) -> bytes:
    if not (folder / _WEIGHTS).is_file():
        raise ValueError("the checkpoint holds no weights")
    weights = load_file(folder / _WEIGHTS)
    if "state" not in weights:
        raise ValueError("the checkpoint was saved by a service that trained, and this one simulates")
    return bytes(weights["state"].tobytes())
