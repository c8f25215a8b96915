"""`drive` trains for suspended flow runs: many in one process, one job each, through kills of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Cancelling

from cortex_training.publication import PosixStore, PublicationLog
from cortex_training.training.journal import read_journal
from tests.live.plans import training_plan

from .conftest import Live, flow_processes, live_jobs, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


def steps_of(service: Any, job_id: str) -> list[int]:
    return [entry["global_steps"] for entry in service.execution_log(job_id) if entry["op"] == "step"]


def job_of(root: str) -> str:
    """The one job that a run has created."""
    (job,) = {record.body["job_id"] for record in read_journal(PosixStore(root)) if record.type == "segment"}
    return str(job)


def has_begun(root: str) -> bool:
    """Whether it has a job."""
    return Path(root, "journal").is_dir() and any(r.type == "segment" for r in read_journal(PosixStore(root)))


def test_two_flow_runs_train_in_drivers_and_their_processes_are_gone(live: Live, cortex: Any, tmp_path: Path) -> None:
    """Two drivers are up, and neither takes a run from the other. A third flow run is cancelled while it trains."""
    live.drive("drive")
    live.drive("drive-2")
    plans = [training_plan(tmp_path, name, steps=6) for name in ("one", "two")]
    endless = training_plan(tmp_path, "endless", steps=5000, save_every_steps=5000)
    runs = [live.run("trains/live", plan=plan) for plan in plans]
    cancelled = live.run("trains/live", plan=endless)
    try:
        for run, plan in zip(runs, plans, strict=True):
            live.wait_for_state(run, "Completed")
            assert "Suspended" in live.states(run)
            wait_until(lambda run=run: not flow_processes(run), "the end of the flow's process")
            assert steps_of(cortex, job_of(plan["root"])) == [1, 2, 3, 4, 5, 6]
            entry = PublicationLog(plan["root"]).latest()
            assert entry is not None
            assert entry.step == 6
            # They may meet at its beginning, and then one of them goes; they never fight over it.
            assert takeovers(plan["root"]) <= 3
        wait_until(lambda: has_begun(endless["root"]), "the training")
        wait_until(lambda: len(steps_of(cortex, job_of(endless["root"]))) > 2, "three steps")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(cancelled, Cancelling())
        wait_until(lambda: job_of(endless["root"]) not in live_jobs(cortex), "the end of the cancelled run's job")
        trained = len(steps_of(cortex, job_of(endless["root"])))
        assert trained < 5000
        assert live.read(cancelled).state_name == "Cancelled"
    finally:
        live.stop("drive-2")


def takeovers(root: str) -> int:
    return sum(record.type == "takeover" for record in read_journal(PosixStore(root)))
