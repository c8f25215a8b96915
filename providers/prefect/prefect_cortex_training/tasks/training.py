"""The durable training run as a task, and who trains while the task's flow run is suspended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from cortex_training.errors import ConfigurationError
from cortex_training.training import RunFailed, TrainingPlan
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.durable import require_plain, task_pair
from prefect_cortex_training.gpu_lease import hold_gpus, release_gpus
from prefect_cortex_training.handover import (
    DONE,
    LEFT,
    Outcome,
    attempt_of,
    find_outcome,
    leave_plan,
    nonce_of,
    outcome_key,
    training_id,
)
from prefect_cortex_training.labels import RunLabels, root_digest, root_labels
from prefect_cortex_training.lineage import files_asset, record_made, remember_source
from prefect_cortex_training.presence import DRIVERS, somebody_is_there
from prefect_cortex_training.progress import ProgressReport
from prefect_cortex_training.results import show_results
from prefect_cortex_training.waiting import can_suspend, suspend
from prefect_cortex_training.waits import TRAINING, Wait

if TYPE_CHECKING:
    from cortex_training.training import TrainingResult

STOP_S = 8.0
"""How long a run may take to finish the unit in flight after it was told to stop."""


async def _train(credentials: str, plan: dict[str, Any], *, gpu_limit: str | None = None) -> dict[str, Any]:
    """Train as `plan` says, in this process, and go on with what an earlier run of it began; returns the result's
    numbers and ids. What a driver trained while the flow run was suspended is only picked up.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        plan: `TrainingPlan.to_dict()`. The run's identity is ``plan["root"]``, so it may have been begun elsewhere.
        gpu_limit: as in `atrain`.

    What was sent and what came back is in the journal below the root, not in Prefect: a rerun takes no step twice even
    when every stored result is lost. Progress is an artifact of this task, each step a line in its log; in the end the
    steps are a table and the losses a picture.
    """
    wanted = _checked(plan)
    labels = RunLabels.of_current_run("train")
    training, run_count = training_id(wanted), await labels.run_count()
    outcome = find_outcome(await labels.read(), training, run_count)
    try:
        result = outcome.result_or_raise() if outcome is not None else None
        if result is None:
            await _hold_gpus(labels, wanted, gpu_limit)
            result = await _train_to_the_end(credentials, wanted, labels)
            await labels.write({outcome_key(training, run_count): Outcome(DONE, result).to_label()})
    except (RunFailed, ConfigurationError):
        # These ends leave no job of the run alive. After any other the next try goes on with it, and with its GPUs.
        await release_gpus(labels, root_digest(wanted.root))
        raise
    await release_gpus(labels, root_digest(wanted.root))
    await show_results(labels, wanted.root, wanted.credentials, result, get_run_logger())
    await _record(labels, wanted, result)
    return result


async def _train_to_the_end(credentials: str, wanted: TrainingPlan, labels: RunLabels) -> dict[str, Any]:
    from cortex_training.training import run

    await labels.write(root_labels(wanted.root, credentials, wanted.credentials))
    logger = get_run_logger()
    report = ProgressReport(labels, wanted.root, logger)
    async with report, connected(credentials) as client:
        stop = asyncio.Event()
        attempt = attempt_of(labels.flow_run_id, wanted.root)
        driver = asyncio.create_task(run(wanted, client, report, attempt=attempt, stop=stop))
        return (await _stoppable(driver, stop)).to_dict()


async def _hold_gpus(labels: RunLabels, plan: TrainingPlan, gpu_limit: str | None) -> None:
    if gpu_limit is None:
        return
    if plan.job_id is not None:
        raise ConfigurationError.of(
            "gpu_limit", gpu_limit, "the plan names a job that exists: give the limit to create_job, which asks first"
        )
    await hold_gpus(labels, root_digest(plan.root), gpu_limit, plan.gpus, get_run_logger())


async def _record(labels: RunLabels, plan: TrainingPlan, result: Mapping[str, Any]) -> None:
    """The dataset -> the root of the run, if anything was published there."""
    made = files_asset(plan.root)
    await remember_source(labels, str(result["job_id"]), made)
    if result.get("entry") is not None:
        kept = ("entry", "checkpoint_id", "job_id", "steps", "first_loss", "last_loss")
        dataset = files_asset(plan.dataset.removesuffix("/manifest.json"))
        await record_made(labels, made, [dataset], {name: result.get(name) for name in kept})


async def _stoppable(driver: asyncio.Task[TrainingResult], stop: asyncio.Event) -> TrainingResult:
    """Wait for the driver. When this task is cancelled, the driver ends between two units and says in the journal that
    it has.
    """
    try:
        return await asyncio.shield(driver)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(driver, STOP_S)
        raise


train_here, atrain_here = task_pair("train", retries=2)(_train)
"""The task by itself: it trains in its own process. `train` is what flows call."""


async def atrain(credentials: str, plan: Mapping[str, Any], *, gpu_limit: str | None = None) -> dict[str, Any]:
    """Train as `plan` says and go on with what an earlier run of it began; returns the result's numbers and ids.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        plan: `TrainingPlan.to_dict()`. The run's identity is ``plan["root"]``, so it may have been begun elsewhere.
        gpu_limit: name of a global concurrency limit of the Prefect server, whose slots are GPUs, for a plan that
            creates its own job. It begins once as many are free as the sub-jobs use, and holds them to its end.

    Where a ``prefect-cortex-training drive`` is up and the flow run can be suspended, it is suspended while the driver
    trains; its process ends and comes back with the result. Otherwise the training runs in this process. Either way
    the result is recorded as the task ``train``. Raises RunFailed when going on needs a person, ConfigurationError
    for a plan that can't be trained.
    """
    await _let_a_driver_train(credentials, dict(plan), gpu_limit)
    return await atrain_here(credentials, dict(plan), gpu_limit=gpu_limit)


def train(credentials: str, plan: Mapping[str, Any], *, gpu_limit: str | None = None) -> dict[str, Any]:
    """As `atrain`, for flows that block."""
    run_to_end(_let_a_driver_train(credentials, dict(plan), gpu_limit))
    return train_here(credentials, dict(plan), gpu_limit=gpu_limit)


async def _let_a_driver_train(credentials: str, plan: dict[str, Any], gpu_limit: str | None) -> None:
    """Suspend the flow run until a driver has trained; returns at once when one has, or none can."""
    require_plain("train", {"credentials": credentials, "plan": plan})
    wanted = _checked(plan)
    if not can_suspend():
        return
    labels = RunLabels.of_current_run("train")
    training, run_count = training_id(wanted), await labels.run_count()
    wait = Wait(TRAINING, credentials, (root_digest(wanted.root), training, str(run_count)))
    keys = wait.keys()
    while (outcome := find_outcome(await labels.read(), training, run_count)) is None:
        if not await somebody_is_there(DRIVERS):
            get_run_logger().info(
                "no `prefect-cortex-training drive` is up: the training runs in this process, which stays for as long"
            )
            return
        await _hold_gpus(labels, wanted, gpu_limit)
        await labels.write(root_labels(wanted.root, credentials, wanted.credentials))
        nonce = await nonce_of(labels, training, run_count)
        await asyncio.to_thread(leave_plan, wanted, attempt_of(labels.flow_run_id, wanted.root), nonce)
        await suspend(keys, timeout_s=None)
    if outcome.status == LEFT:
        get_run_logger().warning("no driver trains this; it is trained in this process: %s", outcome.message)


def _checked(plan: dict[str, Any]) -> TrainingPlan:
    wanted = TrainingPlan.from_dict(plan)
    wanted.validate()
    return wanted
