"""Typed configuration of a job's sub-jobs, checked before anything remote happens.

The objects are plain dataclasses: build them, `validate()` them, `to_wire()` them. `extra` holds what the service
accepts beyond the typed fields; it is merged into the block and never overrides a typed field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.optimizer import normalize_optimizer
from cortex_training.peft import normalize_lora_peft_config


class JobType(StrEnum):
    TRAINING = "training"
    SAMPLING = "sampling"
    LOG_PROBABILITY = "log_probability"


class Hardware(StrEnum):
    H200 = "H200"
    B200 = "B200"
    B300 = "B300"


class CheckpointType(StrEnum):
    RESUMABLE = "resumable"
    WEIGHTS_ONLY = "weights-only"


# What trainers and samplers call the types of weights; the service says which of them it has.
_DTYPE = re.compile(
    r"(torch\.)?(auto|half|float|double|tf32|(bf|bfloat|fp|float|mxfp|nvfp|nf|u?int)(4|6|8|16|32|64)(_?[a-z]\w*)?)",
    re.ASCII,
)


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigurationError.of(name, value, "must be a whole number greater than 0")


def _optional_number(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigurationError.of(name, value, "must be a finite number, 0 or greater")


def _optional_text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigurationError.of(name, value, "must be a non-empty string, or be left out")


def _optional_dtype(name: str, value: object) -> None:
    _optional_text(name, value)
    if isinstance(value, str) and not _DTYPE.fullmatch(value):
        raise ConfigurationError.of(name, value, "must name a type of numbers, e.g. 'bfloat16' or 'float32'")


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError.of(name, value, "must be a mapping")
    for key in value:
        if not isinstance(key, str):
            raise ConfigurationError.of(name, key, "keys must be strings")


def _merged(name: str, typed: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    block = {**extra, **typed}
    if block.get("peft_config") is not None:
        # Complete, with defaults: a training and a sampling side that mean the same then also say the same.
        block["peft_config"] = normalize_lora_peft_config(block["peft_config"], location=f"{name}.peft_config")
    return block


def _refuse_prime_rl_conflict(name: str, block: Mapping[str, Any]) -> None:
    """PrimeRL's fused cross entropy excludes an fp32 head and a token-chunked head; the service would fail while
    loading.

    The rule belongs to ``model_provider: prime_rl`` alone: other providers accept the same keys.
    """
    nested = block.get("prime_rl")
    nested = nested if isinstance(nested, Mapping) else {}
    if block.get("model_provider") != "prime_rl" and not nested:
        return
    effective = {**block, **nested}
    if effective.get("fused_cross_entropy", "liger") is False:
        return
    chunk = effective.get("fused_lm_head_token_chunk_size")
    chunked = isinstance(chunk, int) and not isinstance(chunk, bool)
    if effective.get("fp32_lm_head") or chunked:
        culprit = "fp32_lm_head" if effective.get("fp32_lm_head") else "fused_lm_head_token_chunk_size"
        raise ConfigurationError.of(
            f"{name}.{culprit}", effective[culprit], "needs fused_cross_entropy: False in the same prime_rl block"
        )


@dataclass
class TrainingConfig:
    """The ``training_config`` block of a training sub-job.

    Sizes are whole numbers; `optimizer` is e.g. ``{"name": "AdamW", "lr": 1e-4}``.
    """

    optimizer: Mapping[str, Any]
    max_seq_len: int
    train_batch_size: int
    n_gpus: int
    gradient_clipping: float | None = None
    multiplex_job_id: str | None = None
    load_optimizer_states: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise `ConfigurationError` naming the field, the value and the fix."""
        for name in ("max_seq_len", "train_batch_size", "n_gpus"):
            _positive_int(f"training_config.{name}", getattr(self, name))
        _optional_number("training_config.gradient_clipping", self.gradient_clipping)
        _optional_text("training_config.multiplex_job_id", self.multiplex_job_id)
        if self.load_optimizer_states is not None and not isinstance(self.load_optimizer_states, bool):
            raise ConfigurationError.of(
                "training_config.load_optimizer_states", self.load_optimizer_states, "must be True, False or left out"
            )
        _mapping("training_config.extra", self.extra)
        _refuse_prime_rl_conflict("training_config", self.to_wire())

    def to_wire(self) -> dict[str, Any]:
        """The JSON block, optimizer and adapter in the service's spelling; fields left at None are left out."""
        optimizer, clipping = normalize_optimizer(self.optimizer, location="training_config.optimizer")
        typed: dict[str, Any] = {
            "optimizer": optimizer,
            "max_seq_len": self.max_seq_len,
            "train_batch_size": self.train_batch_size,
            "n_gpus": self.n_gpus,
        }
        for name in ("gradient_clipping", "multiplex_job_id", "load_optimizer_states"):
            if getattr(self, name) is not None:
                typed[name] = getattr(self, name)
        if typed.setdefault("gradient_clipping", clipping) is None:
            del typed["gradient_clipping"]
        elif clipping is not None and clipping != typed["gradient_clipping"]:
            raise ConfigurationError.of(
                "training_config.gradient_clipping",
                self.gradient_clipping,
                f"the optimizer block says {clipping}; say it once",
            )
        return _merged("training_config", typed, self.extra)


