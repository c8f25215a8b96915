"""The operations of a run, each written down before it is sent and confirmed before the next one starts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

from cortex_training import identity
from cortex_training.errors import NotFoundError, OutcomeUnknown, RequestFailed
from cortex_training.protocol.results import checkpoint_id
from cortex_training.publication.errors import StoreError
from cortex_training.publication.prune import prune
from cortex_training.publication.save import SaveManifest
from cortex_training.training.driver import Driver, SegmentLost, loss_value
from cortex_training.training.frames import Frames
from cortex_training.training.offload import offload
from cortex_training.training.progress import RunFailed
from cortex_training.training.state import Base, Operation

_TRIES = 3
"""How often a forward-backward whose request the service forgot is sent."""
LATE_S = 30.0
"""How long a step that was not executed is waited for before it is sent again to a job that can't be replaced: longer
than networks hold a request back."""
SAVE_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0)
"""Seconds after each save that got no answer: two minutes in all, besides what the client itself waits."""


async def forward_backward(
    driver: Driver, frames: Frames, step: int, micro_batch: int, sent: Operation | None = None
) -> float:
    """Run one forward-backward, or wait for the one that was `sent` ahead, and return its mean loss.

    Sent again under the same group id whenever its answer is missing: the service runs a group once and answers a
    repetition with the first result. Only a request that the service confirmed as failed or cancelled gets another
    attempt number, unless it was sent ahead: others are behind it then, and the segment can't go on.
    """
    segment = driver.segment
    forgotten = 0
    while True:
        operation = sent or await send_forward_backward(driver, frames, step, micro_batch)
        sent = None
        try:
            result = await driver.result(operation)
        except NotFoundError as error:
            forgotten += 1
            if forgotten >= _TRIES:
                raise SegmentLost(f"job {segment.job_id} keeps forgetting its requests: {error}") from error
            continue
        except RequestFailed as error:
            await _close(driver, operation, "failed", {"error": error.error[:500]})
            if segment.was_sent_ahead(step):
                raise SegmentLost(f"{segment.given_up}: {error}") from error
            driver.tell("recover", message=str(error))
            continue
        loss = loss_value(result)
        await _close(driver, operation, "done", {"loss": loss})
        return float(loss)


async def send_forward_backward(
    driver: Driver, frames: Frames, step: int, micro_batch: int, *, ahead: bool = False
) -> Operation:
    """Submit a forward-backward under its own name; raises RunFailed when it failed too often."""
    segment = driver.segment
    attempt = segment.attempts_failed(step, micro_batch)
    if attempt >= driver.plan.max_attempts:
        raise RunFailed(
            f"{driver.store.root}: forward-backward {micro_batch} of step {step} failed {attempt} times on job "
            f"{segment.job_id}; look at the job's log, then raise max_attempts or mend the data"
        )
    group = identity.group_id(segment.job_id, segment.number, step, micro_batch, attempt)
    async with frames.sending(step, micro_batch) as frame:
        return await driver.submit(
            "forward_backward",
            step,
            partial(driver.client.forward_backward, segment.job_id, frame, chunk_group_id=group),
            micro_batch=micro_batch,
            attempt=attempt,
            repeatable=True,
            ahead=ahead,
        )


async def optimizer_step(driver: Driver, step: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> int:
    """Step the optimizer once and return the service's ``global_steps``; a lost answer is settled by a save.

    `meanwhile` is done once the step is known to be a request of the service.
    """
    segment = driver.segment
    rate = driver.learning_rate(step)
    while True:
        try:
            operation = await driver.submit("step", step, partial(driver.client.step, segment.job_id, rate))
        except OutcomeUnknown as unknown:
            driver.tell("recover", message=str(unknown))
            settled = await settle_step(driver, _open(driver, "step", step))
        else:
            if meanwhile is not None:
                await meanwhile()
                meanwhile = None
            settled = await step_result(driver, operation)
        if settled is not None:
            return settled


async def step_result(driver: Driver, operation: Operation) -> int | None:
    """The confirmed ``global_steps`` of a step whose request id is known; None when it has to be sent again."""
    try:
        result = await driver.result(operation)
    except NotFoundError:
        return await settle_step(driver, operation)
    except RequestFailed as error:
        await _close(driver, operation, "failed", {"error": error.error[:500]})
        raise SegmentLost(f"step {operation.step} failed, so its gradients are in an unknown state: {error}") from error
    return await _confirm_step(driver, operation, int(result["global_steps"]), _gradient_norm(result))


async def settle_step(driver: Driver, operation: Operation) -> int | None:
    """Find out whether a step was executed: save, and read the save's ``global_steps``. None: it has to be sent again.

    One less than expected means that the request may still land, so this job must not be used any more; the save
    holds everything up to here, and no step is lost. Where no other job may be made, the request is given time to
    land, and if it does not the step is sent again. Should the first one come even later, the next step or save
    answers a count that nobody expects, and nothing behind it is published.
    """
    segment, step = driver.segment, operation.step
    offset = segment.certain_offset
    if offset is None:
        # A guess could count a step that never ran, or train one again that is in the save already.
        raise SegmentLost(f"step {step} got no answer, and how job {segment.job_id} counts its steps is not known yet")
    expected = offset + step
    driver.tell("recover", message=f"was step {step} executed? A save tells.")
    saved = await _counted(driver, step)
    if saved["global_steps"] == expected - 1 and not driver.plan.owns_job:
        driver.tell("recover", message=f"step {step} has not been executed; it may still be under way for {LATE_S:g} s")
        await driver.pause(LATE_S)
        saved = await _counted(driver, step)
    found = saved["global_steps"]
    if found == expected:
        await _close(driver, operation, "done", {"global_steps": found, "settled_by": saved["checkpoint_id"]})
        return expected
    if found != expected - 1:
        raise SegmentLost(f"a save after step {step} has global_steps {found} where {expected} was expected")
    if not driver.plan.owns_job and segment.lost_steps(step) + 1 < driver.plan.max_attempts:
        await _close(driver, operation, "refused", {"settled_by": saved["checkpoint_id"]})
        return None
    base = Base(saved["checkpoint_id"], segment.job_id, step - 1, found)
    # Before the step counts as refused: a crash in between must not let the next driver send it here again.
    await driver.record("rescued", {"base": asdict(base)})
    await _close(driver, operation, "refused", {"settled_by": saved["checkpoint_id"]})
    raise SegmentLost(f"step {step} was sent and has not been executed; it may still land on job {segment.job_id}")


async def _counted(driver: Driver, step: int) -> dict[str, Any]:
    """A save that is made only to read its ``global_steps``."""
    saved, operation = await _save_now(driver, step)
    await _close(driver, operation, "done", {**saved, "settles": True})
    return saved


async def read_count(driver: Driver) -> None:
    """Save before anything is trained, and read how the job counts its steps, where nothing else tells.

    Without it a first step whose answer is lost could not be settled, and a run on somebody else's job, which may not
    move to another one, would end there.
    """
    segment = driver.segment
    if not segment.given or segment.certain_offset is not None or segment.of("step"):
        return
    await _counted(driver, segment.start_step)


async def save(driver: Driver, step: int) -> None:
    """Save the weights of `step` steps on the service; a save whose answer was lost is adopted from the checkpoint
    list.
    """
    segment = driver.segment
    lost = next((o for o in segment.of("save", step) if o.status == "open" and o.request_id is None), None)
    if lost is not None and segment.offset is not None:
        mine = {o.result.get("checkpoint_id") for s in driver.state.segments for o in s.of("save")}
        for found in await _checkpoints(driver):
            # Equal counts on one job mean equal weights: nothing was stepped in between.
            if found["checkpoint_id"] not in mine and int(found["global_steps"]) == step + segment.offset:
                await _close(driver, lost, "done", _saved(driver, found))
                return
    saved, operation = await _save_now(driver, step)
    await _require_expected_count(driver, operation, saved)
    await _close(driver, operation, "done", saved)
    driver.tell("save", step=step, message=f"checkpoint {saved['checkpoint_id']}")


async def weight_sync(driver: Driver, step: int) -> None:
    """Copy the training weights to every sampling sub-job of the job. Repeating it is harmless.

    A sync that failed, or that the service forgot, is sent again, as often as a forward-backward would be; raises
    RunFailed then, `SegmentLost` when the job or one of its sub-jobs is lost.
    """
    segment = driver.segment
    while True:
        job = await driver.job() or {}
        sub_jobs = [s for s in job.get("sub_jobs", []) if isinstance(s.get("sub_job_id"), str)]
        training: dict[str, Any] = next((s for s in sub_jobs if s.get("job_type") == "training"), {})
        call = partial(
            driver.client.weight_sync,
            segment.job_id,
            training.get("sub_job_id", f"{segment.job_id}:training:0"),
            [s["sub_job_id"] for s in sub_jobs if s.get("job_type") == "sampling"],
            weight_format="lora" if (training.get("training_config") or {}).get("peft_config") else None,
        )
        failed = segment.failures("weight_sync", step)
        operation = await driver.submit("weight_sync", step, call, attempt=failed, repeatable=True)
        try:
            await driver.result(operation)
        except (RequestFailed, NotFoundError) as error:
            await _failed(driver, operation, error, f"the weight sync after step {step}")
        else:
            await _close(driver, operation, "done", {})
            return


async def load(driver: Driver) -> None:
    """Load the segment's base into a job that was there before the segment.

    A load that lands late undoes steps. Where one may, another job is made; where none may be made, it is given time to
    land and then sent again, and steps that it undoes nevertheless show in the next count.
    """
    segment = driver.segment
    base = segment.base
    if base is None:
        raise RunFailed(f"segment {segment.number} of {driver.store.root} has no base to load")
    what = f"checkpoint {base.checkpoint_id} could not be loaded into job {segment.job_id}"
    call = partial(driver.client.load, segment.job_id, base.checkpoint_id, base.source_job_id)
    operation = next((o for o in segment.of("load") if o.status == "open"), None)
    for _ in range(driver.plan.max_attempts):
        if operation is None:
            try:
                operation = await driver.submit("load", base.step, call)
            except OutcomeUnknown as unknown:
                driver.tell("recover", message=str(unknown))
                operation = _open(driver, "load", base.step)
        if operation.request_id is not None:
            try:
                await driver.result(operation)
            except RequestFailed as error:
                await _close(driver, operation, "failed", {"error": error.error[:500]})
                raise (SegmentLost if driver.plan.owns_job else RunFailed)(f"{what}: {error}") from error
            except NotFoundError as forgotten:
                driver.tell("recover", message=str(forgotten))
            else:
                await _close(driver, operation, "done", {})
                return
        if driver.plan.owns_job:
            raise SegmentLost(f"the load of checkpoint {base.checkpoint_id} got no answer and may still land")
        await driver.pause(LATE_S)
        await _close(driver, operation, "refused", {})
        operation = None
    raise RunFailed(f"{what}: {driver.plan.max_attempts} loads got no answer")


async def publish_verified(driver: Driver) -> None:
    """Publish the latest save whose weights have shown a finite loss, unless it is published.

    A save is never published on its own word: weights that diverged in the last step look like any other file.
    """
    segment = driver.segment
    if not segment.offset_is_certain:
        return
    ready = [o for o in segment.saves() if segment.weights_are_finite(o.step)]
    if not ready:
        return
    latest = ready[-1]
    folder = latest.result["save"]
    if folder == driver.published:
        return  # asked at every step; a bucket would be listed each time
    for entry in await offload(driver.log.entries):
        if entry.save == folder:
            # Seen is not durable yet: whoever published it may have been killed right then.
            await offload(driver.log.publish, folder, entry.epoch, entry.step)
            driver.published = folder
            return
    manifest = SaveManifest(
        job_id=segment.job_id,
        checkpoint_id=latest.result["checkpoint_id"],
        checkpoint_type=driver.plan.checkpoint_type,
        global_steps=latest.result["global_steps"],
        segment=segment.number,
        created_at=latest.result.get("created_at"),
        metrics={"step": latest.step, "loss": segment.loss(latest.step + 1)},
    )
    await offload(manifest.write, driver.store, folder)
    entry, _ = await offload(driver.log.publish, folder, driver.epoch, latest.step)
    driver.published = folder
    driver.tell("publish", step=latest.step, message=f"published {entry.name}", entry=entry.name)
    try:
        await offload(prune, driver.log, driver.plan.keep_publications)
    except StoreError as problem:
        # An old publication that stays costs space, and is tried again: nothing to end a night's training for.
        driver.tell("publish", step=latest.step, message=f"old publications could not be removed: {problem}")


async def _save_now(driver: Driver, step: int) -> tuple[dict[str, Any], Operation]:
    """A save on the service, and the operation that made it (still open).

    Saving twice is harmless, so a save that may be under way is not waited for. The run, and its job, end only when the
    service has not answered one for longer than a bad minute of the network.
    """
    for pause_s in SAVE_PAUSES_S:
        found, operation = await _try_to_save(driver, step)
        if found is not None:
            return _saved(driver, found), operation
        if driver.state.operation(operation.number).status == "open":
            await _close(driver, operation, "refused", {})
        await driver.pause(pause_s)
    raise RunFailed(
        f"{driver.store.root}: {len(SAVE_PAUSES_S)} saves after step {step} of job {driver.segment.job_id} got no "
        "answer; look at the job's log, then start the plan again: it goes on from the last publication"
    )


async def _try_to_save(driver: Driver, step: int) -> tuple[dict[str, Any] | None, Operation]:
    """One save: the checkpoint as the service lists it, or None when nothing came of it."""
    segment = driver.segment
    operation = next((o for o in segment.of("save", step) if o.status == "open" and o.request_id), None)
    if operation is None:
        known = {c["checkpoint_id"] for c in await _checkpoints(driver)}
        try:
            kind = driver.plan.checkpoint_type
            operation = await driver.submit("save", step, partial(driver.client.save, segment.job_id, None, kind))
        except OutcomeUnknown:
            fresh = [c for c in await _checkpoints(driver) if c["checkpoint_id"] not in known]
            return (fresh[-1] if fresh else None), _open(driver, "save", step)
    try:
        result = await driver.result(operation)
    except NotFoundError:
        return None, operation
    except RequestFailed as error:
        await _failed(driver, operation, error, f"the save after step {step}")
        return None, operation
    identifier = checkpoint_id(result)
    for found in await _checkpoints(driver):
        if found["checkpoint_id"] == identifier:
            return found, operation
    raise RunFailed(f"job {segment.job_id} saved {identifier}, but its checkpoint list does not hold it")


def _saved(driver: Driver, checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint["checkpoint_id"],
        "global_steps": int(checkpoint["global_steps"]),
        "created_at": checkpoint.get("created_at"),
        "save": f"exec/{driver.attempt}/{checkpoint['checkpoint_id']}",
    }


async def _checkpoints(driver: Driver) -> list[dict[str, Any]]:
    """The job's checkpoints of the plan's type, oldest first."""
    job_id = driver.segment.job_id
    listed: list[dict[str, Any]] = await driver.on_job(
        f"list checkpoints of job {job_id}", lambda: driver.client.list_checkpoints(job_id)
    )
    kind = driver.plan.checkpoint_type
    wanted = [c for c in listed if c.get("checkpoint_type", kind) == kind]
    return sorted(wanted, key=created_at)


def created_at(what: Mapping[str, Any]) -> float:
    """When the service made a job or a checkpoint, in UTC seconds; 0 when it does not say."""
    try:
        return datetime.fromisoformat(str(what.get("created_at"))).timestamp()
    except ValueError:
        return 0.0


async def _confirm_step(driver: Driver, operation: Operation, global_steps: int, norm: float | None) -> int:
    """Record a step's result, unless it shows that the weights are not what the run's batches make of them.

    A count that is not the expected one: somebody else stepped this job too. A gradient norm of zero, in a run whose
    steps have one: a worker restarted without a word and lost the batches of this step.
    """
    segment = driver.segment
    result: dict[str, Any] = {"global_steps": global_steps}
    offset = segment.certain_offset
    doubt = None
    if offset is not None and global_steps != operation.step + offset:
        doubt = f"global_steps {global_steps} where {operation.step + offset} was expected"
    elif not norm and driver.state.steps_show_gradients:
        doubt = f"grad_norm {norm}: it had no gradient to spend, so the workers have lost its batches"
    elif norm and segment.stepped_on_nothing is not None:
        doubt = f"grad_norm {norm:g} where step {segment.stepped_on_nothing} had no gradient to spend"
    if norm is not None and math.isfinite(norm):
        result["grad_norm"] = norm
    await _close(driver, operation, "failed" if doubt else "done", result)
    if doubt:
        raise SegmentLost(f"step {operation.step} answered {doubt}")
    return global_steps


def _gradient_norm(result: Mapping[str, Any]) -> float | None:
    """The norm that a step's result tells; None when it tells none (a gateway may leave a zero out).

    A null is a norm that was not finite, for which JSON has no word: gradients that exploded were there.
    """
    metrics = result.get("metrics") or {}
    norm = metrics.get("grad_norm")
    if norm is None and "grad_norm" in metrics:
        return math.nan
    return float(norm) if isinstance(norm, int | float) and not isinstance(norm, bool) else None


async def _require_expected_count(driver: Driver, operation: Operation, saved: dict[str, Any]) -> None:
    """Refuse a save of weights that somebody else stepped too, e.g. a network that delivered a step twice."""
    segment, found = driver.segment, saved["global_steps"]
    if segment.offset is not None and found != operation.step + segment.offset:
        await _close(driver, operation, "failed", saved)
        raise SegmentLost(
            f"a save after step {operation.step} has global_steps {found} where {operation.step + segment.offset} was "
            "expected"
        )


async def _failed(driver: Driver, operation: Operation, error: Exception, what: str) -> None:
    """Record that the service failed what may be sent again; raises RunFailed once the plan has no attempt left."""
    await _close(driver, operation, "failed", {"error": str(error)[:500]})
    await driver.raise_if_job_lost(str(error))
    failures = driver.segment.failures(operation.op, operation.step)
    if failures >= driver.plan.max_attempts:
        times = "once" if failures == 1 else f"{failures} times"
        raise RunFailed(f"{what} failed {times} on job {driver.segment.job_id}: {error}") from error
    driver.tell("recover", message=f"{what} failed, and is sent again: {error}")


def _open(driver: Driver, op: str, step: int) -> Operation:
    return [o for o in driver.segment.of(op, step) if o.status == "open"][-1]


async def _close(driver: Driver, operation: Operation, status: str, result: dict[str, Any]) -> None:
    await driver.record("outcome", {"intent": operation.number, "status": status, "result": result})
