"""A create call's body, checked field by field before a job exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cortex_training.local.capacity import DEFAULT_HARDWARE, HARDWARE
from cortex_training.local.refusals import Refusal, bad_field
from cortex_training.local.tuning import AdamWSettings, LoraSettings, number, read_adamw, read_lora

ID_SEGMENT = {"training": "training", "sampling": "sampling", "log_probability": "log_prob"}
"""The middle part of a sub-job's id, by its job_type."""

DTYPES = {
    "float32": "float32", "fp32": "float32", "float": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip
MAX_SUB_JOBS = 64
_NOT_IDS = (".", "..", "capacity")
DEFAULT_IDLE_S = 30 * 60
DEFAULT_PENDING_S = 24 * 3600

JOB_KEYS = {
    "sub_job_configs", "job_id", "experiment_name", "hardware", "idle_timeout_seconds", "pending_timeout_seconds",
    "debug",
}  # fmt: skip
SUB_JOB_KEYS = {
    "job_type", "model_name", "training_config", "inference_config", "global_batch_size", "dtype", "seed",
    "model_post_init", "source_checkpoint_info",
}  # fmt: skip


@dataclass(frozen=True)
class CheckpointSource:
    """Where a sub-job takes its first weights from. `job_id` None: the job itself, which never has any yet."""

    checkpoint_id: str
    job_id: str | None


@dataclass(frozen=True)
class SubJobSpec:
    """One entry of ``sub_job_configs``."""

    kind: str
    """`training`, `sampling` or `log_probability`."""
    index: int
    """Zero-based among the sub-jobs of its kind."""
    model_name: str
    dtype: str
    seed: int
    n_gpus: int
    multiplex_job_id: str | None
    """A sub-job of another job whose GPUs this one shares."""
    max_seq_len: int
    block: Mapping[str, Any]
    """`training_config` or `inference_config` as it was sent."""
    optimizer: AdamWSettings | None
    """None for a sub-job that does not train."""
    gradient_clipping: float | None
    lora: LoraSettings | None
    source: CheckpointSource | None
    wire: Mapping[str, Any]
    """The whole entry as it was sent: what ``GET`` shows."""

    @property
    def load_optimizer_states(self) -> bool:
        return self.block.get("load_optimizer_states") is not False

    def id_in(self, job_id: str) -> str:
        return f"{job_id}:{ID_SEGMENT[self.kind]}:{self.index}"


@dataclass(frozen=True)
class JobSpec:
    sub_jobs: tuple[SubJobSpec, ...]
    job_id: str | None = None
    experiment_name: str | None = None
    hardware: str = DEFAULT_HARDWARE
    idle_timeout_s: int = DEFAULT_IDLE_S
    pending_timeout_s: int = DEFAULT_PENDING_S
    wire: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_gpus(self) -> int:
        """What the job has to be given; a multiplexed sub-job brings none of its own."""
        return sum(sub_job.n_gpus for sub_job in self.sub_jobs if sub_job.multiplex_job_id is None)


def read_job_spec(body: object) -> JobSpec:
    """Check a create call's body. Raises Refusal (400) naming the field, what it holds and what it must be."""
    if not isinstance(body, dict):
        raise bad_field("body", body, "must be a JSON object")
    _known_keys("body", body, JOB_KEYS)
    configs = body.get("sub_job_configs")
    if not isinstance(configs, list) or not configs or len(configs) > MAX_SUB_JOBS:
        raise bad_field("sub_job_configs", configs, f"must be a list of 1 to {MAX_SUB_JOBS} sub-jobs")
    sub_jobs: list[SubJobSpec] = []
    for position, config in enumerate(configs):
        sub_jobs.append(_read_sub_job(f"sub_job_configs.{position}", config, sub_jobs))
    if sum(sub_job.kind == "training" for sub_job in sub_jobs) > 1:
        raise Refusal(400, "sub_job_configs: a job has at most one training sub-job")
    hardware = body.get("hardware")
    if hardware is not None and hardware not in HARDWARE:
        raise bad_field("hardware", hardware, f"must be one of {', '.join(HARDWARE)}")
    return JobSpec(
        sub_jobs=tuple(sub_jobs),
        job_id=_read_job_id(body.get("job_id")),
        experiment_name=_optional_text("experiment_name", body.get("experiment_name")),
        hardware=hardware or DEFAULT_HARDWARE,
        idle_timeout_s=_timeout("idle_timeout_seconds", body.get("idle_timeout_seconds"), DEFAULT_IDLE_S, zero=True),
        pending_timeout_s=_timeout(
            "pending_timeout_seconds", body.get("pending_timeout_seconds"), DEFAULT_PENDING_S, zero=False
        ),
        wire=body,
    )


def whole_number(name: str, value: object, least: int) -> int:
    """An integer, also one that arrives as 8.0. Raises Refusal (400)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise bad_field(name, value, f"must be a whole number of at least {least}")
    return value


def _read_sub_job(where: str, config: object, before: list[SubJobSpec]) -> SubJobSpec:
    if not isinstance(config, dict):
        raise bad_field(where, config, "must be an object")
    _known_keys(where, config, SUB_JOB_KEYS)
    kind = config.get("job_type")
    kind = kind.strip().lower().removeprefix("job_type_") if isinstance(kind, str) else kind
    kind = "log_probability" if kind == "log_prob" else kind
    if kind not in ID_SEGMENT:
        raise bad_field(f"{where}.job_type", config.get("job_type"), f"must be one of {', '.join(ID_SEGMENT)}")
    model_name = config.get("model_name")
    if not isinstance(model_name, str) or not model_name.strip():
        raise bad_field(f"{where}.model_name", model_name, "must be a model's id")
    block_name, other_name = ("training_config", "inference_config")
    if kind != "training":
        block_name, other_name = other_name, block_name
    block = config.get(block_name)
    if not isinstance(block, dict):
        raise bad_field(f"{where}.{block_name}", block, f"a {kind} sub-job needs this object")
    if config.get(other_name) is not None:
        raise Refusal(400, f"{where}.{other_name}: a {kind} sub-job has {block_name} and not {other_name}")
    dtype = config.get("dtype")
    dtype = "float32" if dtype is None else dtype
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES:
        raise bad_field(f"{where}.dtype", dtype, f"must be one of {', '.join(sorted(set(DTYPES.values())))}")
    seed = config.get("seed")
    optimizer, clipping = None, None
    if kind == "training":
        whole_number(f"{where}.{block_name}.train_batch_size", block.get("train_batch_size"), 1)
        optimizer = read_adamw(f"{where}.{block_name}.optimizer", block.get("optimizer"))
        clipping = block.get("gradient_clipping")
        # DeepSpeed's 0 means that nothing is clipped.
        clipping = number(f"{where}.{block_name}.gradient_clipping", clipping) or None if clipping is not None else None
    _check_passengers(where, config, f"{where}.{block_name}", block)
    peft_config = block.get("peft_config")
    if peft_config is not None and not isinstance(peft_config, dict):
        raise bad_field(f"{where}.{block_name}.peft_config", peft_config, "must be an object")
    return SubJobSpec(
        kind=kind,
        index=sum(sub_job.kind == kind for sub_job in before),
        model_name=model_name.strip(),
        dtype=DTYPES[dtype.removeprefix("torch.")],
        seed=0 if seed is None else whole_number(f"{where}.seed", seed, 0),
        n_gpus=_parallel_gpus(f"{where}.{block_name}", block),
        multiplex_job_id=_multiplexed(f"{where}.{block_name}.multiplex_job_id", block.get("multiplex_job_id")),
        max_seq_len=whole_number(f"{where}.{block_name}.max_seq_len", block.get("max_seq_len"), 1),
        block=block,
        optimizer=optimizer,
        gradient_clipping=clipping,
        lora=read_lora(f"{where}.{block_name}.peft_config", peft_config),
        source=_read_source(f"{where}.source_checkpoint_info", config.get("source_checkpoint_info")),
        wire=config,
    )


def _check_passengers(where: str, config: Mapping[str, Any], block_where: str, block: Mapping[str, Any]) -> None:
    """Fields that have a type in the reference and change nothing, or little, here. Absent and null are the same."""
    if config.get("global_batch_size") is not None:
        whole_number(f"{where}.global_batch_size", config["global_batch_size"], 1)
    hooks = config.get("model_post_init")
    if hooks is not None and not (isinstance(hooks, list) and all(isinstance(hook, str) and hook for hook in hooks)):
        raise bad_field(f"{where}.model_post_init", hooks, "must be a list of names")
    for name in ("load_optimizer_states", "step_peak_memory_log", "training_memory_telemetry"):
        if block.get(name) is not None and not isinstance(block[name], bool):
            raise bad_field(f"{block_where}.{name}", block[name], "must be true or false")
    allocator = block.get("cuda_allocator_conf")
    if allocator is not None and not isinstance(allocator, str):
        raise bad_field(f"{block_where}.cuda_allocator_conf", allocator, "must be a text")


def _parallel_gpus(where: str, block: Mapping[str, Any]) -> int:
    """The number of GPUs, checked against what divides them and what runs on them."""
    n_gpus = whole_number(f"{where}.n_gpus", block.get("n_gpus"), 1)
    for name in ("sp_size", "ep_size"):
        size = whole_number(f"{where}.{name}", block.get(name, 1), 1)
        if n_gpus % size:
            raise bad_field(f"{where}.{name}", size, f"must divide n_gpus, which is {n_gpus}")
    activation = block.get("ac_config")
    if isinstance(activation, dict):
        offload = activation.get("offload_config")
        if isinstance(offload, dict) and offload.get("enabled") and activation.get("mode") != "full":
            raise bad_field(f"{where}.ac_config.mode", activation.get("mode"), 'activation offload needs "full"')
    return n_gpus


def _multiplexed(where: str, value: object) -> str | None:
    if value is None:
        return None
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) != 3 or not parts[0] or parts[1] not in ID_SEGMENT.values() or not parts[2].isdigit():
        raise bad_field(where, value, "must be a complete sub-job id: {job_id}:{sub_job_type}:{index}")
    return str(value)


def _read_source(where: str, info: object) -> CheckpointSource | None:
    if info is None:
        return None
    if not isinstance(info, dict):
        raise bad_field(where, info, "must be an object")
    if info.get("external_stage_path") is not None:
        raise bad_field(
            f"{where}.external_stage_path", info["external_stage_path"], "this service has no stages; name a checkpoint"
        )
    checkpoint_id = _optional_text(f"{where}.checkpoint_id", info.get("checkpoint_id"))
    if checkpoint_id is None:
        raise bad_field(f"{where}.checkpoint_id", None, "must name a checkpoint")
    return CheckpointSource(checkpoint_id, _optional_text(f"{where}.source_job_id", info.get("source_job_id")))


def _read_job_id(job_id: object) -> str | None:
    """A caller's id becomes a segment of URLs and the front of sub-job ids, so it holds no separator of either."""
    if job_id is None:
        return None
    good = isinstance(job_id, str) and 0 < len(job_id) <= 128 and job_id.isprintable() and job_id not in _NOT_IDS
    if not isinstance(job_id, str) or not good or any(character in job_id for character in ":/\\?#% "):
        raise bad_field(
            "job_id", job_id, "must be 1 to 128 printable characters without ':', '/', '\\', '?', '#', '%' or spaces"
        )
    return job_id


def _timeout(name: str, value: object, default: int, *, zero: bool) -> int:
    if value is None:
        return default
    good = isinstance(value, int) and not isinstance(value, bool) and 300 <= value <= 604_800
    if not good and not (zero and value == 0 and not isinstance(value, bool)):
        raise bad_field(name, value, f"must be {'0 or ' if zero else ''}a whole number of seconds from 300 to 604800")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _optional_text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or len(value) > 512 or not value.isprintable():
        raise bad_field(name, value, "must be a printable text of 1 to 512 characters")
    return value


def _known_keys(where: str, body: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(body) - known)
    if unknown:
        raise Refusal(400, f"{where}: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(known))}")
