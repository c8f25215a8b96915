"""A flow run that waits for GPUs has no process; it comes back when they are there, and repeats nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from prefect.flow_runs import resume_flow_run, suspend_flow_run

from tests.conftest import ServiceFactory

from .conftest import Live, client_of, flow_processes, live_jobs, save_block, sub_jobs, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


@pytest.fixture
def full_service(live: Live, start_local_service: ServiceFactory) -> Any:
    """A service with one GPU, which somebody else has."""
    service = start_local_service(gpus=1)
    save_block(service)
    return service


def test_the_flow_process_is_gone_while_the_job_queues(live: Live, full_service: Any) -> None:
    with client_of(full_service) as client:
        blocker = client.create_job_from_body({"sub_job_configs": sub_jobs()})["job_id"]
    live.watch()
    said_before = len(live.log("worker").read_text())
    run = live.run("waits-for-the-queue/live", sub_jobs=sub_jobs())
    live.wait_for_state(run, "Suspended")
    wait_until(lambda: not flow_processes(run), "the end of the flow's process")
    (job,) = live.jobs_of(run)

    with client_of(full_service) as client:
        assert client.get_job(job)["status"] != "running"
        client.cancel_job(blocker)
    live.wait_for_state(run, "Completed")

    assert live.jobs_of(run) == [job]
    with client_of(full_service) as client:
        assert {found["job_id"] for found in client.list_jobs()} == {blocker, job}
        assert len(client.list_checkpoints(job)) == 1
    states = live.states(run)
    assert "Resuming" in states
    assert not {"Crashed", "Failed", "AwaitingRetry"} & set(states)
    assert live.read(run).run_count == 1
    said = live.log("worker").read_text()[said_before:]
    assert not re.search(r"Traceback(?:\n|.)*Pause", said), "a suspension is no error"
    assert live_jobs(full_service) == []


def test_a_run_that_waits_for_gpus_of_one_kind_has_no_process_and_no_job(live: Live, full_service: Any) -> None:
    """GPUs of another kind are free all the time, and wake nobody."""
    with client_of(full_service) as client:
        taken = {"sub_job_configs": sub_jobs(), "hardware": "B200"}
        blocker = client.create_job_from_body(taken)["job_id"]
        assert client.get_capacity("H200")["available_gpus"] == 1
    live.watch()
    run = live.run("waits-for-capacity/live", sub_jobs=sub_jobs(), hardware="B200")
    live.wait_for_state(run, "Suspended")
    wait_until(lambda: not flow_processes(run), "the end of the flow's process")
    other = live.run("waits-for-capacity/live", sub_jobs=sub_jobs(), hardware="H200")
    live.wait_for_state(other, "Completed")
    assert live.read(run).state_name == "Suspended"
    assert live.jobs_of(run) == []

    with client_of(full_service) as client:
        client.cancel_job(blocker)
        live.wait_for_state(run, "Completed")
        (job,) = live.jobs_of(run)
        assert client.get_job(job)["hardware"] == "B200"
    assert "Resuming" in live.states(run)
    assert live.read(run).run_count == 1
    assert live_jobs(full_service) == []


def test_lost_results_and_a_lost_job(live: Live, full_service: Any) -> None:
    """Stored results that are gone when the flow comes back repeat nothing. A job that somebody cancelled while its
    flow run was suspended fails that run, with the service's reason, and no other job is created: also without results.
    """
    with client_of(full_service) as client:
        blocker = client.create_job_from_body({"sub_job_configs": sub_jobs()})["job_id"]
    live.watch()
    forgets = live.run("waits-for-the-queue/live", sub_jobs=sub_jobs())
    loses = live.run("awaits-the-queue/live", sub_jobs=sub_jobs())
    for run in (forgets, loses):
        live.wait_for_state(run, "Suspended")
        wait_until(lambda run=run: not flow_processes(run), "the end of the flow's process")
    shutil.rmtree(live.folder / "results", ignore_errors=True)
    (job,), (lost,) = live.jobs_of(forgets), live.jobs_of(loses)

    with client_of(full_service) as client:
        client.cancel_job(lost)
        live.wait_for_state(loses, "Failed")
        state = live.read(loses).state
        assert state is not None
        assert "cancelled" in str(state.message)
        client.cancel_job(blocker)
        live.wait_for_state(forgets, "Completed")
        assert {found["job_id"] for found in client.list_jobs()} == {blocker, job, lost}
        assert len(client.list_checkpoints(job)) == 1
    for run in (forgets, loses):
        # One start for the wait for the job, at most one for that for the save: never in circles.
        assert live.states(run).count("Suspended") <= 2


def test_a_run_that_somebody_suspends_stops_between_two_tasks_and_goes_on_with_its_job(
    live: Live, cortex: Any, tmp_path: Path
) -> None:
    """Suspended from outside, and resumed at once when its process is gone: no task runs twice, and no job is lost."""
    file, tasks = tmp_path / "lines", 60
    run = live.run("goes-task-by-task/live", sub_jobs=sub_jobs(), file=str(file), tasks=tasks)
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= 3, "three tasks")
    suspend_flow_run(flow_run_id=run)
    wait_until(lambda: not flow_processes(run), "the end of the flow's process")
    assert live.read(run).state_name == "Suspended"
    assert len(file.read_text().splitlines()) < tasks
    (job,) = live.jobs_of(run)
    assert job in live_jobs(cortex)

    resume_flow_run(run)
    live.wait_for_state(run, "Completed")
    assert [int(line) for line in file.read_text().splitlines()] == list(range(tasks))
    assert live.jobs_of(run) == [job]
    assert job not in live_jobs(cortex)
