"""``POST /{job_id}/operation``: weight-sync, cancel-request, tail-logs, reset-prefix-cache."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.operations import Operations, Outcome, worker_of
from cortex_training.local.refusals import Refusal, bad_field, not_found
from cortex_training.local.requests import Delivery, Execution
from cortex_training.local.tuning import number
from cortex_training.states import JobState

WEIGHT_FORMATS = ("vllm", "hf", "lora")
_KIND_OF_HINT = {
    "training": "training",
    "sampling": "sampling",
    "log_probability": "log_probability",
    "log_prob": "log_probability",
}


class GenericOperation:
    """Routes one operation to the sub-job it is for."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def run(self, job: Job, body: dict[str, Any]) -> dict[str, Any]:
        """Raises Refusal: 400 for an unknown type or a bad payload, 409 when the job is not running."""
        unknown = sorted(set(body) - {"operation_type", "sub_job_id", "sub_job_type", "payload"})
        if unknown:
            raise Refusal(
                400, f"unknown field {unknown[0]!r}; the fields are operation_type, sub_job_id, sub_job_type, payload"
            )
        payload = body.get("payload")
        payload = {} if payload is None else payload
        if not isinstance(payload, dict):
            raise bad_field("payload", payload, "must be an object")
        kind = body.get("operation_type")
        if kind == "tail-logs":
            if job.state not in (JobState.PLACING, JobState.INITIALIZING):
                job.require_running("tail-logs")
            return self._tail_logs(job, self._route(job, body), payload)
        if kind not in ("weight-sync", "cancel-request", "reset-prefix-cache"):
            raise bad_field(
                "operation_type", kind, "must be weight-sync, cancel-request, reset-prefix-cache or tail-logs"
            )
        job.require_running(kind)
        target = self._route(job, body)
        if kind == "weight-sync":
            return self._weight_sync(job, payload)
        if kind == "cancel-request":
            return self._cancel_request(job, payload)
        return await self._reset_prefix_cache(job, target, payload)

    def _route(self, job: Job, body: dict[str, Any]) -> SubJob | None:
        """The sub-job that the hints name; None without hints. Raises Refusal (400) when they name none, or two."""
        sub_job_id, kind = body.get("sub_job_id"), body.get("sub_job_type")
        named = None
        if sub_job_id is not None:
            named = job.sub_job(sub_job_id) if isinstance(sub_job_id, str) else None
            if named is None:
                raise bad_field("sub_job_id", sub_job_id, f"does not belong to session {job.job_id}")
        if kind is None:
            return named
        wanted = _KIND_OF_HINT.get(kind) if isinstance(kind, str) else None
        if wanted is None:
            raise bad_field("sub_job_type", kind, f"must be one of {', '.join(sorted(_KIND_OF_HINT))}")
        if named is not None and named.spec.kind != wanted:
            raise Refusal(400, f"sub_job_id {sub_job_id} is a {named.spec.kind} sub-job, and sub_job_type says {kind}")
        found = named or job.first_of(wanted)
        if found is None:
            raise Refusal(400, f"sub_job_type: job {job.job_id} has no {wanted} sub-job")
        return found

    def _weight_sync(self, job: Job, payload: dict[str, Any]) -> dict[str, Any]:
        """Copy the training sub-job's weights as of its turn in the queue into sampling sub-jobs, in theirs."""
        source = self._named(job, "payload.source_sub_job_id", payload.get("source_sub_job_id"), training=True)
        target_ids = payload.get("target_sub_job_ids")
        if not isinstance(target_ids, list) or not target_ids:
            raise bad_field("payload.target_sub_job_ids", target_ids, "must be a list of sub-job ids")
        if len(set(map(str, target_ids))) != len(target_ids):
            raise bad_field("payload.target_sub_job_ids", target_ids, "must not name a sub-job twice")
        targets = [self._named(job, "payload.target_sub_job_ids", name, training=False) for name in target_ids]
        weight_format = payload.get("weight_format") or "vllm"
        if weight_format not in WEIGHT_FORMATS:
            raise bad_field("payload.weight_format", weight_format, f"must be one of {', '.join(WEIGHT_FORMATS)}")
        adapter_only = weight_format == "lora"
        if adapter_only:
            _require_same_adapter(source, targets)
        execution = Execution("weight-sync", job.job_id, source.sub_job_id, Delivery())
        trained = source.engine

        def read() -> Outcome:
            weights = trained.adapter_weights() if adapter_only else trained.full_weights()
            result = {
                "job_id": job.job_id,
                "source_sub_job_id": source.sub_job_id,
                "target_sub_job_ids": target_ids,
                "weight_format": weight_format,
                "tensors": len(weights),
                "bytes": sum(tensor.numel() * tensor.element_size() for tensor in weights.values()),
                "global_steps": trained.global_steps,
            }
            copied.set_result(weights)
            return Outcome(result, {"global_steps": trained.global_steps, "targets": target_ids})

        def write(engine: Any) -> Outcome:
            # The place in the target's queue is taken now, so that a generate sent after the sync sees the new weights.
            # It waits # for the source, which never waits for a target.
            weights = copied.result()
            (engine.set_adapter_weights if adapter_only else engine.set_full_weights)(weights)
            return Outcome(None)

        copied: Future[Any] = Future()
        loop = asyncio.get_running_loop()
        reading = worker_of(source).submit(self._operations.run_in_thread, execution, read, loop)
        reading.add_done_callback(lambda done: _release(copied, done))
        writing = [worker_of(target).submit(write, target.engine) for target in targets]
        return self._operations.follow(job, execution, [reading, *writing])

    def _named(self, job: Job, field: str, name: object, *, training: bool) -> SubJob:
        sub_job = job.sub_job(name) if isinstance(name, str) else None
        if sub_job is None:
            raise bad_field(field, name, f"does not belong to session {job.job_id}")
        if (sub_job.spec.kind == "training") is not training:
            wanted = "a training" if training else "a sampling"
            raise bad_field(field, name, f"must be {wanted} sub-job, and it is {sub_job.spec.kind}")
        return sub_job

    def _cancel_request(self, job: Job, payload: dict[str, Any]) -> dict[str, Any]:
        """What waits leaves its queue; a generation ends before its next token; anything else runs to its end."""
        request_id = payload.get("request_id")
        request = job.requests.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            raise not_found("request", str(request_id))
        execution = request.execution
        execution.stop.set()
        dropped = not execution.is_over and execution.drop_from_queue()
        return {"request_id": request_id, "cancelled": dropped, "status": str(execution.state)}

    def _tail_logs(self, job: Job, sub_job: SubJob | None, payload: dict[str, Any]) -> dict[str, Any]:
        return (sub_job or job.sub_jobs[0]).log.page(payload.get("cursor"), payload.get("max_lines"))

    async def _reset_prefix_cache(self, job: Job, sub_job: SubJob | None, payload: dict[str, Any]) -> dict[str, Any]:
        """No prefixes are kept between calls here, so all there is to do is to wait for what is being sampled."""
        sub_job = sub_job or job.first_of("sampling")
        if sub_job is None or sub_job.spec.kind == "training":
            raise Refusal(400, f"reset-prefix-cache: job {job.job_id} names no sampling sub-job")
        timeout_s = number("payload.timeout_s", payload.get("timeout_s", 60.0))
        if payload.get("drain", True):
            drained = asyncio.wrap_future(worker_of(sub_job).submit(lambda: None))
            done, _ = await asyncio.wait([drained], timeout=timeout_s)
            if not done:
                drained.cancel()
                raise Refusal(409, f"reset-prefix-cache: {sub_job.sub_job_id} is still sampling after {timeout_s:g} s")
        return {"status": "ok", "sub_job_id": sub_job.sub_job_id, "success": True}


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
