"""Segments: getting the current one's job to run, and beginning the next one when the last can't be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cortex_training import identity
from cortex_training.errors import (
    ApiError,
    ConfigurationError,
    ConflictError,
    CortexTrainingError,
    DeadlineExceeded,
    JobFailed,
    NotFoundError,
)
from cortex_training.protocol.jobs import difference_from
from cortex_training.publication.errors import SaveError
from cortex_training.publication.save import RESUMABLE, SaveManifest
from cortex_training.publication.store import Store
from cortex_training.states import is_terminal_job, job_state
from cortex_training.training import operations
from cortex_training.training.driver import Driver, SegmentLost
from cortex_training.training.journal import Superseded, read_journal
from cortex_training.training.offload import offload, unbroken
from cortex_training.training.plan import TrainingPlan
from cortex_training.training.progress import RunFailed
from cortex_training.training.state import (
    CONTINUATION,
    FIRST,
    MOVE,
    REPLACEMENT,
    ROLLBACK,
    Base,
    RunState,
    Segment,
    replay,
)
from cortex_training.training.teardown import ENDED

_CLOCK_SKEW_S = 60.0
"""How far the service's clock may be behind the driver's."""


async def recover(driver: Driver) -> None:
    """Bring the run into a certain state: a current segment whose job runs and whose last step is confirmed or refused.

    Decided from the journal and the service alone. Raises `SegmentLost` when only a new segment can go on.
    """
    current = driver.state.current
    if current is None:
        await _begin(driver, base=None, reason="first start", cause=FIRST, given=driver.plan.job_id)
    elif _names_another_job(driver.plan, driver.state):
        if current.owned:
            await cancel(driver, current.job_id)
        base, reason = await base_of(driver, current), "the plan names another job"
        await _begin(driver, base=base, reason=reason, cause=MOVE, given=driver.plan.job_id)
    elif current.given_up is not None:
        raise SegmentLost(current.given_up)
    elif current.complete and await _has_ended(driver):
        # It did all that it was asked for, and was let go of. More steps, or a larger budget, are not a loss.
        if not driver.plan.owns_job:
            raise RunFailed(
                f"{driver.store.root}: job {current.job_id} has ended after step {current.confirmed_step}. More steps "
                "need a new job, and a plan without sub_jobs may not create one: add them, or name another job; it "
                "starts from the last publication"
            )
        base = await _base_to_go_on_from(driver, current, f"job {current.job_id} has ended")
        await _begin(driver, base=base, reason="there is more to do", cause=CONTINUATION)
    await ensure_running(driver)
    unsettled = driver.segment.unsettled_step
    if unsettled is not None:
        if unsettled.request_id is None:
            await operations.settle_step(driver, unsettled)
        else:
            await operations.step_result(driver, unsettled)


def _names_another_job(plan: TrainingPlan, state: RunState) -> bool:
    """Whether the run has to move: to a job of its own, or to one that the plan names and the run did not begin in."""
    current = state.segments[-1]
    if plan.job_id is None:
        return not current.owned
    if plan.job_id == current.job_id:
        return False
    # A job that was given to the run and lost is named by its plan for ever after.
    return not (plan.owns_job and any(s.job_id == plan.job_id for s in state.segments))


async def replace(driver: Driver, lost: SegmentLost) -> None:
    """End the current segment and begin the next one in a new job, the old job cancelled first.

    Cancelling is the only fence the service has: a request of the old job that is still on its way then finds nothing
    to change. Nothing needs the fence where the journal proves that no such request exists; a plan with `load_in_place`
    then goes on in the same job.
    """
    segment = driver.segment
    driver.tell("recover", message=f"segment {segment.number} is lost: {lost.reason}")
    if not segment.ended:
        await driver.record("ended", {"reason": lost.reason})
    plan = driver.plan
    base = await _base_to_go_on_from(driver, segment, lost.reason) if plan.owns_job or plan.load_in_place else None
    in_place = base is not None and await _may_load_in_place(driver, segment)
    if not plan.owns_job and not in_place:
        raise RunFailed(
            f"{driver.store.root}: {lost.reason}. Going on needs a new job, and a plan without sub_jobs may not create "
            "one: add them, or run the plan on another job; it starts from the last publication"
        )
    if driver.state.replacements >= plan.max_replacements:
        raise RunFailed(
            f"{driver.store.root}: {lost.reason}. {plan.max_replacements} replacements were used; raise "
            "max_replacements to go on"
        )
    if segment.owned and not in_place:
        await cancel(driver, segment.job_id)
    given = segment.job_id if in_place else None
    await _begin(driver, base=base, reason=lost.reason, cause=REPLACEMENT, given=given)
    await ensure_running(driver)


async def _may_load_in_place(driver: Driver, segment: Segment) -> bool:
    """Whether a lost segment's job can go on from a save: it runs, holds no gradients, and nothing is on its way."""
    if not driver.plan.load_in_place or not segment.holds_nothing_new:
        return False
    try:
        await driver.raise_if_job_lost("its weights are lost")
    except SegmentLost:
        return False
    return True


