"""forward-backward, forward, step, save and load: the calls that a model being trained answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortex_training.local.checkpoints import Checkpoint, CheckpointStore, new_checkpoint_id
from cortex_training.local.chunks import Chunk
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.memory import Moment, moment
from cortex_training.local.operations import Operations, Outcome, decoded, finite
from cortex_training.local.refusals import Refusal, bad_field
from cortex_training.local.requests import Delivery, Execution
from cortex_training.local.tuning import number

CHECKPOINT_TYPES = ("resumable", "weights-only")


class DataPlane:
    """One method a call. Each checks what it was sent and returns the reply with the request id to poll."""

    def __init__(self, operations: Operations, checkpoints: CheckpointStore) -> None:
        self._operations = operations
        self._checkpoints = checkpoints
        self._assumptions = operations.settings.assumptions

    async def forward_backward(self, job: Job, body: bytes) -> dict[str, Any]:
        job.require_running("forward-backward")
        sub_job = _training(job)

        async def start(frame: bytes, delivery: Delivery, chunk: Chunk | None) -> tuple[Execution, dict[str, Any]]:
            value, sha256 = await decoded(frame, chunk, self._operations.settings.framework)
            job.require_running("forward-backward")
            group_id = chunk.group_id if chunk is not None else None
            execution = Execution(
                "forward-backward", job.job_id, sub_job.sub_job_id, delivery, group_id, frame_sha256=sha256
            )
            engine = sub_job.engine

            def work() -> Outcome:
                loss = engine.forward_backward(value)
                moments = [moment("fwd_bwd_end")]
                result = {
                    "job_id": job.job_id,
                    "avg_loss": loss.avg_loss,
                    "metrics": loss.metrics,
                    "post_process_outputs": {},
                }
                record = {"loss": loss.avg_loss, "global_steps": engine.global_steps}
                return Outcome(result, record, _memory_events(sub_job, moments))

            return execution, self._operations.submit(job, sub_job, execution, work)

        return await self._operations.submit_framed(job, sub_job, body, start)

    async def forward(self, job: Job, sub_job: SubJob | None, body: bytes) -> dict[str, Any]:
        """Measure a batch in a training or log_probability sub-job. A frame, whole or in chunks."""
        job.require_running("forward")
        target = sub_job or job.first_of("training") or job.first_of("log_probability")
        if target is None or target.spec.kind == "sampling":
            raise Refusal(400, f"forward: job {job.job_id} names no training or log_probability sub-job")
        engine, name = target.engine, target.sub_job_id

        async def start(frame: bytes, delivery: Delivery, chunk: Chunk | None) -> tuple[Execution, dict[str, Any]]:
            value, sha256 = await decoded(frame, chunk, self._operations.settings.framework)
            job.require_running("forward")
            execution = Execution("forward", job.job_id, name, delivery, frame_sha256=sha256)

            def work() -> Outcome:
                measured = engine.forward(value)
                return Outcome({"job_id": job.job_id, **measured}, {"loss": measured["avg_loss"]})

            return execution, self._operations.submit(job, target, execution, work)

        return await self._operations.submit_framed(job, target, body, start)

    def step(self, job: Job, body: dict[str, Any]) -> dict[str, Any]:
        job.require_running("step")
        _known_keys(body, "learning_rate")
        learning_rate = body.get("learning_rate")
        if learning_rate is not None:
            learning_rate = number("learning_rate", learning_rate)
        sub_job = _training(job)
        engine = sub_job.engine

        def work() -> Outcome:
            moments = [moment("step_start")]
            result = engine.step(learning_rate)
            moments.append(moment("step_end"))
            record = {"global_steps": result["global_steps"], "loss": engine.last_loss, **self._weights(engine)}
            return Outcome(result, record, _memory_events(sub_job, moments))

        return self._operations.submit(job, sub_job, Execution("step", job.job_id, sub_job.sub_job_id), work)

    def save(self, job: Job, body: dict[str, Any]) -> dict[str, Any]:
        """A `checkpoint_id` in the body has no effect, as on the service: the result's counts."""
        job.require_running("save")
        _known_keys(body, "checkpoint_id", "checkpoint_type")
        kind = body.get("checkpoint_type")
        kind = "resumable" if kind is None else kind
        kind = kind.lower() if isinstance(kind, str) else kind
        if kind not in CHECKPOINT_TYPES:
            raise bad_field("checkpoint_type", kind, f"must be {' or '.join(CHECKPOINT_TYPES)}")
        sub_job = _training(job)
        engine = sub_job.engine

        def work() -> Outcome:
            steps = engine.global_steps
            by_step = self._assumptions.checkpoint_ids == "global_step"
            wanted = Checkpoint(
                job_id=job.job_id,
                sub_job_id=sub_job.sub_job_id,
                checkpoint_id=f"global_step{steps}" if by_step else new_checkpoint_id(),
                checkpoint_type=kind,
                global_steps=steps,
                avg_loss=finite(engine.last_loss),
                created_at=time.time(),
                n_gpus=sub_job.spec.n_gpus,
                folder=Path(),
            )
            fill = engine.save_resumable if kind == "resumable" else engine.save_weights
            saved = self._checkpoints.write(wanted, fill)
            record = {
                "global_steps": steps,
                "loss": engine.last_loss,
                "checkpoint_id": saved.checkpoint_id,
                **self._weights(engine),
            }
            return Outcome(self._save_result(saved), record, then=lambda: self._checkpoints.add(saved))

        return self._operations.submit(job, sub_job, Execution("save", job.job_id, sub_job.sub_job_id), work)

    def load(self, job: Job, body: dict[str, Any]) -> dict[str, Any]:
        job.require_running("load")
        _known_keys(body, "checkpoint_id", "source_job_id", "target_sub_job_id")
        for name in ("checkpoint_id", "source_job_id", "target_sub_job_id"):
            if body.get(name) is not None and not isinstance(body[name], str):
                raise bad_field(name, body[name], "must be a text")
        if not body.get("checkpoint_id"):
            raise bad_field("checkpoint_id", body.get("checkpoint_id"), "must name a checkpoint")
        target = body.get("target_sub_job_id")
        sub_job = _training(job) if target is None else job.sub_job(target)
        if sub_job is None:
            raise Refusal(400, f"target_sub_job_id: {target!r} does not belong to session {job.job_id}")
        if sub_job.spec.kind != "training":
            raise Refusal(
                501, f"target_sub_job_id: {target} is a {sub_job.spec.kind} sub-job; only training sub-jobs load"
            )
        checkpoint = self._checkpoints.find(body.get("source_job_id") or job.job_id, body["checkpoint_id"])
        refuse_other_size(checkpoint, sub_job)
        engine, name = sub_job.engine, sub_job.sub_job_id

        def work() -> Outcome:
            engine.load(checkpoint.folder)
            result = {
                "job_id": name,
                "checkpoint_id": checkpoint.checkpoint_id,
                "source_job_id": checkpoint.job_id,
                "global_steps": engine.global_steps,
            }
            record = {
                "global_steps": engine.global_steps,
                "checkpoint_id": checkpoint.checkpoint_id,
                **self._weights(engine),
            }
            return Outcome(result, record)

        return self._operations.submit(job, sub_job, Execution("load", job.job_id, sub_job.sub_job_id), work)

    def _weights(self, engine: Any) -> dict[str, str]:
        """For the execution log, when it is to say which weights there are."""
        return {"weights_sha256": engine.weights_sha256()} if self._operations.settings.execution_log_weights else {}

    def _save_result(self, saved: Checkpoint) -> dict[str, Any]:
        tag = f"global_step{saved.global_steps}"
        stage_path = f"s3://local/{saved.job_id}/checkpoints/{saved.checkpoint_id}/{tag}/"
        result: dict[str, Any] = {
            "job_id": saved.sub_job_id,
            "stage_path": stage_path,
            "checkpoint_path": str(saved.folder),
            "checkpoint_tag": tag,
            "version": 1.0,
        }
        if self._assumptions.save_result == "full":
            result |= {
                "checkpoint_id": saved.checkpoint_id,
                "checkpoint_type": saved.checkpoint_type,
                "global_steps": saved.global_steps,
            }
        return result


