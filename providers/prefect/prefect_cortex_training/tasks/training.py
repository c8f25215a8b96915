"""The durable training run as a task."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import TYPE_CHECKING, Any

from cortex_training.training import TrainingPlan
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.durable import task_pair
from prefect_cortex_training.labels import RunLabels, root_digest, root_labels
from prefect_cortex_training.progress import ProgressReport

if TYPE_CHECKING:
    from cortex_training.training import TrainingResult

STOP_S = 8.0
"""How long a run may take to finish the unit in flight after it was told to stop."""


async def _train(credentials: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Train as `plan` says, in this process, and go on with what an earlier run of it began; returns the result's
    numbers and ids.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        plan: `TrainingPlan.to_dict()`. The run's identity is ``plan["root"]``, so it may have been begun elsewhere.

    What was sent and what came back is in the journal below the root, not in Prefect: a rerun takes no step twice even
    when every stored result is lost. Progress is an artifact of this task, each step a line in its log.
    """
    from cortex_training.training import run

    wanted = TrainingPlan.from_dict(plan)
    wanted.validate()
    labels = RunLabels.of_current_run("train")
    digest = root_digest(wanted.root)
    await labels.write(root_labels(wanted.root, credentials))
    attempt = hashlib.sha256(f"{labels.flow_run_id}|train|{digest}".encode()).hexdigest()[:12]
    async with ProgressReport(labels, f"training-{digest}") as report, connected(credentials) as client:
        stop = asyncio.Event()
        driver = asyncio.create_task(run(wanted, client, report, attempt=attempt, stop=stop))
        result = await _stoppable(driver, stop)
    return result.to_dict()


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


train, atrain = task_pair("train", retries=2)(_train)