async def roll_back(driver: Driver) -> None:
    """Go back to the last publication in a new job, with something changed, after a divergence that is on record.

    One record begins the new segment and says what is changed: a crash before it leaves the divergence to be dealt
    with, one after it an ordinary segment. Raises RunFailed when the plan stops here.
    """
    segment, policy = driver.segment, driver.plan.divergence
    if driver.state.diverged is None:
        return
    step, loss = driver.state.diverged
    what = f"{driver.store.root}: the loss on the weights of step {step} is {loss}"
    kept = "Nothing of these weights was published"
    if policy.action != "rollback":
        raise RunFailed(
            f"{what}. {kept}; lower the learning rate or look at the data of the last steps, then use a new root, or "
            'let the plan go back to the last publication (divergence.action = "rollback")'
        )
    if driver.state.rollbacks >= policy.max_rollbacks:
        raise RunFailed(
            f"{what}. {kept}; {driver.state.rollbacks} rollbacks were used. Look at the data and the learning rate, "
            "then raise divergence.max_rollbacks or use a new root"
        )
    base = await base_of(driver, segment)
    first = base.step + 1 if base else 1
    # The weights of `step` were measured by the batches of the step behind it: either these are bad or the weights.
    seen = range(max(first, step + 2 - policy.skip_batches), step + 2)
    skipped = [driver.state.position(k) for k in seen]
    driver.tell("recover", message=f"{what}; going back to step {first - 1}")
    if not segment.ended:
        await driver.record("ended", {"reason": f"diverged: the loss on the weights of step {step} is {loss}"})
    await cancel(driver, segment.job_id)
    change: dict[str, Any] = {"skipped": skipped, "lr_factor": policy.lr_factor}
    await _begin(driver, base=base, reason=f"diverged at step {step}: loss {loss}", cause=ROLLBACK, **change)
    await ensure_running(driver)


async def _base_to_go_on_from(driver: Driver, segment: Segment, why: str) -> Base | None:
    """`base_of`, unless the plan says that nothing may go on from a save."""
    if driver.plan.resume == "none":
        raise RunFailed(
            f'{driver.store.root}: {why}, and a plan with resume = "none" does not go on in another job. Use a new '
            "root, or resumable saves"
        )
    return await base_of(driver, segment)


async def _has_ended(driver: Driver) -> bool:
    job = await driver.job()
    return job is None or is_terminal_job(job.get("status")) or job_state(job.get("status")) == "cancelling"


async def base_of(driver: Driver, segment: Segment) -> Base | None:
    """Where a successor of `segment` starts: a save that rescued it, its last publication, or its own base.

    Never the latest publication of the root: that may belong to a lineage which was given up.
    """
    if segment.rescued is not None:
        return segment.rescued
    for entry in reversed(await offload(driver.log.entries)):
        try:
            manifest = await offload(SaveManifest.read, driver.store, entry.save)
        except SaveError:
            continue  # published by hand, or by another tool: nothing that this run could resume from
        if manifest.segment == segment.number and manifest.checkpoint_type == RESUMABLE:
            return Base(manifest.checkpoint_id, manifest.job_id, entry.step, manifest.global_steps)
    return segment.base


async def ensure_running(driver: Driver) -> None:
    """Create the segment's job unless it is there, and wait until it runs."""
    segment = driver.segment
    job = await driver.job()
    if job is None:
        if segment.operations:
            raise SegmentLost(f"job {segment.job_id} is gone")
        if segment.given:
            raise ConfigurationError.of("plan.job_id", segment.job_id, "the service knows no such job; create it first")
        # A run that was told to stop is about to be torn down: a job made now would outlive the teardown.
        driver.check_stop()
        await unbroken(_create(driver))
    elif is_terminal_job(job.get("status")):
        raise SegmentLost(f"job {segment.job_id} is {job.get('status')}: {job.get('reason') or 'no reason given'}")
    elif segment.operations:
        # It ran when something was sent to it. A sub-job that is coming up again has forgotten the batches of the
        # unfinished step, and waiting for it would hide that.
        await driver.raise_if_job_lost("it ran before")
    job_id = driver.segment.job_id
    try:
        await driver.patiently(
            f"wait for job {job_id}",
            lambda: driver.until_stopped(
                driver.client.wait_for_job(
                    job_id,
                    timeout_s=driver.plan.running_timeout_s,
                    progress=lambda seen: driver.tell("job", message=str(seen.get("status"))),
                )
            ),
        )
    except JobFailed as error:
        raise SegmentLost(str(error)) from error
    except DeadlineExceeded as error:
        raise RunFailed(
            f"{driver.store.root}: job {job_id} was not running within {driver.plan.running_timeout_s:g} s; wait for "
            "capacity, or raise running_timeout_s"
        ) from error
    if segment.owned and not driver.state.has_run(job_id):
        await driver.record("running", {"job_id": job_id, "gpus": driver.plan.gpus})
    if segment.given and segment.base is not None and not segment.loaded:
        await operations.load(driver)


