"""Copying a training sub-job's weights, or its adapter, into sampling sub-jobs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.operations import Operations, Outcome, worker_of
from cortex_training.local.refusals import Refusal, bad_field
from cortex_training.local.requests import Execution

WEIGHT_FORMATS = ("vllm", "hf", "lora")


def sync_weights(operations: Operations, job: Job, payload: dict[str, Any]) -> dict[str, Any]:
    """Copy the training sub-job's weights as of its turn in the queue into sampling sub-jobs, in theirs."""
    source = _named(job, "payload.source_sub_job_id", payload.get("source_sub_job_id"), training=True)
    target_ids = payload.get("target_sub_job_ids")
    if not isinstance(target_ids, list) or not target_ids:
        raise bad_field("payload.target_sub_job_ids", target_ids, "must be a list of sub-job ids")
    if len(set(map(str, target_ids))) != len(target_ids):
        raise bad_field("payload.target_sub_job_ids", target_ids, "must not name a sub-job twice")
    targets = [_named(job, "payload.target_sub_job_ids", name, training=False) for name in target_ids]
    weight_format = payload.get("weight_format")
    weight_format = "vllm" if weight_format is None else weight_format
    if weight_format not in WEIGHT_FORMATS:
        raise bad_field("payload.weight_format", weight_format, f"must be one of {', '.join(WEIGHT_FORMATS)}")
    adapter_only = weight_format == "lora"
    if adapter_only:
        _require_same_adapter(source, targets)
    execution = Execution("weight-sync", job.job_id, source.sub_job_id)
    trained = source.engine

    def read() -> Outcome:
        weights = trained.adapter_weights() if adapter_only else trained.full_weights()
        result = {
            "job_id": job.job_id,
            "source_sub_job_id": source.sub_job_id,
            "target_sub_job_ids": target_ids,
            "weight_format": weight_format,
            "tensors": len(weights),
            "bytes": sum(tensor.nbytes for tensor in weights.values()),
            "global_steps": trained.global_steps,
        }
        copied.set_result(weights)
        return Outcome(result, {"global_steps": trained.global_steps, "targets": target_ids})

    def write(engine: Any) -> Outcome:
        # The place in the target's queue is taken now, so that a generate sent after the sync sees the new weights.
        # It waits for the source, which never waits for a target.
        weights = copied.result()
        (engine.set_adapter_weights if adapter_only else engine.set_full_weights)(weights)
        return Outcome(None)

    copied: Future[Any] = Future()
    reading = worker_of(source).submit(operations.prepare(job, source, execution, read))
    reading.add_done_callback(lambda done: _release(copied, done))
    writing = [worker_of(target).submit(write, target.engine) for target in targets]
    return operations.follow(job, execution, [reading, *writing])


def _named(job: Job, field: str, name: object, *, training: bool) -> SubJob:
    sub_job = job.sub_job(name) if isinstance(name, str) else None
    if sub_job is None:
        raise bad_field(field, name, f"does not belong to session {job.job_id}")
    if (sub_job.spec.kind == "training") is not training:
        wanted = "a training" if training else "a sampling"
        raise bad_field(field, name, f"must be {wanted} sub-job, and it is {sub_job.spec.kind}")
    return sub_job


def _require_same_adapter(source: SubJob, targets: list[SubJob]) -> None:
    """Raises Refusal (400) unless all have a LoRA adapter of the same shape."""
    trained = source.spec.lora
    if trained is None:
        raise Refusal(400, f"weight_format lora: {source.sub_job_id} has no training_config.peft_config")
    for target in targets:
        own = target.spec.lora
        if own is None:
            raise Refusal(400, f"weight_format lora: {target.sub_job_id} has no inference_config.peft_config")
        for name in ("r", "lora_alpha", "target_modules", "target_parameters"):
            if getattr(own, name) != getattr(trained, name):
                raise Refusal(
                    400,
                    f"weight_format lora: {name} is {getattr(trained, name)!r} in {source.sub_job_id} and "
                    f"{getattr(own, name)!r} in {target.sub_job_id}; the adapters must match",
                )


def _release(copied: Future[Any], reading: Future[Outcome]) -> None:
    """Whoever waits for the copy must learn that there will be none."""
    if not copied.done():
        copied.cancel()
        copied.set_running_or_notify_cancel()