def refuse_other_size(checkpoint: Checkpoint, sub_job: SubJob) -> None:
    """The optimizer's state is split over GPUs and cannot be resized. Raises Refusal (400)."""
    spec = sub_job.spec
    if checkpoint.checkpoint_type == "resumable" and spec.load_optimizer_states and checkpoint.n_gpus != spec.n_gpus:
        raise Refusal(
            400,
            f"checkpoint {checkpoint.checkpoint_id} was saved on {checkpoint.n_gpus} GPUs and {sub_job.sub_job_id} has "
            f"{spec.n_gpus}; create the sub-job with load_optimizer_states: false to load its weights alone",
        )


def _memory_events(sub_job: SubJob, moments: list[Moment]) -> Callable[[], None] | None:
    """What writes allocator events into the sub-job's log, when the job asked for such events."""
    if not sub_job.spec.block.get("training_memory_telemetry"):
        return None

    def write() -> None:
        for one in moments:
            sub_job.log.add(f"memory at {one.event}", at=one.at, event=one.event, memory=one.memory)

    return write


def _training(job: Job) -> SubJob:
    sub_job = job.first_of("training")
    if sub_job is None:
        raise Refusal(400, f"job {job.job_id} has no training sub-job")
    return sub_job


def _known_keys(body: dict[str, Any], *known: str) -> None:
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise Refusal(400, f"unknown field {unknown[0]!r}; the fields are {', '.join(known)}")