async def cancel(driver: Driver, job_id: str) -> None:
    """Cancel a job, unless the journal knows that it was; one that is gone or has ended is success."""
    if job_id in driver.state.cancelled:
        return

    async def attempt() -> bool:
        try:
            await driver.client.cancel_job(job_id)
        except NotFoundError:
            return False
        except ConflictError:
            pass
        return True

    # A job that is not there is not on record as cancelled: if its creation was refused, the next driver creates it
    # under this very id, and has to cancel it in the end.
    if await driver.patiently(f"cancel job {job_id}", attempt):
        await driver.record("cancelled", {"job_id": job_id})


async def _begin(
    driver: Driver, *, base: Base | None, reason: str, cause: str, given: str | None = None, **change: Any
) -> None:
    """Write the segment's record, and with it the id of its job: the one that is `given`, or that of a job to make."""
    if driver.budget_is_spent:
        raise RunFailed(budget_spent(driver))
    await driver.record(
        "segment",
        {
            "segment": len(driver.state.segments),
            "job_id": given or identity.new_job_id(),
            "owned": driver.plan.owns_job,
            "given": given is not None,
            "base": asdict(base) if base else None,
            "reason": reason,
            "cause": cause,
            **change,
        },
    )


def budget_spent(driver: Driver) -> str:
    return (
        f"{driver.store.root}: {driver.gpu_seconds:.0f} GPU seconds were used and max_gpu_seconds is "
        f"{driver.plan.max_gpu_seconds:g}; raise it to go on from the last publication"
    )


async def _create(driver: Driver) -> None:
    segment = driver.segment
    asked = segment.job_id
    body = job_body(driver, segment)

    async def attempt() -> str:
        try:
            answer = await driver.client.create_job_from_body(body)
        except ConflictError:
            await _adopt_equal(driver, body)
            return segment.job_id
        return str(answer["job_id"])

    try:
        job_id = await driver.patiently(f"create job {segment.job_id}", attempt)
    except ApiError as error:
        raise RunFailed(f"{driver.store.root}: the service refused to create a job: {error}") from error
    try:
        # Also the fence: whoever has taken the run over may have looked for this job before it existed.
        await driver.record("created" if job_id == segment.job_id else "adopted", {"job_id": job_id})
    except Superseded:
        if not await offload(_is_driven, driver.store, job_id):
            await driver.client.cancel_job(job_id)
        raise
    if job_id != asked:
        await _tell_of_lost_jobs(driver, body, segment.saved_at)


def _is_driven(store: Store, job_id: str) -> bool:
    """Whether the run has a driver that knows this job: it may have found it running, and trains in it by now."""
    records = read_journal(store)
    newest = next(r for r in reversed(records) if r.type == "takeover")
    current = replay(records).current
    return newest.body.get("info") != ENDED and current is not None and current.job_id == job_id and not current.ended


async def _adopt_equal(driver: Driver, body: dict[str, Any]) -> None:
    """A duplicate id is ours after a lost answer, if it was created from the same configuration and lives."""
    job = await driver.job()
    if job is None or is_terminal_job(job.get("status")):
        raise SegmentLost(f"job {driver.segment.job_id} exists and has ended")
    difference = difference_from(body["sub_job_configs"], job.get("sub_jobs"))
    if difference:
        raise SegmentLost(f"job {driver.segment.job_id} exists and is another one ({difference})")


async def _tell_of_lost_jobs(driver: Driver, body: Mapping[str, Any], began: float) -> None:
    """Name the jobs that an earlier try of this creation may have made, on a service that gives its own ids.

    Nothing the service lists tells them from an equal job of another run, so a person has to end them, or their idle
    timeout. Best effort.
    """
    try:
        listed = await driver.client.list_jobs()
    except CortexTrainingError:
        return
    for job in listed:
        job_id = job.get("job_id")
        known = job_id in driver.state.job_ids or is_terminal_job(job.get("status"))
        if known or operations.created_at(job) < began - _CLOCK_SKEW_S:
            continue
        if difference_from(body["sub_job_configs"], job.get("sub_jobs")):
            continue
        driver.tell(
            "recover",
            message=f"job {job_id} has this run's configuration and is in no record of it: unless another run made it, "
            "a creation whose answer was lost did, and it should be cancelled",
        )


def job_body(driver: Driver, segment: Segment) -> dict[str, Any]:
    """The create body of a segment's job; its training and sampling sub-jobs start from the segment's base."""
    plan = driver.plan
    configs = [dict(s) for s in plan.sub_jobs]
    if segment.base is not None:
        for config in configs:
            if config.get("job_type") == "training":
                config["source_checkpoint_info"] = {
                    "checkpoint_id": segment.base.checkpoint_id,
                    "source_job_id": segment.base.source_job_id,
                }
    body: dict[str, Any] = {"sub_job_configs": configs, "job_id": segment.job_id}
    for key in ("experiment_name", "hardware", "idle_timeout_seconds", "pending_timeout_seconds"):
        if getattr(plan, key) is not None:
            body[key] = getattr(plan, key)
    return body
