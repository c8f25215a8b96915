"""``POST /{job_id}/operation``: one envelope for everything that has no route of its own."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any

from cortex_training.local.data_plane import DataPlane
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.operations import Operations, worker_of
from cortex_training.local.refusals import Refusal, bad_field, not_found
from cortex_training.local.tuning import number
from cortex_training.local.weight_sync import sync_weights
from cortex_training.states import JobState

OPERATION_TYPES = (
    "bootstrap-router-replay", "cancel-request", "forward", "reset-prefix-cache", "router-replay-discard", "tail-logs",
    "weight-sync",
)  # fmt: skip
KINDS_OF_HINT = {
    "training": "training",
    "sampling": "sampling",
    "log_probability": "log_probability",
    "log_prob": "log_probability",
}


class GenericOperation:
    """Routes one operation to the sub-job it is for."""

    def __init__(self, operations: Operations, data_plane: DataPlane) -> None:
        self._operations = operations
        self._data_plane = data_plane

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
        if kind not in OPERATION_TYPES:
            raise bad_field("operation_type", kind, f"must be one of {', '.join(OPERATION_TYPES)}")
        if kind != "tail-logs" or job.state not in (JobState.PLACING, JobState.INITIALIZING):
            job.require_running(kind)
        target = self._route(job, body)
        match kind:
            case "tail-logs":
                return self._tail_logs(job, target, payload)
            case "weight-sync":
                return sync_weights(self._operations, job, payload)
            case "cancel-request":
                return self._cancel_request(job, payload)
            case "forward":
                return await self._forward(job, target, payload)
            case "bootstrap-router-replay":
                return self._bootstrap_router_replay(job, target, payload)
            case "router-replay-discard":
                return self._router_replay_discard(job, target, payload)
            case _:
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
        wanted = KINDS_OF_HINT.get(kind) if isinstance(kind, str) else None
        if wanted is None:
            raise bad_field("sub_job_type", kind, f"must be one of {', '.join(sorted(KINDS_OF_HINT))}")
        if named is not None and named.spec.kind != wanted:
            raise Refusal(400, f"sub_job_id {sub_job_id} is a {named.spec.kind} sub-job, and sub_job_type says {kind}")
        found = named or job.first_of(wanted)
        if found is None:
            raise Refusal(400, f"sub_job_type: job {job.job_id} has no {wanted} sub-job")
        return found

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

    async def _forward(self, job: Job, sub_job: SubJob | None, payload: dict[str, Any]) -> dict[str, Any]:
        """The frame is base64 inside the JSON; the route ``/{job_id}/forward`` takes it bare."""
        encoded = payload.get("payload_b64")
        try:
            frame = await asyncio.to_thread(
                base64.b64decode, encoded if isinstance(encoded, str) else "*", validate=True
            )
        except (binascii.Error, ValueError):
            shown = encoded[:64] if isinstance(encoded, str) else encoded
            raise bad_field("payload.payload_b64", shown, "must be a DSSST1 frame in base64") from None
        return await self._data_plane.forward(job, sub_job, frame)

    def _bootstrap_router_replay(self, job: Job, receiver: SubJob | None, payload: dict[str, Any]) -> dict[str, Any]:
        """Connects sampling to training. The models here have no routers, so that there is nothing to replay."""
        source = _named(job, "payload.source_sub_job_id", payload.get("source_sub_job_id"), "sampling")
        target = _named(job, "payload.target_sub_job_id", payload.get("target_sub_job_id"), "training")
        size = payload.get("max_cache_bytes")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size <= 0):
            raise bad_field("payload.max_cache_bytes", size, "must be a whole number of bytes greater than 0")
        if receiver is not target and len(job.sub_jobs) > 1:
            raise Refusal(
                400, f"bootstrap-router-replay is received by its target: send sub_job_id {target.sub_job_id}"
            )
        return {"status": "ok", "source_sub_job_id": source.sub_job_id, "target_sub_job_id": target.sub_job_id}

    def _router_replay_discard(self, job: Job, sub_job: SubJob | None, payload: dict[str, Any]) -> dict[str, Any]:
        sub_job = sub_job or job.first_of("sampling")
        if sub_job is None or sub_job.spec.kind != "sampling":
            raise Refusal(400, f"router-replay-discard: job {job.job_id} names no sampling sub-job")
        ids = payload.get("sample_ids")
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise bad_field("payload.sample_ids", ids, "must be a list of sample ids")
        known = sub_job.sample_ids.intersection(ids)
        sub_job.sample_ids -= known
        return {"status": "ok", "discarded": len(known)}


def _named(job: Job, field: str, name: object, kind: str) -> SubJob:
    sub_job = job.sub_job(name) if isinstance(name, str) else None
    if sub_job is None or sub_job.spec.kind != kind:
        raise bad_field(field, name, f"must be a {kind} sub-job of session {job.job_id}")
    return sub_job
