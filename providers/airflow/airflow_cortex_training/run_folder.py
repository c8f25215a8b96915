"""A training run's root as tasks and triggers share it: the plan is handed over in it, and a run is ended through it.

Worker and triggerer are different machines. When the root is a path that only one of them sees, the triggerer would
start a second, empty run beside the real one; so it must first read back what the worker has just written.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from airflow_cortex_training.connection import ConnectionSettings
from cortex_training.errors import ConfigurationError
from cortex_training.publication import PosixStore
from cortex_training.training import TrainingPlan, status
from cortex_training.training.journal import Record, read_journal
from cortex_training.training.state import replay
from cortex_training.training.teardown import ENDED

PLAN_FILE = "plan.json"

SILENT_S = 3600.0
"""A driver whose job runs writes at least one record in so long, unless one request takes longer."""

_VERSION = 1


class RootNotVisible(ConfigurationError):
    """The root that a worker prepared can't be read here."""


class PlanReplaced(Exception):
    """Another try of the task has written its own plan since: this trigger's run is not wanted any more."""


def write_plan(plan: TrainingPlan, attempt: str, nonce: str) -> None:
    """Put the plan of this try into ``<root>/exec/<attempt>/plan.json``, durable on return.

    Raises `ConfigurationError` when the root can't be made or written.
    """
    from cortex_training.training.root import open_root

    store = open_root(plan.root)
    document = {"v": _VERSION, "nonce": nonce, "plan": plan.to_dict()}
    store.write(_name(attempt), json.dumps(document, sort_keys=True, indent=1).encode())


def read_plan(root: str, attempt: str, nonce: str) -> TrainingPlan:
    """The plan that the worker left. Raises `RootNotVisible` or `PlanReplaced`."""
    found, plan = _written_plan(root, attempt)
    if found != nonce:
        raise PlanReplaced(f"{root}/{_name(attempt)} belongs to another try of the task")
    return plan


def _written_plan(root: str, attempt: str) -> tuple[str, TrainingPlan]:
    """The nonce and the plan of the latest try. Raises `RootNotVisible`."""
    path = Path(root) / _name(attempt)
    try:
        document = json.loads(path.read_bytes())
        nonce, plan = document["nonce"], document["plan"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RootNotVisible(
            f"root {root} not visible from the triggerer ({type(error).__name__} at {path}): use a shared path or s3://"
            " that workers and triggerers see under the same name, or deferrable=False",
            field="plan.root",
        ) from error
    return nonce, TrainingPlan.from_dict(plan)


def was_begun(root: str) -> bool:
    """Whether a run has left anything in `root`.

    Raises `ConfigurationError` when not even the folder around it is there: that is a file system which is not mounted,
    and its run may well have jobs.
    """
    parent = os.path.dirname(os.path.abspath(root))
    if not os.path.isdir(parent):
        raise ConfigurationError.of("root", root, f"its folder {parent} does not exist here; mount it, then try again")
    return os.path.isdir(os.path.join(root, "journal"))


def is_over(root: str, steps: int) -> bool:
    """Whether the run at `root` has trained all `steps`, or diverged: going on would do nothing."""
    try:
        state = status(root).state
    except FileNotFoundError:
        return False
    return state.finished_steps >= steps or bool(state.diverged)


def is_let_go(root: str, attempt: str) -> bool:
    """Whether the run at `root` waits for a driver: the last one released it, or has been silent for very long."""
    records = read_journal(PosixStore(root))
    if not records or records[-1].body.get("info") == ENDED:
        return False
    return records[-1].type == "released" or time.time() - records[-1].at > _longest_silence_s(records, root, attempt)


def _longest_silence_s(records: list[Record], root: str, attempt: str) -> float:
    """A segment without operations waits for its GPUs, and writes nothing until it has them."""
    segment = replay(records).current
    if segment is not None and segment.operations:
        return SILENT_S
    try:
        return SILENT_S + _written_plan(root, attempt)[1].running_timeout_s
    except ConfigurationError:
        # Whoever takes over needs the plan too, and says what is wrong with it.
        return SILENT_S


def end_run(settings: ConnectionSettings, root: str) -> list[str]:
    """Cancel every job in the journal of the run at `root`, and see to it that nobody creates another one.

    Returns the jobs that were alive. A run that was never begun has none. Blocks, in an event loop of its own.
    """
    return asyncio.run(_end_run(settings, root)) if was_begun(root) else []


async def _end_run(settings: ConnectionSettings, root: str) -> list[str]:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.training import end_run as end

    async with AsyncCortexTrainingClient(**settings.client_arguments()) as client:
        return await end(root, client)


def next_folder(root: str) -> str:
    """``<root>-r2``, ``-r3``, ...: the first in which no run was begun."""
    number = 2
    while os.path.exists(os.path.join(f"{root}-r{number}", "run.json")):
        number += 1
    return f"{root}-r{number}"


def _name(attempt: str) -> str:
    return f"exec/{attempt}/{PLAN_FILE}"
