"""The durable training run: from a plan to a published checkpoint, through whatever the night brings.

``run`` reads top to bottom as the algorithm. What it sends is in `operations`, what it does after a crash in
`segments`, what it knows in `state`, and what makes a repetition harmless in `driver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from cortex_training.datasets import Dataset, check_window
from cortex_training.errors import ConfigurationError, CortexTrainingError, NotFoundError
from cortex_training.protocol.jobs import difference_from
from cortex_training.publication.errors import StoreError
from cortex_training.telemetry import redacted
from cortex_training.training import operations, segments
from cortex_training.training.ahead import Ahead
from cortex_training.training.driver import Driver, SegmentLost
from cortex_training.training.frames import Frames
from cortex_training.training.journal import Superseded
from cortex_training.training.last_words import last_error_lines, service_log
from cortex_training.training.offload import offload, run_slot, unbroken
from cortex_training.training.plan import TrainingPlan
from cortex_training.training.progress import ProgressCallback, RunFailed, RunInterrupted, TrainingResult
from cortex_training.training.root import claim_identity, open_root
from cortex_training.training.state import RunState

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient


async def run(
    plan: TrainingPlan,
    client: AsyncCortexTrainingClient,
    progress: ProgressCallback | None = None,
    *,
    attempt: str = "",
    stop: asyncio.Event | None = None,
) -> TrainingResult:
    """Train as `plan` says, or go on with what an earlier driver began on the same root.

    `attempt` is a short name of this try (at most 12 characters of ``[a-z0-9]``); `stop` asks the run to end at the
    next safe moment.

    Raises:
        ConfigurationError: the plan, the root, the dataset or the job's configuration is wrong; no job was created.
        RunInterrupted: `stop` was set. The job is left alive for the next driver.
        RunFailed: going on needs a person. An owned job has been cancelled.
        Superseded: another driver has taken the run over. Nothing more was sent.
        DeadlineExceeded, TransportError, AuthError and other errors of the client: the service was out of reach for
            `patience_s`, or one request took longer than `request_timeout_s`. The job is left alive for the next
            driver, and ended by `end_run` or its own idle timeout.
    """
    plan.validate()
    async with run_slot(stop) as free:
        if not free:
            raise RunInterrupted(f"{plan.root}: told to stop before it began")
        dataset = await offload(Dataset.open, plan.dataset)
        batches = dataset.batches(plan.micro_batch_size, plan.micro_batches_per_step, plan.seed)
        plan = plan.with_steps(batches.steps_per_pass)
        plan.validate()
        await _check_against_model(plan, client, dataset)
        store = await offload(open_root, plan.root, plan.credentials)
        training = None if plan.owns_job else await _training_sub_job(client, plan)
        manifest = dataset.manifest
        identity = plan.identity(
            dataset_sha256=manifest.content_sha256, frame_version=manifest.frame_version, training_sub_job=training
        )
        await offload(claim_identity, store, identity)
        driver = await Driver.claim(plan, client, store, attempt=attempt, progress=progress, stop=stop)
        frames = Frames(
            batches,
            plan.micro_batches_per_step,
            lambda step: driver.state.position(step),
            wait=driver.until_stopped,
        )
        try:
            async with service_log(driver) if plan.tail_service_log else contextlib.nullcontext():
                await _train(driver, frames)
            result = await _finish(driver)
        except Superseded:
            raise
        except RunFailed as failed:
            await _record_stop(driver, failed)
            said = await _last_error_lines(driver)
            said += await _end_owned_job(driver)
            await _release(driver)
            raise RunFailed("\n".join([str(failed), *said])) from failed
        except BaseException as problem:
            await unbroken(_give_up(driver, problem))
            raise
        finally:
            await frames.drop()
            await driver.stop_packing()
        try:
            await driver.release()
        except StoreError as problem:
            # All steps are made and published, and the next driver need not wait for a run that is finished.
            driver.tell("done", message=f"the run is finished, but not released: {problem}")
        return result


class _Diverged(Exception):
    """A divergence was found and is on record."""


async def _train(driver: Driver, frames: Frames) -> None:
    """Train to the last step, in as many segments as it takes."""
    if driver.state.diverged is None and driver.state.finished_steps >= driver.plan.steps:
        return
    _tell_of_accumulation(driver)
    recovering = True
    while True:
        try:
            if driver.state.diverged is not None:
                await segments.roll_back(driver)
                recovering = False
            if recovering:
                await segments.recover(driver)
                recovering = False
            await _train_segment(driver, frames)
            return
        except _Diverged:
            await frames.drop()
        except SegmentLost as lost:
            # The next segment begins at another step, and its job may wait for GPUs for hours.
            await frames.drop()
            await _replace(driver, lost)
            recovering = False


def _tell_of_accumulation(driver: Driver) -> None:
    batches = driver.plan.micro_batches_per_step
    if batches > 1:
        driver.tell(
            "plan",
            message=f"the gradients of {batches} forward-backwards add up before each step, undivided: {batches} times "
            "the gradient of their mean loss",
        )


async def _replace(driver: Driver, lost: SegmentLost) -> None:
    """Begin a new segment; its job may be lost before it runs, which is one more replacement."""
    while True:
        try:
            await segments.replace(driver, lost)
            return
        except SegmentLost as again:
            lost = again


async def _train_segment(driver: Driver, frames: Frames) -> None:
    """Step by step to the end. Each turn looks at what the journal says is done, so it can begin anywhere."""
    plan = driver.plan
    ahead = Ahead(driver, frames)
    await operations.read_count(driver)
    await _sync_base(driver)
    while True:
        segment = driver.segment
        step = segment.confirmed_step
        trained_here = step > segment.start_step
        over_budget = driver.budget_is_spent
        if over_budget and not trained_here and step < plan.steps:
            raise RunFailed(segments.budget_spent(driver))
        last = step >= plan.steps or over_budget
        due = last or plan.save_is_due(step, time.time() - segment.saved_at)
        if trained_here and due and not segment.saves(step):
            await ahead.require_order(step)
            await operations.save(driver, step)
        if trained_here and _sync_due(driver, step, last):
            await operations.weight_sync(driver, step)
        if last:
            # Measured, never stepped: the last save counts only if its weights still give a finite loss.
            loss = await operations.forward_backward(driver, frames, step + 1, 0)
            await _require_no_divergence(driver, step, loss)
            await operations.publish_verified(driver)
            if over_budget and step < plan.steps:
                reason = segments.budget_spent(driver)
                await driver.record("paused", {"reason": reason})
                raise RunFailed(reason)
            return
        await _train_step(driver, frames, ahead, step + 1)


async def _train_step(driver: Driver, frames: Frames, ahead: Ahead, step: int) -> None:
    plan = driver.plan
    began, remote, waited = time.monotonic(), driver.remote_s, driver.waiting_s
    losses = []
    for micro_batch in range(plan.micro_batches_per_step):
        loss = await operations.forward_backward(driver, frames, step, micro_batch, ahead.sent(step, micro_batch))
        await _require_no_divergence(driver, step - 1, loss)
        losses.append(loss)
        if micro_batch == 0:
            await operations.publish_verified(driver)
    global_steps = await operations.optimizer_step(driver, step, lambda: ahead.send_behind(step))
    took = time.monotonic() - began
    tokens = await frames.tokens(step)
    rate = driver.learning_rate(step)
    mean = sum(losses) / len(losses)
    remote_s, waiting_s = driver.remote_s - remote, driver.waiting_s - waited
    driver.tell(
        "train",
        step=step,
        loss=mean,
        learning_rate=rate,
        step_s=took,
        tokens_per_s=tokens / took if took > 0 else None,
        remote_s=remote_s,
        waiting_s=waiting_s,
        remaining_s=driver.pace.remaining_s(step, plan.steps),
    )
    row: dict[str, Any] = {
        "step": step,
        "loss": mean,
        "learning_rate": rate,
        "global_steps": global_steps,
        "tokens": tokens,
        "seconds": round(took, 3),
        "remote_s": round(remote_s, 3),
        "waiting_s": round(waiting_s, 3),
        "position": driver.state.position(step),
        "segment": driver.segment.number,
        "epoch": driver.epoch,
        "at": time.time(),
    }
    await offload(driver.metrics.append, row)


async def _finish(driver: Driver) -> TrainingResult:
    """Record the end, let go of an owned job, and sum up."""
    plan, state = driver.plan, driver.state
    if state.finished_steps < plan.steps:
        await driver.record("finished", {"steps": plan.steps})
    if driver.segment.owned and plan.when_done == "cancel":
        await segments.cancel(driver, driver.segment.job_id)
    segment = driver.segment
    losses = state.losses
    saves = segment.saves()
    latest = await offload(driver.log.latest)
    driver.tell("done", message=f"published {latest.name}" if latest else "nothing published")
    return TrainingResult(
        root=driver.store.root,
        job_id=segment.job_id,
        steps=segment.confirmed_step,
        global_steps=segment.confirmed_step + (segment.offset or 0),
        first_loss=losses.get(1),
        last_loss=losses.get(segment.confirmed_step),
        checkpoint_id=saves[-1].result["checkpoint_id"] if saves else None,
        entry=latest.name if latest else None,
        segments=len(state.segments),
        epoch=driver.epoch,
    )


async def _end_owned_job(driver: Driver) -> list[str]:
    """Cancel the job of a run that failed. That it could not be cancelled is told and not raised: a person needs to
    know why the run failed, most of all when the service is out of reach.
    """
    if driver.state.current is None or not driver.segment.owned:
        return []
    try:
        await segments.cancel(driver, driver.segment.job_id)
    except Superseded:
        raise
    except CortexTrainingError as problem:
        return [f"job {driver.segment.job_id} is still alive, because it could not be cancelled: {problem}"]
    return []


async def _last_error_lines(driver: Driver) -> list[str]:
    if driver.state.current is None:
        return []
    lines = await last_error_lines(driver.client, driver.segment.job_id)
    return ["the service's log ends with:", *lines] if lines else []


async def _give_up(driver: Driver, problem: BaseException) -> None:
    with contextlib.suppress(CortexTrainingError):
        await _record_stop(driver, problem)
    await _release(driver)


async def _record_stop(driver: Driver, problem: BaseException) -> None:
    """Say in the journal why the run stops, for whoever looks at the root. Raises Superseded when another driver has
    the run, and with it the job that would be cancelled next.
    """
    if isinstance(problem, RunInterrupted) or not isinstance(problem, Exception):
        return
    reason = redacted(str(problem).removeprefix(f"{driver.store.root}: ")) or type(problem).__name__
    try:
        await driver.record("stopped", {"reason": reason})
    except Superseded:
        raise
    except CortexTrainingError:
        pass  # a full disk, say: the failure that is raised is the one to see


async def _release(driver: Driver) -> None:
    """Release the run on the way out of a failure, which must stay the failure that is raised.

    A successor that finds no ``released`` waits the sending window out; nothing else is lost.
    """
    with contextlib.suppress(CortexTrainingError):
        await driver.release()


async def _require_no_divergence(driver: Driver, step: int, loss: float) -> None:
    """Stop at a loss, measured on the weights of `step`, that shows a divergence: on record before anything is
    published, or every retry would pay for the same divergence.
    """
    policy = driver.plan.divergence
    before = last_losses(driver.state, step, policy.median_of) if policy.loss_factor is not None else []
    found = policy.found_in(loss, before)
    if found is not None:
        await driver.record("diverged", {"step": step, "loss": found})
        raise _Diverged


def last_losses(state: RunState, step: int, count: int) -> list[float]:
    """The last `count` losses of steps up to `step`, in order; of a step that was made again, the last one.

    Asked for at every batch, so it must not look at all steps of a long run.
    """
    found: list[float] = []
    while step > 0 and len(found) < count:
        measured = (segment.loss(step) for segment in reversed(state.segments))
        loss = next((loss for loss in measured if loss is not None), None)
        if loss is not None:
            found.append(loss)
        step -= 1
    return found[::-1]


async def _check_against_model(plan: TrainingPlan, client: AsyncCortexTrainingClient, dataset: Dataset) -> None:
    """Refuse sequences that are longer than the model's window before a job is created."""
    training = plan.training_sub_job if plan.owns_job else await _training_sub_job(client, plan)
    if plan.owns_job and plan.job_id is not None:
        await _check_given_job(client, plan, plan.job_id)
    window = (training or {}).get("training_config", {}).get("max_seq_len")
    if window is not None:
        check_window(dataset.manifest, int(window))


