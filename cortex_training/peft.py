"""The LoRA configuration that training, sampling and weight sync all support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex_training.errors import ConfigurationError

PEFT_LORA_DEFAULT_R = 8
PEFT_LORA_DEFAULT_ALPHA = 8
PEFT_LORA_DEFAULT_DROPOUT = 0.0
PEFT_LORA_DEFAULT_BIAS = "none"

SUPPORTED_LORA_PEFT_CONFIG_KEYS = frozenset(
    {"peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias", "target_modules", "target_parameters"}
)


def normalize_lora_peft_config(peft_config: Mapping[str, Any], *, location: str = "peft_config") -> dict[str, Any]:
    """`peft_config` checked and complete: a new dict with all eight keys, defaults filled in.

    `location` names the block in errors. Raises ConfigurationError for other keys and values, among them what weight
    sync cannot carry: ``peft_type`` in another spelling than ``"Lora"`` (a Hugging Face adapter_config.json writes
    ``"LORA"``), a ``bias`` other than ``"none"``, and no target at all.
    """
    if not isinstance(peft_config, Mapping):
        raise ConfigurationError.of(location, peft_config, "must be an object")
    unknown = sorted(map(str, set(peft_config) - SUPPORTED_LORA_PEFT_CONFIG_KEYS))
    if unknown:
        raise ConfigurationError(
            f"{location} contains unsupported field(s): {unknown}; "
            f"supported are {sorted(SUPPORTED_LORA_PEFT_CONFIG_KEYS)}",
            field=f"{location}.{unknown[0]}",
        )
    _exactly(location, "peft_type", peft_config.get("peft_type"), "Lora")
    _exactly(location, "task_type", peft_config.get("task_type", "CAUSAL_LM"), "CAUSAL_LM")
    targets = _targets(location, peft_config)
    return {
        "peft_type": "Lora",
        "task_type": "CAUSAL_LM",
        "r": _integer(f"{location}.r", peft_config.get("r", PEFT_LORA_DEFAULT_R), 1),
        "lora_alpha": _integer(f"{location}.lora_alpha", peft_config.get("lora_alpha", PEFT_LORA_DEFAULT_ALPHA), 0),
        "lora_dropout": _fraction(
            f"{location}.lora_dropout", peft_config.get("lora_dropout", PEFT_LORA_DEFAULT_DROPOUT)
        ),
        "bias": _bias(f"{location}.bias", peft_config.get("bias", PEFT_LORA_DEFAULT_BIAS)),
        **targets,
    }


def _exactly(location: str, name: str, value: object, expected: str) -> None:
    if value != expected:
        raise ConfigurationError.of(f"{location}.{name}", value, f"must be {expected!r}, in this spelling")


def _integer(field: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError.of(field, value, f"must be an integer, at least {least}")
    return value


def _fraction(field: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigurationError.of(field, value, "must be a number in [0, 1]")
    return float(value)


def _bias(field: str, value: object) -> str:
    if value in ("all", "lora_only"):
        raise ConfigurationError.of(field, value, "trained biases cannot be sampled from; use 'none'")
    if value != "none":
        raise ConfigurationError.of(field, value, "must be 'none'")
    return "none"


def _targets(location: str, peft_config: Mapping[str, Any]) -> dict[str, Any]:
    """``target_modules`` (names, or one pattern) and ``target_parameters``; at least one of them names something."""
    modules = peft_config.get("target_modules", [])
    if isinstance(modules, str):
        if not modules.strip():
            raise ConfigurationError.of(f"{location}.target_modules", modules, "must not be empty")
    else:
        modules = _names(f"{location}.target_modules", modules, "must be a string or a list of non-empty strings")
    parameters = peft_config.get("target_parameters", [])
    parameters = _names(f"{location}.target_parameters", parameters, "must be a list of non-empty strings")
    if not modules and not parameters:
        raise ConfigurationError(
            f"{location} must name target_modules, target_parameters, or both, e.g. target_modules=['q_proj']",
            field=f"{location}.target_modules",
        )
    return {"target_modules": modules, "target_parameters": parameters}


def _names(field: str, value: object, fix: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name.strip() for name in value):
        raise ConfigurationError.of(field, value, fix)
    return list(value)
