"""What a checkpoint's folder holds: safetensors and JSON, never pickle.

A weights-only save is a Hugging Face model folder. A resumable one has the weights (all of them, or the adapter's alone
with adapter.json, and base.safetensors if what is under it had been loaded) and beside them optimizer.safetensors,
random.safetensors and training_state.json.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cortex_training.local.engine.language_model import Weights
from cortex_training.local.tuning import LoraSettings

_STATE_VERSION = 1
_ADAPTER, _ADAPTER_SETTINGS, _BASE = "adapter.safetensors", "adapter.json", "base.safetensors"
_OPTIMIZER, _RANDOM, _STATE = "optimizer.safetensors", "random.safetensors", "training_state.json"


@dataclass(frozen=True)
class TrainingState:
    """What a training sub-job knows besides its weights."""

    global_steps: int
    learning_rate: float
    random: torch.Tensor
    """torch's generator state, uint8."""
    optimizer: Weights
    last_loss: float | None


def write_model(folder: Path, module: Any, tokenizer_files: Sequence[Path]) -> None:
    """Write a folder that `from_pretrained` of transformers opens: config, weights in safetensors, tokenizer files."""
    module.save_pretrained(folder)
    for file in tokenizer_files:
        shutil.copyfile(file, folder / file.name)


def write_adapter(folder: Path, weights: Weights, lora: LoraSettings, base: Weights | None) -> None:
    """Write the adapter, and the weights under it unless they are the model's own as it came (`base` None)."""
    if base is not None:
        save_file(base, folder / _BASE)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / _ADAPTER)
    _write_json(folder / _ADAPTER_SETTINGS, asdict(lora))


def write_training_state(folder: Path, state: TrainingState) -> None:
    save_file({name: tensor.contiguous() for name, tensor in state.optimizer.items()}, folder / _OPTIMIZER)
    save_file({"random": state.random}, folder / _RANDOM)
    loss = state.last_loss if state.last_loss is not None and math.isfinite(state.last_loss) else None
    _write_json(
        folder / _STATE,
        {
            "v": _STATE_VERSION,
            "global_steps": state.global_steps,
            "learning_rate": state.learning_rate,
            "last_loss": loss,
        },
    )


def read_weights(folder: Path) -> tuple[Weights, LoraSettings | None]:
    """The checkpoint's weights, and the settings of the adapter they are, if any. Raises ValueError without weights."""
    if (folder / _ADAPTER).is_file():
        return load_file(folder / _ADAPTER), _read_lora_settings(folder / _ADAPTER_SETTINGS)
    weights: Weights = {}
    for shard in sorted(folder.glob("model*.safetensors")):
        with safe_open(shard, framework="pt") as opened:
            weights.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a mapping
    if not weights:
        raise ValueError("the checkpoint holds no weights")
    return weights, None


def read_base_weights(folder: Path) -> Weights | None:
    """The weights under an adapter; None when they are the model's own as it came."""
    return load_file(folder / _BASE) if (folder / _BASE).is_file() else None


def read_training_state(folder: Path) -> TrainingState | None:
    """None for a weights-only checkpoint."""
    if not (folder / _STATE).is_file():
        return None
    state = json.loads((folder / _STATE).read_text())
    if state["v"] != _STATE_VERSION:
        raise ValueError(
            f"the checkpoint's state is of version {state['v']}, and this service reads version {_STATE_VERSION}"
        )
    return TrainingState(
        global_steps=state["global_steps"],
        learning_rate=state["learning_rate"],
        random=load_file(folder / _RANDOM)["random"],
        optimizer=load_file(folder / _OPTIMIZER),
        last_loss=state["last_loss"],
    )


def _read_lora_settings(path: Path) -> LoraSettings:
    settings = json.loads(path.read_text())
    modules = settings["target_modules"]
    return LoraSettings(
        r=settings["r"],
        lora_alpha=settings["lora_alpha"],
        lora_dropout=settings["lora_dropout"],
        target_modules=tuple(modules) if isinstance(modules, list) else modules,
        target_parameters=tuple(settings["target_parameters"]),
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
