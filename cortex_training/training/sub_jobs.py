"""The sub-jobs of a plan, checked as the typed configuration is, before a job is paid for.

A plan holds them as they are posted, and they are posted as they are. What the service reads in more than one way stays
allowed: whole numbers written as floats, DeepSpeed's switches for the optimizer's kernel, any spelling of ``Lora``. A
block may hold keys that no field is typed for, so that a field of a newer service needs no newer release; beside the
blocks the service takes no others.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cortex_training.config import InferenceConfig, JobType, SubJobConfig, TrainingConfig, canonical_job_type
from cortex_training.errors import ConfigurationError

_KERNEL_SWITCHES = ("foreach", "torch_adam", "adam_w_mode")
_MISSPELT = 0.9
"""How alike (`difflib`) a key has to be to a typed one to be taken for a slip of it."""

Block = TypeVar("Block", TrainingConfig, InferenceConfig)


def checked_sub_jobs(sub_jobs: Iterable[Mapping[str, Any]], location: str) -> list[SubJobConfig]:
    """The sub-jobs (wire bodies) in their typed form; raises `ConfigurationError` naming e.g.
    ``{location}[1].inference_config.n_gpus``.
    """
    found = []
    for number, wire in enumerate(sub_jobs):
        try:
            config = _typed(wire)
            config.validate()
            config.to_wire()  # checks the blocks that only come into one form there
        except ConfigurationError as problem:
            raise located(problem, f"{location}[{number}].") from None
        found.append(config)
    _require_one_training(found, location)
    return found


def located(problem: ConfigurationError, prefix: str) -> ConfigurationError:
    """The same problem with the path of its field from further out."""
    return ConfigurationError(f"{prefix}{problem}", field=f"{prefix}{problem.field}")


def _require_one_training(configs: list[SubJobConfig], location: str) -> None:
    training = [n for n, config in enumerate(configs) if canonical_job_type(config.job_type) == JobType.TRAINING]
    if len(training) != 1:
        raise ConfigurationError.of(location, len(training), "give exactly one sub-job with job_type=training")
    spelling = configs[training[0]].job_type
    if spelling != "training":
        # The run finds its sub-job by this word, in what the service answers too.
        raise ConfigurationError.of(f"{location}[{training[0]}].job_type", spelling, 'write it as "training"')


def _typed(wire: Mapping[str, Any]) -> SubJobConfig:
    known = {f.name for f in dataclasses.fields(SubJobConfig)} - {"training", "sampling"}
    known |= {"training_config", "inference_config"}
    for key in sorted(set(wire) - known, key=str):
        meant = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {meant[0]}? " if meant else ""
        raise ConfigurationError.of(
            str(key),
            wire[key],
            f"{hint}known keys: {', '.join(sorted(known))}. A new field of the service belongs into training_config or "
            "inference_config, or create the job yourself and give the plan its job_id",
        )
    given = {name: _whole(wire[name]) for name in known & set(wire) if not name.endswith("_config")}
    return SubJobConfig(
        **{"job_type": None, "model_name": None, **given},
        training=_block(TrainingConfig, "training_config", wire.get("training_config")),
        sampling=_block(InferenceConfig, "inference_config", wire.get("inference_config")),
    )


def _block(kind: type[Block], name: str, wire: Any) -> Block | None:
    if wire is None:
        return None
    if not isinstance(wire, Mapping):
        raise ConfigurationError.of(name, wire, "give an object")
    typed = {f.name for f in dataclasses.fields(kind)} - {"extra"}
    required = [f.name for f in dataclasses.fields(kind) if f.name != "extra" and f.default is dataclasses.MISSING]
    for key in sorted(set(wire) - typed, key=str):
        meant = difflib.get_close_matches(str(key), typed, n=1, cutoff=_MISSPELT)
        if meant:
            raise ConfigurationError.of(f"{name}.{key}", wire[key], f"did you mean {meant[0]}?")
    given = {key: _whole(wire[key]) for key in typed & set(wire)}
    extra = {key: value for key, value in wire.items() if key not in typed}
    if "optimizer" in given:
        given["optimizer"] = _without_kernel_switches(given["optimizer"])
    if extra.get("peft_config") == {}:
        del extra["peft_config"]
    elif isinstance(extra.get("peft_config"), Mapping):
        extra["peft_config"] = _adapter(extra["peft_config"])
    return kind(**{**dict.fromkeys(required), **given}, extra=extra)


def _without_kernel_switches(optimizer: Any) -> Any:
    if not isinstance(optimizer, Mapping):
        return optimizer
    kept = {key: value for key, value in optimizer.items() if key not in _KERNEL_SWITCHES}
    if isinstance(kept.get("params"), Mapping):
        kept["params"] = {key: value for key, value in kept["params"].items() if key not in _KERNEL_SWITCHES}
    return kept


def _adapter(peft_config: Mapping[str, Any]) -> dict[str, Any]:
    kind = peft_config.get("peft_type", "Lora")
    spelt = "Lora" if isinstance(kind, str) and kind.lower() == "lora" else kind
    return {**{key: _whole(value) for key, value in peft_config.items()}, "peft_type": spelt}


def _whole(value: Any) -> Any:
    """Services answer 2048.0 for 2048, and read it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
