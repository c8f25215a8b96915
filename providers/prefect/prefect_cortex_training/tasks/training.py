"""The durable training run as a task, and who trains while the task's flow run is suspended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from cortex_training.training import TrainingPlan
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.durable import require_plain, task_pair
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
from prefect_cortex_training.presence import DRIVERS, somebody_is_there
from prefect_cortex_training.progress import ProgressReport
from prefect_cortex_training.waiting import can_suspend, suspend
from prefect_cortex_training.waits import TRAINING, Wait

if TYPE_CHECKING:
    from cortex_training.training import TrainingResult

STOP_S = 8.0
"""How long a run may take to finish the unit in flight after it was told to stop."""


async def _train(credentials: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Train as `plan` says, in this process, and go on with what an earlier run of it began; returns the result's
    numbers and ids. What a driver trained while the flow run was suspended is only picked up.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        plan: `TrainingPlan.to_dict()`. The run's identity is ``plan["root"]``, so it may have been begun elsewhere.

    What was sent and what came back is in the journal below the root, not in Prefect: a rerun takes no step twice even
    when every stored result is lost. Progress is an artifact of this task, each step a line in its log.
    """
    from cortex_training.training import run

    wanted = _checked(plan)
    labels = RunLabels.of_current_run("train")
    training, run_count = training_id(wanted), await labels.run_count()
    outcome = find_outcome(await labels.read(), training, run_count)
    result = outcome.result_or_raise() if outcome is not None else None
    if result is not None:
        return result
    await labels.write(root_labels(wanted.root, credentials))
    logger = get_run_logger()
    report = ProgressReport(labels, f"training-{root_digest(wanted.root)}", logger)
    async with report, connected(credentials) as client:
        stop = asyncio.Event()
        attempt = attempt_of(labels.flow_run_id, wanted.root)
        driver = asyncio.create_task(run(wanted, client, report, attempt=attempt, stop=stop))
        trained = (await _stoppable(driver, stop)).to_dict()
    await labels.write({outcome_key(training, run_count): Outcome(DONE, trained).to_label()})
    return trained


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


async def atrain(credentials: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Train as `plan` says and go on with what an earlier run of it began; returns the result's numbers and ids.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        plan: `TrainingPlan.to_dict()`. The run's identity is ``plan["root"]``, so it may have been begun elsewhere.

    Where a ``prefect-cortex-training drive`` is up and the flow run can be suspended, it is suspended while the driver
    trains; its process ends and comes back with the result. Otherwise the training runs in this process. Either way
    the result is recorded as the task ``train``. Raises RunFailed when going on needs a person, ConfigurationError
    for a plan that can't be trained.
    """
    await _let_a_driver_train(credentials, dict(plan))
    return await atrain_here(credentials, dict(plan))


def train(credentials: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """As `atrain`, for flows that block."""
    run_to_end(_let_a_driver_train(credentials, dict(plan)))
    return train_here(credentials, dict(plan))


async def _let_a_driver_train(credentials: str, plan: dict[str, Any]) -> None:
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
        await labels.write(root_labels(wanted.root, credentials))
        nonce = await nonce_of(labels, training, run_count)
        await asyncio.to_thread(leave_plan, wanted, attempt_of(labels.flow_run_id, wanted.root), nonce)
        await suspend(keys, timeout_s=None)
    if outcome.status == LEFT:
        get_run_logger().warning("no driver trains this; it is trained in this process: %s", outcome.message)


def _checked(plan: dict[str, Any]) -> TrainingPlan:
    wanted = TrainingPlan.from_dict(plan)
    wanted.validate()
    return wanted