async def _check_given_job(client: AsyncCortexTrainingClient, plan: TrainingPlan, job_id: str) -> None:
    """Refuse a job that was not made of the plan's sub-jobs: its replacement would train something else.

    One that has ended since is the run's to replace, and one that is gone may have been replaced long ago.
    """
    try:
        job = await client.get_job(job_id)
    except NotFoundError:
        return
    difference = difference_from([dict(s) for s in plan.sub_jobs], job.get("sub_jobs"))
    if difference:
        raise ConfigurationError.of(
            "plan.job_id", job_id, f"this job was not made of plan.sub_jobs ({difference}); give those it was made of"
        )


async def _training_sub_job(client: AsyncCortexTrainingClient, plan: TrainingPlan) -> dict[str, Any]:
    """The training sub-job of somebody else's job, which has to hold all that the plan needs."""
    job_id = plan.job_id or ""
    try:
        job = await client.get_job(job_id)
    except NotFoundError:
        raise ConfigurationError.of("plan.job_id", job_id, "the service knows no such job; create it first") from None
    sub_jobs = job.get("sub_jobs", [])
    if plan.weight_sync_every_steps is not None and not any(s.get("job_type") == "sampling" for s in sub_jobs):
        raise ConfigurationError.of(
            "plan.weight_sync_every_steps",
            plan.weight_sync_every_steps,
            f"job {job_id} has no sampling sub-job; create it with one, or leave this out",
        )
    for sub_job in sub_jobs:
        if sub_job.get("job_type") == "training":
            return dict(sub_job)
    raise ConfigurationError.of(
        "plan.job_id", job_id, "this job has no training sub-job; create one with a training_config"
    )


async def _sync_base(driver: Driver) -> None:
    """Give the samplers of a segment that starts from a save its weights: a new job's samplers begin with the base
    model's, and whoever generates would fall back to these until the next sync.
    """
    segment = driver.segment
    if driver.plan.weight_sync_every_steps is None or segment.base is None:
        return
    if segment.confirmed_step == segment.start_step and not segment.done("weight_sync"):
        await operations.weight_sync(driver, segment.start_step)


def _sync_due(driver: Driver, step: int, last: bool) -> bool:
    every = driver.plan.weight_sync_every_steps
    if every is None or not (last or step % every == 0):
        return False
    return not driver.segment.done("weight_sync", step)
