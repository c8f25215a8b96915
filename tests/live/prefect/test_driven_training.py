"""`drive` trains for suspended flow runs: many in one process, one job each, through kills of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortex_training.publication import PublicationLog
from tests.live.conftest import training_plan

from .conftest import Live, flow_processes, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def steps_of(service: Any, job_id: str) -> list[int]:
    return [entry["global_steps"] for entry in service.execution_log(job_id) if entry["op"] == "step"]


def job_of(root: str) -> str:
    """The one job that a run has created."""
    from cortex_training.publication import PosixStore
    from cortex_training.training.journal import read_journal

    (job,) = {record.body["job_id"] for record in read_journal(PosixStore(root)) if record.type == "segment"}
    return str(job)


def has_begun(root: str) -> bool:
    return Path(root, "journal").is_dir() and any(Path(root, "journal").iterdir())


def test_two_flow_runs_train_in_one_driver_and_their_processes_are_gone(
    live: Live, cortex: Any, tmp_path: Path
) -> None:
    live.drive()
    wait_until(lambda: driver_is_there(), "a driver")
    plans = [training_plan(tmp_path, name, steps=6) for name in ("one", "two")]
    runs = [live.run("trains/live", plan=plan) for plan in plans]
    for run, plan in zip(runs, plans, strict=True):
        live.wait_for_state(run, "Completed")
        assert "Suspended" in live.states(run)
        assert steps_of(cortex, job_of(plan["root"])) == [1, 2, 3, 4, 5, 6]
        entry = PublicationLog(plan["root"]).latest()
        assert entry is not None
        assert entry.step == 6
        wait_until(lambda run=run: not flow_processes(run), "the end of the flow's process")


def driver_is_there() -> bool:
    from prefect_cortex_training.dispatch import run_to_end
    from prefect_cortex_training.handover import a_driver_is_there

    return run_to_end(a_driver_is_there())
