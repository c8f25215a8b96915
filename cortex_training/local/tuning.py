"""Optimizer and LoRA blocks of a sub-job, checked when the job is created."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortex_training.local.refusals import Refusal, bad_field


@dataclass(frozen=True)
class AdamWSettings:
    """Settings of torch.optim.AdamW; what the block leaves out has torch's own default."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True)
class LoraSettings:
    """What makes two adapters the same; `target_modules` is sorted, or one regular expression as PEFT takes it."""

    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: tuple[str, ...] | str | None
    target_parameters: tuple[str, ...]


def read_adamw(where: str, block: object) -> AdamWSettings:
    """Read ``training_config.optimizer``, flat or with DeepSpeed's ``params``. Raises Refusal (400)."""
    if not isinstance(block, dict) or not block:
        raise bad_field(where, block, 'must be an object such as {"name": "AdamW", "lr": 0.0001}')
    flat = {**block, **_object(f"{where}.params", block.get("params", {}))}
    flat.pop("params", None)
    name = flat.pop("name", None) or flat.pop("type", None) or "AdamW"
    flat.pop("type", None)
    if not isinstance(name, str) or name.lower() not in ("adamw", "fusedadam", "fused_adamw"):
        raise bad_field(f"{where}.name", name, "must be AdamW")
    default = AdamWSettings()
    beta1 = flat.pop("beta1", default.betas[0])
    beta2 = flat.pop("beta2", default.betas[1])
    betas = flat.pop("betas", (beta1, beta2))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise bad_field(f"{where}.betas", betas, "must be two numbers")
    settings = AdamWSettings(
        lr=number(f"{where}.lr", flat.pop("lr", default.lr)),
        betas=(number(f"{where}.betas.0", betas[0], below=1.0), number(f"{where}.betas.1", betas[1], below=1.0)),
        eps=number(f"{where}.eps", flat.pop("eps", default.eps)),
        weight_decay=number(f"{where}.weight_decay", flat.pop("weight_decay", default.weight_decay)),
    )
    # How the kernel is called changes nothing that this service promises.
    for kernel in ("fused", "foreach", "torch_adam", "adam_w_mode"):
        flat.pop(kernel, None)
    if flat:
        raise Refusal(
            400, f"{where}: unknown field {sorted(flat)[0]!r} for AdamW; it takes name, lr, betas, eps, weight_decay"
        )
    return settings


def read_lora(where: str, block: Mapping[str, Any] | None) -> LoraSettings | None:
    """Read a ``peft_config`` block; None when there is none. Raises Refusal (400)."""
    if not block:
        return None
    peft_type = block.get("peft_type", "Lora")
    if not isinstance(peft_type, str) or peft_type.lower() != "lora":
        raise bad_field(f"{where}.peft_type", peft_type, 'must be "Lora"')
    rank = block.get("r", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank <= 1024:
        raise bad_field(f"{where}.r", rank, "must be a whole number from 1 to 1024")
    if block.get("bias", "none") != "none":
        raise bad_field(f"{where}.bias", block["bias"], 'must be "none"')
    modules = block.get("target_modules")
    if isinstance(modules, list | tuple):
        modules = tuple(sorted(_names(f"{where}.target_modules", modules)))
    elif modules is not None and (not isinstance(modules, str) or not modules):
        raise bad_field(f"{where}.target_modules", modules, "must be a list of module names or one expression")
    parameters = tuple(sorted(_names(f"{where}.target_parameters", block.get("target_parameters") or ())))
    if not modules and not parameters:
        raise bad_field(f"{where}.target_modules", modules, "must name the modules to adapt, such as q_proj and v_proj")
    return LoraSettings(
        r=rank,
        lora_alpha=number(f"{where}.lora_alpha", block.get("lora_alpha", 8)),
        lora_dropout=number(f"{where}.lora_dropout", block.get("lora_dropout", 0.0), below=1.0),
        target_modules=modules or None,
        target_parameters=parameters,
    )


def number(name: str, value: object, *, below: float | None = None) -> float:
    """A finite number of at least 0 (and less than `below`). Raises Refusal (400)."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not isinstance(value, int | float) or not good or (below is not None and value >= below):
        raise bad_field(name, value, "must be a number of at least 0" + (f" and less than {below:g}" if below else ""))
    return float(value)


def _names(where: str, value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise bad_field(where, value, "must be a list of names")
    return list(value)


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_field(where, value, "must be an object")
    return value