@dataclass
class InferenceConfig:
    """The ``inference_config`` block of a sampling or log-probability sub-job."""

    max_seq_len: int
    n_gpus: int
    multiplex_job_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise `ConfigurationError` naming the field, the value and the fix."""
        for name in ("max_seq_len", "n_gpus"):
            _positive_int(f"inference_config.{name}", getattr(self, name))
        _optional_text("inference_config.multiplex_job_id", self.multiplex_job_id)
        _mapping("inference_config.extra", self.extra)

    def to_wire(self) -> dict[str, Any]:
        """The JSON block; fields left at None are left out."""
        typed: dict[str, Any] = {"max_seq_len": self.max_seq_len, "n_gpus": self.n_gpus}
        if self.multiplex_job_id is not None:
            typed["multiplex_job_id"] = self.multiplex_job_id
        return _merged("inference_config", typed, self.extra)


@dataclass
class SubJobConfig:
    """One sub-job of a job: `training` is set, which is sent as ``training_config``, or `sampling`, which is sent as
    ``inference_config``.

    Use the factories `training_job` and `sampling_job` unless the blocks already exist.
    """

    job_type: JobType | str
    model_name: str
    training: TrainingConfig | None = None
    sampling: InferenceConfig | None = None
    global_batch_size: int | None = None
    dtype: str | None = None
    seed: int | None = None
    model_post_init: Sequence[str] | None = None
    source_checkpoint_info: Mapping[str, Any] | None = None

    @classmethod
    def training_job(
        cls,
        model_name: str,
        optimizer: Mapping[str, Any],
        max_seq_len: int,
        train_batch_size: int,
        n_gpus: int,
        *,
        gradient_clipping: float | None = None,
        multiplex_job_id: str | None = None,
        load_optimizer_states: bool | None = None,
        extra_training: Mapping[str, Any] | None = None,
        global_batch_size: int | None = None,
        dtype: str | None = None,
        seed: int | None = None,
        model_post_init: Sequence[str] | None = None,
        source_checkpoint_info: Mapping[str, Any] | None = None,
    ) -> SubJobConfig:
        """A training sub-job; `extra_training` takes ``peft_config``, ``model_provider``, ``ds_config`` and the
        like.
        """
        training = TrainingConfig(
            optimizer=dict(optimizer),
            max_seq_len=max_seq_len,
            train_batch_size=train_batch_size,
            n_gpus=n_gpus,
            gradient_clipping=gradient_clipping,
            multiplex_job_id=multiplex_job_id,
            load_optimizer_states=load_optimizer_states,
            extra=dict(extra_training or {}),
        )
        return cls(
            job_type=JobType.TRAINING,
            model_name=model_name,
            training=training,
            global_batch_size=global_batch_size,
            dtype=dtype,
            seed=seed,
            model_post_init=model_post_init,
            source_checkpoint_info=source_checkpoint_info,
        )

    @classmethod
    def sampling_job(
        cls,
        model_name: str,
        max_seq_len: int,
        n_gpus: int,
        *,
        job_type: JobType | str = JobType.SAMPLING,
        multiplex_job_id: str | None = None,
        extra_sampling: Mapping[str, Any] | None = None,
        global_batch_size: int | None = None,
        dtype: str | None = None,
        seed: int | None = None,
        model_post_init: Sequence[str] | None = None,
        source_checkpoint_info: Mapping[str, Any] | None = None,
    ) -> SubJobConfig:
        """A sampling (or log-probability) sub-job; `extra_sampling` takes ``peft_config``, ``vllm_config`` and the
        like.
        """
        if canonical_job_type(job_type) == JobType.TRAINING:
            raise ConfigurationError.of(
                "job_type", job_type, "sampling_job makes sampling sub-jobs; use SubJobConfig.training_job"
            )
        inference = InferenceConfig(
            max_seq_len=max_seq_len, n_gpus=n_gpus, multiplex_job_id=multiplex_job_id, extra=dict(extra_sampling or {})
        )
        return cls(
            job_type=job_type,
            model_name=model_name,
            sampling=inference,
            global_batch_size=global_batch_size,
            dtype=dtype,
            seed=seed,
            model_post_init=model_post_init,
            source_checkpoint_info=source_checkpoint_info,
        )

    def validate(self) -> None:
        """Raise `ConfigurationError` naming the field, the value and the fix."""
        kind = canonical_job_type(self.job_type)
        if kind not in set(JobType):
            raise ConfigurationError.of("job_type", self.job_type, f"must be one of {', '.join(JobType)}")
        if not isinstance(self.model_name, str) or not self.model_name.strip():
            raise ConfigurationError.of("model_name", self.model_name, "must name a model, e.g. 'Qwen/Qwen3-0.6B'")
        block: TrainingConfig | InferenceConfig | None = self.training
        surplus: TrainingConfig | InferenceConfig | None = self.sampling
        wanted, other = "training_config", "inference_config"
        if kind != JobType.TRAINING:
            block, surplus, wanted, other = surplus, block, other, wanted
        if surplus is not None:
            raise ConfigurationError.of(other, surplus, f"a {kind} sub-job takes {wanted} only; leave {other} out")
        if block is None:
            raise ConfigurationError.of(wanted, None, f"a {kind} sub-job needs it")
        block.validate()
        if self.global_batch_size is not None:
            _positive_int("global_batch_size", self.global_batch_size)
        _optional_dtype("dtype", self.dtype)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigurationError.of("seed", self.seed, "must be a whole number")
        hooks = self.model_post_init
        if hooks is not None and (isinstance(hooks, str) or not all(isinstance(hook, str) for hook in hooks)):
            raise ConfigurationError.of("model_post_init", hooks, "must be a list of strings")
        if self.source_checkpoint_info is not None:
            _mapping("source_checkpoint_info", self.source_checkpoint_info)

    def to_wire(self) -> dict[str, Any]:
        """The element of ``sub_job_configs``; fields left at None are left out."""
        wire: dict[str, Any] = {"job_type": str(self.job_type), "model_name": self.model_name}
        for name in ("global_batch_size", "dtype", "seed"):
            if getattr(self, name) is not None:
                wire[name] = getattr(self, name)
        if self.model_post_init is not None:
            wire["model_post_init"] = list(self.model_post_init)
        if self.training is not None:
            wire["training_config"] = self.training.to_wire()
        if self.sampling is not None:
            wire["inference_config"] = self.sampling.to_wire()
        if self.source_checkpoint_info is not None:
            wire["source_checkpoint_info"] = dict(self.source_checkpoint_info)
        return wire


def canonical_job_type(raw: object) -> str:
    """``training``, ``sampling`` or ``log_probability`` for the spellings in use (case, spaces, JOB_TYPE_,
    ``log_prob``); else the text.
    """
    text = str(raw.value if isinstance(raw, JobType) else raw).strip().lower().removeprefix("job_type_")
    return JobType.LOG_PROBABILITY.value if text == "log_prob" else text


_LORA_FIELDS = ("r", "lora_alpha", "target_modules")


def check_matching_lora(sub_jobs: Sequence[SubJobConfig]) -> None:
    """Refuse a job whose sampling adapter could not receive the training adapter's weights.

    When both sides of a job carry a ``peft_config``, `r`, `lora_alpha` and `target_modules` must be equal (a weight
    sync with ``weight_format="lora"`` would fail hours later). Raises `ConfigurationError`.
    """
    training = [(index, _lora(job.training)) for index, job in enumerate(sub_jobs)]
    sampling = [(index, _lora(job.sampling)) for index, job in enumerate(sub_jobs)]
    for trained_at, trained in training:
        for sampled_at, sampled in sampling:
            if trained is None or sampled is None:
                continue
            for name in _LORA_FIELDS:
                if trained[name] != sampled[name]:
                    raise ConfigurationError.of(
                        f"sub_jobs[{sampled_at}].inference_config.peft_config.{name}",
                        sampled[name],
                        f"the adapter of sub_jobs[{trained_at}] has {trained[name]!r}; use one peft_config for both",
                    )


def _lora(block: TrainingConfig | InferenceConfig | None) -> dict[str, Any] | None:
    peft = block.to_wire().get("peft_config") if block is not None else None
    if peft is None:
        return None
    found = {name: peft.get(name) for name in _LORA_FIELDS}
    if isinstance(found["target_modules"], list):
        found["target_modules"] = sorted(found["target_modules"])
    return found
