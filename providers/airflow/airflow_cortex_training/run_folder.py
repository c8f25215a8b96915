"""A training run's root as tasks and triggers share it: the plan is handed over in it, and a run is ended through it.

Worker and triggerer are different machines. When the root is a path that only one of them sees, the triggerer would
start a second, empty run beside the real one; so it must first read back what the worker has just written.
"""

from __future__ import annotations

import asyncio
import json
import os
import time

from airflow_cortex_training import roots
from airflow_cortex_training.connection import ConnectionSettings
from cortex_training.errors import ConfigurationError, CortexTrainingError
from cortex_training.publication import RootError
from cortex_training.training import TrainingPlan, other_driver, status
from cortex_training.training.journal import Record, read_journal
from cortex_training.training.root import RUN_FILE, is_bucket, open_root, read_identity
from cortex_training.training.state import replay
from cortex_training.training.teardown import ENDED

PLAN_FILE = "plan.json"

SILENT_S = 3600.0
"""A driver whose job runs writes at least one record in so long, unless one request takes longer."""

_VERSION = 1


class RootNotVisible(ConfigurationError):
    """The root that a worker prepared can't be read here."""


class PlanOfAnotherRelease(CortexTrainingError):
    """The worker checked its plan, and this process does not understand it: the two run different releases.

    No `ConfigurationError`, after which the run's jobs are cancelled: once both run the same release, the run goes on.
    """


class DrivenByAnother(CortexTrainingError):
    """Somebody else has driven the run since and ends its jobs: ending it would cost them a healthy run."""


class PlanReplaced(Exception):
    """Another try of the task has written its own plan since: this trigger's run is not wanted any more."""


def check_inputs(plan: TrainingPlan) -> None:
    """Look for what the plan names where this process sees it: its data, and what an earlier driver left in its root.

    Raises `ConfigurationError` naming the file; a folder that is not there yet is made.
    """
    from cortex_training.datasets import Dataset

    # Sizes only: whoever drives the run reads every byte.
    Dataset.open(plan.dataset, verify=False)
    store = open_root(plan.root, plan.credentials)
    if store.exists(RUN_FILE):
        read_identity(store)


def write_plan(plan: TrainingPlan, attempt: str, nonce: str) -> None:
    """Put the plan of this try into ``<root>/exec/<attempt>/plan.json``, durable on return.

    Raises `ConfigurationError` when the root can't be made or written.
    """
    store = open_root(plan.root, plan.credentials)
    document = {"v": _VERSION, "nonce": nonce, "plan": plan.to_dict()}
    store.write(_name(attempt), json.dumps(document, sort_keys=True, indent=1).encode())


def read_plan(root: str, attempt: str, nonce: str, credentials: str | None = None) -> TrainingPlan:
    """The plan that the worker left. Raises `RootNotVisible`, `PlanReplaced` or `PlanOfAnotherRelease`, and for a
    bucket what its store raises.

    `credentials`, here and below, is the plan's: a list ``kind:location,…`` for roots in a bucket.
    """
    found, plan = _written_plan(root, attempt, credentials)
    if found != nonce:
        raise PlanReplaced(f"{root}/{_name(attempt)} belongs to another try of the task")
    return plan


def _written_plan(root: str, attempt: str, credentials: str | None) -> tuple[str, TrainingPlan]:
    """The nonce and the plan of the latest try. Raises `RootNotVisible` or `PlanOfAnotherRelease`."""
    try:
        document = json.loads(roots.open_root(root, credentials).read(_name(attempt)))
        nonce, plan = document["nonce"], document["plan"]
    except (OSError, RootError, ValueError, KeyError, TypeError) as error:
        raise RootNotVisible(
            f"root {root} not visible from the triggerer ({type(error).__name__} at {root}/{_name(attempt)}): use a "
            "shared path or s3:// that workers and triggerers see under the same name, or deferrable=False",
            field="plan.root",
        ) from error
    try:
        return nonce, TrainingPlan.from_dict(plan)
    except ConfigurationError as error:
        raise PlanOfAnotherRelease(
            f"the plan in {root}/{_name(attempt)} was written by another release than the triggerer's ({error.field}): "
            "install the worker's release of cortex-training-client where triggerers run, restart them, then retry "
            "the task"
        ) from error


def was_begun(root: str) -> bool:
    """Whether a run may have left anything in `root`; of a bucket only its store can tell.

    Raises `ConfigurationError` when not even the folder around it is there: that is a file system which is not mounted,
    and its run may well have jobs.
    """
    if is_bucket(root):
        return True
    parent = os.path.dirname(os.path.abspath(root))
    if not os.path.isdir(parent):
        raise ConfigurationError.of("root", root, f"its folder {parent} does not exist here; mount it, then try again")
    return os.path.isdir(os.path.join(root, "journal"))


