"""What a training run shall do, as plain data that is checked as a whole before anything remote happens."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from cortex_training.config import check_matching_lora
from cortex_training.errors import ConfigurationError
from cortex_training.protocol.jobs import check_job_id, check_timeouts, checked_hardware
from cortex_training.publication.credentials import parse_sources
from cortex_training.publication.errors import PublicationError
from cortex_training.publication.save import RESUMABLE, WEIGHTS_ONLY
from cortex_training.publication.urls import parse_root
from cortex_training.training.divergence import Divergence
from cortex_training.training.schedule import LearningRate
from cortex_training.training.sub_jobs import checked_sub_jobs, located

PLAN_VERSION = 1

LOSS_FN = "causal_cross_entropy"
"""What the frames of a dataset ask the service to minimise."""

SAVE_EVERY_STEPS = 50
"""How often a plan that names no cadence saves."""

_TEXTS = ("job_id", "credentials", "experiment_name", "hardware")
_COUNTS = {
    "steps": 0,
    "micro_batch_size": 1,
    "micro_batches_per_step": 1,
    "keep_publications": 1,
    "max_attempts": 1,
    "max_replacements": 0,
    "seed": 0,
}
_OPTIONAL_COUNTS = ("save_every_steps", "weight_sync_every_steps")
_AMOUNTS = ("running_timeout_s", "request_timeout_s", "patience_s")
_OPTIONAL_AMOUNTS = ("passes", "save_every_minutes", "max_gpu_seconds")


def gpus_of(sub_jobs: Iterable[Mapping[str, Any]]) -> int:
    """GPUs that a job of these sub-jobs (wire bodies) uses."""
    configs = [s.get("training_config") or s.get("inference_config") or {} for s in sub_jobs]
    return sum(int(config.get("n_gpus", 1)) for config in configs)


@dataclass(frozen=True)
class TrainingPlan:
    """A durable training run, described.

    With `sub_jobs` (wire bodies of the sub-jobs to create) the run owns its jobs: it creates one, replaces one that is
    lost, and ends them. With `sub_jobs` and `job_id` it begins in that job, which was made of them for this run and is
    handed over to it. With `job_id` alone the job is somebody else's: the run never ends it, and a state that only a
    new job could mend fails the run.

    Args:
        root: directory, or ``s3://BUCKET/PREFIX``, that holds the run; the run's identity. Starting the same plan on
            the same root goes on with it.
        credentials: where a bucket's credentials are found: the list ``kind:location,…`` of `publication.open_store`.
            It names places and holds no secret.
        dataset: path of a dataset's ``manifest.json``.
        steps: optimizer steps in the whole run; 0 when `passes` says how many.
        passes: passes over the data instead of steps, rounded up to whole steps.
        micro_batch_size: packed sequences in one forward-backward.
        micro_batches_per_step: forward-backwards before each step. Their per-call mean losses add up undivided on the
            service.
        save_every_steps: save after every so many steps, and always after the last; 50 when no cadence is given.
        save_every_minutes: save when so many minutes have passed since the last save; whichever is due first.
        checkpoint_type: ``resumable`` saves, or ``weights-only`` ones from which nothing can go on.
        resume: ``saves`` goes on in a new job when one is lost; ``none`` fails then, and is the only choice with
            ``weights-only`` saves.
        keep_publications: publications to keep on the run's root; older ones are pruned.
        weight_sync_every_steps: copy the weights to the job's sampling sub-jobs every so many steps; None never does.
        when_done: ``cancel`` ends the run's job after the last step; ``keep`` leaves it to whoever ends the run (a
            teardown task).
        max_attempts: executions of one forward-backward whose request failed or was cancelled.
        max_replacements: jobs a run may create for lost ones.
        load_in_place: go on in the same job from the last save where the weights are lost and the job is not, instead
            of waiting for the GPUs of another one. Only where the journal proves that the job holds no gradients and
            that nothing sent to it may still land.
        max_gpu_seconds: GPU seconds that the run's own jobs may use. Once they are used up, the run saves, publishes,
            ends its job and fails; the same plan with a larger budget goes on from there.
        divergence: what counts as divergence, and what to do then.
        tail_service_log: hand new lines of the service's log to the progress callback.
        submit_ahead: experimental: send the next step's forward-backwards behind a step before its result is there.
            One that fails costs the segment.
        assume_fifo: you know that this service runs a sub-job's requests in the order of their arrival, which it does
            not promise; `submit_ahead` needs it.
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
    save_every_steps: int | None = None
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
    credentials: str | None = None
    passes: float | None = None
    save_every_minutes: float | None = None
    checkpoint_type: str = RESUMABLE
    resume: str = "saves"
    max_gpu_seconds: float | None = None
    divergence: Divergence = field(default_factory=Divergence)
    load_in_place: bool = False
    tail_service_log: bool = False
    submit_ahead: bool = False
    assume_fifo: bool = False
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
        if data.get("passes") is not None:
            data.setdefault("steps", 0)
        for name in ("root", "dataset", "steps", "micro_batch_size"):
            if name not in data:
                raise ConfigurationError.of(f"plan.{name}", None, "this key is required")
        rate = data.get("learning_rate")
        if isinstance(rate, Mapping):
            data["learning_rate"] = LearningRate.from_dict(rate)
        elif isinstance(rate, (int, float)) and not isinstance(rate, bool):
            data["learning_rate"] = LearningRate("constant", peak=rate)
        if isinstance(data.get("divergence"), Mapping):
            data["divergence"] = Divergence.from_dict(data["divergence"])
        sub_jobs = data.get("sub_jobs") or ()
        if not isinstance(sub_jobs, (list, tuple)) or not all(isinstance(s, Mapping) for s in sub_jobs):
            raise ConfigurationError.of("plan.sub_jobs", sub_jobs, "give a list of sub-job objects")
        data["sub_jobs"] = tuple(sub_jobs)
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["learning_rate"] = self.learning_rate.to_dict()
        out["divergence"] = self.divergence.to_dict()
        out["sub_jobs"] = [dict(sub_job) for sub_job in self.sub_jobs]
        return out

    @property
    def owns_job(self) -> bool:
        """Whether the run may create jobs and end its own."""
        return bool(self.sub_jobs)

    @property
    def training_sub_job(self) -> Mapping[str, Any] | None:
        return next((s for s in self.sub_jobs if s.get("job_type") == "training"), None)

    def with_steps(self, steps_per_pass: int) -> TrainingPlan:
        """The plan in steps, when it is given in passes over data that make `steps_per_pass` steps each."""
        return (
            self if self.passes is None else replace(self, steps=math.ceil(self.passes * steps_per_pass), passes=None)
        )

    def save_is_due(self, step: int, seconds_since_save: float) -> bool:
        """Whether the cadence asks for a save of the weights of `step` steps."""
        every = self.save_every_steps
        if every is None and self.save_every_minutes is None:
            every = SAVE_EVERY_STEPS
        if every is not None and step % every == 0:
            return True
        return self.save_every_minutes is not None and seconds_since_save >= self.save_every_minutes * 60.0

    @property
    def gpus(self) -> int:
        """GPUs of one job of the run."""
        return gpus_of(self.sub_jobs)

    @property
    def sampling_sub_jobs(self) -> int:
        return sum(1 for s in self.sub_jobs if s.get("job_type") == "sampling")

    def validate(self) -> None:
        """Check every field; raises `ConfigurationError` naming the field, its value and the fix."""
        self._validate_shapes()
        self._validate_root()
        if (self.passes is None) == (self.steps == 0):
            raise ConfigurationError.of(
                "plan.steps", self.steps, "give either steps of at least 1, or passes over the data and steps 0"
            )
        for name, choices in (
            ("when_done", ("cancel", "keep")),
            ("checkpoint_type", (RESUMABLE, WEIGHTS_ONLY)),
            ("resume", ("saves", "none")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigurationError.of(f"plan.{name}", getattr(self, name), f"use {' or '.join(choices)}")
        if self.checkpoint_type == WEIGHTS_ONLY and self.resume != "none":
            raise ConfigurationError.of(
                "plan.checkpoint_type",
                self.checkpoint_type,
                'nothing can go on from such a save; use resumable, or say resume = "none"',
            )
        if self.load_in_place and self.resume == "none":
            raise ConfigurationError.of(
                "plan.load_in_place", True, 'resume = "none" goes on from no save; leave one of the two out'
            )
        if self.submit_ahead and not self.assume_fifo:
            raise ConfigurationError.of(
                "plan.submit_ahead",
                True,
                "it trains something else on a service that changes the order of requests: run `cortex-training "
                "conformance` against it, then say assume_fifo = true; or leave both out",
            )
        # The warm-up of a plan in passes is compared once the data says how many steps that is.
        self.learning_rate.validate(self.steps if self.passes is None else None)
        self.divergence.validate()
        self._validate_job()
        self._validate_rollback()

    def _validate_shapes(self) -> None:
        for name in ("root", "dataset"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ConfigurationError.of(f"plan.{name}", getattr(self, name), "give a path")
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigurationError.of(f"plan.{name}", value, "give a text, or leave it out")
        for name, least in _COUNTS.items():
            _whole(name, getattr(self, name), at_least=least)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), at_least=1)
        for name in (*_AMOUNTS, *(n for n in _OPTIONAL_AMOUNTS if getattr(self, n) is not None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError.of(f"plan.{name}", value, "give a number above 0")
        names = ("load_in_place", "tail_service_log", "submit_ahead", "assume_fifo")
        switches = tuple((name, bool) for name in names)
        fixes = {
            LearningRate: 'give a number (a constant rate), or an object such as {"schedule": "cosine", "peak": 3e-4}',
            Divergence: 'give an object such as {"action": "stop"}',
            bool: "give true or false",
        }
        for name, kind in (("learning_rate", LearningRate), ("divergence", Divergence), *switches):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError.of(f"plan.{name}", getattr(self, name), fixes[kind])

    def _validate_root(self) -> None:
        try:
            bucket = not isinstance(parse_root(self.root), str)
        except PublicationError as problem:
            raise ConfigurationError.of("plan.root", self.root, str(problem)) from None
        if bucket != (self.credentials is not None):
            fix = (
                "an s3:// root needs credentials, a list of kind:location (secret:DIR, file:DIR, vault:PATH)"
                if bucket
                else "credentials are for s3:// roots; leave them out"
            )
            raise ConfigurationError.of("plan.credentials", self.credentials, fix)
        if self.credentials is not None:
            try:
                parse_sources(self.credentials)
            except PublicationError as problem:
                # Not the value: somebody may have put the credentials themselves here.
                raise ConfigurationError(f"plan.credentials: {problem}", field="plan.credentials") from None

    def _validate_rollback(self) -> None:
        if self.divergence.action != "rollback":
            return
        if not self.owns_job or self.resume == "none":
            raise ConfigurationError.of(
                "plan.divergence.action",
                "rollback",
                "going back needs a new job from a resumable save: give sub_jobs and resume = saves, or use stop",
            )
        if self.divergence.lr_factor != 1.0 and self.learning_rate.schedule == "job":
            raise ConfigurationError.of(
                "plan.divergence.lr_factor",
                self.divergence.lr_factor,
                "the job's own rate can't be lowered from here; give the plan a learning_rate",
            )

    def _validate_job(self) -> None:
        if self.job_id is None and not self.sub_jobs:
            raise ConfigurationError.of(
                "plan.sub_jobs",
                [],
                "give sub_jobs (the run's own job), job_id (a job you own), or both (a job made of these for this run)",
            )
        try:
            check_timeouts(self.idle_timeout_seconds, self.pending_timeout_seconds)
            if self.hardware is not None:
                checked_hardware(self.hardware)
            if self.job_id is not None:
                check_job_id(self.job_id)
        except ConfigurationError as problem:
            raise located(problem, "plan.") from None
        if not self.owns_job:
            if self.max_gpu_seconds is not None:
                raise ConfigurationError.of(
                    "plan.max_gpu_seconds",
                    self.max_gpu_seconds,
                    "a job that isn't the run's can't be ended; give sub_jobs",
                )
            return
        sub_jobs = checked_sub_jobs(self.sub_jobs, "plan.sub_jobs")
        for number, sub_job in enumerate(self.sub_jobs):
            if sub_job.get("job_type") == "training" and sub_job.get("source_checkpoint_info"):
                raise ConfigurationError.of(
                    f"plan.sub_jobs[{number}].source_checkpoint_info",
                    sub_job["source_checkpoint_info"],
                    "use initial weights through model_name; a run restores its own checkpoints itself",
                )
        if self.weight_sync_every_steps is None:
            return
        if not self.sampling_sub_jobs:
            raise ConfigurationError.of(
                "plan.weight_sync_every_steps", self.weight_sync_every_steps, "needs a sampling sub-job in sub_jobs"
            )
        try:
            check_matching_lora(sub_jobs)
        except ConfigurationError as problem:
            raise located(problem, "plan.") from None

    def identity(
        self, *, dataset_sha256: str, frame_version: int, training_sub_job: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The fields that may never change on one root, because they decide what a step does: model, data, seeds, batch
        shape, loss, and with the training configuration the number of GPUs that a resumable save was made on.

        Steps, cadence, pruning and what to do on a divergence may change. `training_sub_job` is the service's answer
        for a job that somebody else owns.
        """
        training = training_sub_job or self.training_sub_job or {}
        return {
            "model_name": training.get("model_name"),
            "dtype": training.get("dtype"),
            "model_seed": training.get("seed"),
            "loss_fn": LOSS_FN,
            "training_config": training.get("training_config"),
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
