"""What a training run shall do, as plain data that is checked as a whole before anything remote happens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.training.schedule import LearningRate

PLAN_VERSION = 1

_POSITIVE = ("steps", "micro_batch_size", "micro_batches_per_step", "save_every_steps")
_SECONDS = ("running_timeout_s", "request_timeout_s", "patience_s")


@dataclass(frozen=True)
class TrainingPlan:
    """A durable training run, described.

    Either `sub_jobs` (wire bodies of the sub-jobs to create; the run then owns its job and may replace it) or
    `job_id` (a job that somebody else owns; replacements are forbidden and a state that only a new job could mend
    fails the run).

    Args:
        root: directory that holds the run; the run's identity. Starting the same plan on the same root goes on with it.
        dataset: path of a dataset's ``manifest.json``.
        steps: optimizer steps in the whole run.
        micro_batch_size: packed sequences in one forward-backward.
        micro_batches_per_step: forward-backwards before each step. Their per-call mean losses add up undivided on the
            service.
        save_every_steps: resumable save after every so many steps, and always after the last.
        keep_publications: publications to keep on the run's root; older ones are pruned.
        weight_sync_every_steps: copy the weights to the job's sampling sub-jobs every so many steps; None never does.
        when_done: ``cancel`` ends an owned job after the last step; ``keep`` leaves it to its owner (a teardown task).
        max_attempts: executions of one forward-backward whose request failed or was cancelled.
        max_replacements: jobs a run may create beyond its first.
        running_timeout_s: longest wait for a job to be running.
        request_timeout_s: longest wait for one request.
        patience_s: how long an unreachable service is waited for.
    """

    root: str
    dataset: str
    steps: int
    micro_batch_size: int
    job_id: str | None = None
    sub_jobs: tuple[Mapping[str, Any], ...] = ()
    micro_batches_per_step: int = 1
    learning_rate: LearningRate = field(default_factory=LearningRate)
    seed: int = 0
    save_every_steps: int = 50
    keep_publications: int = 3
    weight_sync_every_steps: int | None = None
    experiment_name: str | None = None
    hardware: str | None = None
    idle_timeout_seconds: int | None = None
    pending_timeout_seconds: int | None = None
    when_done: str = "cancel"
    max_attempts: int = 3
    max_replacements: int = 3
    running_timeout_s: float = 86_400.0
    request_timeout_s: float = 1_800.0
    patience_s: float = 3_600.0
    v: int = PLAN_VERSION

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> TrainingPlan:
        """Build a plan from JSON or TOML data; raises `ConfigurationError` naming an unknown or missing key."""
        data = dict(value)
        version = data.get("v", PLAN_VERSION)
        if version != PLAN_VERSION:
            raise ConfigurationError.of(
                "plan.v", version, f"this release reads version {PLAN_VERSION}; run the release that wrote the plan"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigurationError.of(
                f"plan.{unknown[0]}", data[unknown[0]], f"known keys: {', '.join(sorted(known))}"
            )
        for name in ("root", "dataset", "steps", "micro_batch_size"):
            if name not in data:
                raise ConfigurationError.of(f"plan.{name}", None, "this key is required")
        if isinstance(data.get("learning_rate"), Mapping):
            data["learning_rate"] = LearningRate.from_dict(data["learning_rate"])
        data["sub_jobs"] = tuple(data.get("sub_jobs") or ())
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["learning_rate"] = self.learning_rate.to_dict()
        out["sub_jobs"] = [dict(sub_job) for sub_job in self.sub_jobs]
        return out

    @property
    def owns_job(self) -> bool:
        return self.job_id is None

    @property
    def training_sub_job(self) -> Mapping[str, Any] | None:
        return next((s for s in self.sub_jobs if s.get("job_type") == "training"), None)

    @property
    def sampling_sub_jobs(self) -> int:
        return sum(1 for s in self.sub_jobs if s.get("job_type") == "sampling")

    def validate(self) -> None:
        """Check every field; raises `ConfigurationError` naming the field, its value and the fix."""
        for name in ("root", "dataset"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ConfigurationError.of(f"plan.{name}", getattr(self, name), "give a path")
        if self.root.startswith("s3://"):
            raise ConfigurationError.of(
                "plan.root", self.root, "a training run keeps its journal on a directory; give a shared path"
            )
        for name in _POSITIVE:
            _whole(name, getattr(self, name), at_least=1)
        _whole("keep_publications", self.keep_publications, at_least=1)
        _whole("max_attempts", self.max_attempts, at_least=1)
        _whole("max_replacements", self.max_replacements, at_least=0)
        _whole("seed", self.seed, at_least=0)
        if self.weight_sync_every_steps is not None:
            _whole("weight_sync_every_steps", self.weight_sync_every_steps, at_least=1)
        for name in _SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError.of(f"plan.{name}", value, "give seconds above 0")
        if self.when_done not in ("cancel", "keep"):
            raise ConfigurationError.of("plan.when_done", self.when_done, "use cancel or keep")
        self.learning_rate.validate(self.steps)
        self._validate_job()

    def _validate_job(self) -> None:
        if (self.job_id is None) == (not self.sub_jobs):
            raise ConfigurationError.of(
                "plan.job_id", self.job_id, "give either job_id (a job you own) or sub_jobs (a job the run creates)"
            )
        if self.job_id is not None:
            return
        training = [s for s in self.sub_jobs if s.get("job_type") == "training"]
        if len(training) != 1:
            raise ConfigurationError.of(
                "plan.sub_jobs", len(training), "give exactly one sub-job with job_type=training"
            )
        if not isinstance(training[0].get("training_config"), Mapping):
            raise ConfigurationError.of(
                "plan.sub_jobs.training_config", training[0].get("training_config"), "give a training_config object"
            )
        if training[0].get("source_checkpoint_info"):
            raise ConfigurationError.of(
                "plan.sub_jobs.source_checkpoint_info",
                training[0]["source_checkpoint_info"],
                "use initial weights through model_name; a run restores its own checkpoints itself",
            )
        if self.weight_sync_every_steps is not None and not self.sampling_sub_jobs:
            raise ConfigurationError.of(
                "plan.weight_sync_every_steps", self.weight_sync_every_steps, "needs a sampling sub-job in sub_jobs"
            )

    def identity(
        self, *, dataset_sha256: str, frame_version: int, training_sub_job: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The fields that may never change on one root, because they decide what a step does.

        Steps, cadence and pruning may change. `training_sub_job` is the service's answer for a job that somebody else
        owns.
        """
        training = training_sub_job or self.training_sub_job or {}
        return {
            "model_name": training.get("model_name"),
            "training_config_sha256": canonical_sha256(training.get("training_config")),
            "dataset_sha256": dataset_sha256,
            "frame_version": frame_version,
            "seed": self.seed,
            "micro_batch_size": self.micro_batch_size,
            "micro_batches_per_step": self.micro_batches_per_step,
        }


def canonical_sha256(value: Any) -> str:
    """SHA-256 of JSON with sorted keys; whole floats count as the integers they are (services answer 2048.0 for
    2048).
    """
    return hashlib.sha256(json.dumps(_canonical(value), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _whole(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigurationError.of(f"plan.{name}", value, f"give a whole number of at least {at_least}")