def is_over(plan: TrainingPlan) -> bool:
    """Whether the run in the plan's root has trained all steps of the plan, or diverged for good: going on would do
    nothing. One that used up its budget is not over: a larger one goes on.
    """
    try:
        state = status(plan.root, plan.credentials).state
    except (FileNotFoundError, RootError):
        return False
    if state.diverged is not None:
        return plan.divergence.action != "rollback" or state.rollbacks >= plan.divergence.max_rollbacks
    return state.finished_steps > 0 and state.finished_steps >= _steps(plan)


def _steps(plan: TrainingPlan) -> int:
    """How many steps the plan asks for; what is given in passes only the data can tell."""
    if plan.passes is None:
        return plan.steps
    from cortex_training.datasets import Dataset

    batches = Dataset.open(plan.dataset, verify=False).batches(
        plan.micro_batch_size, plan.micro_batches_per_step, plan.seed
    )
    return plan.with_steps(batches.steps_per_pass).steps


def is_let_go(root: str, attempt: str, credentials: str | None = None) -> bool:
    """Whether the run at `root` waits for a driver: the last one released it, or has been silent for very long."""
    records = read_journal(roots.open_root(root, credentials))
    if not records or records[-1].body.get("info") == ENDED:
        return False
    if records[-1].type == "released":
        return True
    return time.time() - records[-1].at > _longest_silence_s(records, root, attempt, credentials)


def _longest_silence_s(records: list[Record], root: str, attempt: str, credentials: str | None) -> float:
    """A segment without operations waits for its GPUs, and writes nothing until it has them."""
    segment = replay(records).current
    if segment is not None and segment.operations:
        return SILENT_S
    try:
        return SILENT_S + _written_plan(root, attempt, credentials)[1].running_timeout_s
    except (ConfigurationError, PlanOfAnotherRelease):
        # Whoever takes over needs the plan too, and says what is wrong with it.
        return SILENT_S


def was_ended(root: str, credentials: str | None = None) -> bool:
    """Whether the run at `root` was taken from its driver for good: by a teardown, a kill, a person."""
    records = read_journal(roots.open_root(root, credentials))
    return bool(records) and records[-1].body.get("info") == ENDED


def may_hold_jobs(root: str, attempt: str, credentials: str | None = None) -> bool:
    """Whether the task instance of this `attempt` was the last to drive the run at `root`, and its job may be alive.

    A root that can't be read just now may well hold such a run.
    """
    try:
        state = status(root, credentials).state
        return state.current is not None and other_driver(root, attempt, credentials) is None
    except FileNotFoundError:
        return False
    except (RootError, OSError):
        return True


def end_run(settings: ConnectionSettings, root: str, credentials: str | None = None, attempt: str = "") -> list[str]:
    """Cancel every job in the journal of the run at `root`, and see to it that nobody creates another one.

    With `attempt`, only if the task instance of that attempt was the last to drive it; raises `DrivenByAnother`
    otherwise. Returns the jobs that were alive. A run that was never begun has none. Blocks, in an event loop of its
    own.
    """
    if not was_begun(root):
        return []
    if attempt:
        other = _other_driver(root, attempt, credentials)
        if other is not None:
            raise DrivenByAnother(f"{root} was last driven by {other}, not by this task")
    return asyncio.run(_end_run(settings, root, credentials))


def _other_driver(root: str, attempt: str, credentials: str | None) -> str | None:
    try:
        return other_driver(root, attempt, credentials)
    except RootError:
        # Ending the run says what is wrong with its root, or finds that no run was begun in it.
        return None


async def _end_run(settings: ConnectionSettings, root: str, credentials: str | None) -> list[str]:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.training import end_run as end

    async with AsyncCortexTrainingClient(**settings.client_arguments()) as client:
        return await end(root, client, credentials)


def next_folder(root: str, credentials: str | None = None) -> str:
    """``<root>-r2``, ``-r3``, ...: the first in which no run was begun."""
    number = 2
    while _has_run(f"{root.rstrip('/')}-r{number}", credentials):
        number += 1
    return f"{root.rstrip('/')}-r{number}"


def _has_run(root: str, credentials: str | None) -> bool:
    try:
        return roots.open_root(root, credentials).exists(RUN_FILE)
    except RootError:
        return False


def _name(attempt: str) -> str:
    return f"exec/{attempt}/{PLAN_FILE}"
