"""However a flow run ends, no job of it lives on: row by row, with processes killed for real."""

from __future__ import annotations

import signal
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling, Pending

from cortex_training.states import is_terminal_job

from .conftest import HERE, REPOSITORY, Live, client_of, live_jobs, send_to_flow, sub_jobs, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

CRASHED_AFTER_S = 75


def cancel(flow_run_id: UUID) -> None:
    """What the Cancel button does."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Cancelling())


def is_alive(service: Any, job_id: str) -> bool:
    with client_of(service) as client:
        return not is_terminal_job(client.get_job(job_id)["status"])


def with_job(live: Live, service: Any, flow_run_id: UUID) -> str:
    """The job of a flow run, once the service has it."""
    wait_until(lambda: len(live.jobs_of(flow_run_id)) == 1, f"a job of {flow_run_id}")
    (job_id,) = live.jobs_of(flow_run_id)
    with client_of(service) as client:
        wait_until(lambda: job_id in {job["job_id"] for job in client.list_jobs()}, f"job {job_id}")
    return job_id


def test_every_end_of_a_flow_run_leaves_no_job(live: Live, cortex: Any) -> None:
    live.start("runner", str(HERE / "serve_holds_a_job.py"))
    wait_until(lambda: is_deployed("holds-a-job/served"), "the served flow")
    runs = {
        "cancelled while running": live.run("holds-a-job/live", sub_jobs=sub_jobs()),
        "flow killed": live.run("holds-a-job/live", sub_jobs=sub_jobs()),
        "flow and runner killed": live.run("holds-a-job/served", sub_jobs=sub_jobs()),
        "cancelled while suspended": live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=3600),
        "suspended for too long": live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=5),
        "its worker died as it came back": live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=3600),
        "told to terminate": live.run("holds-a-job/live", sub_jobs=sub_jobs()),
    }
    suspended = live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=3600)
    kept = with_job(live, cortex, suspended)
    jobs = {end: with_job(live, cortex, run) for end, run in runs.items()}

    cancel(runs["cancelled while running"])
    send_to_flow(runs["flow killed"], signal.SIGKILL)
    send_to_flow(runs["told to terminate"], signal.SIGTERM)
    live.kill_all("runner")
    live.wait_for_state(runs["cancelled while suspended"], "Suspended")
    cancel(runs["cancelled while suspended"])
    live.wait_for_state(runs["cancelled while running"], "Cancelled")
    live.wait_for_state(runs["cancelled while suspended"], "Cancelled")
    for end in ("flow killed", "told to terminate"):
        live.wait_for_state(runs[end], "Crashed")
    live.wait_for_state(runs["its worker died as it came back"], "Suspended")
    with get_client(sync_client=True) as client:
        # What a worker that dies between taking a run up and starting its process leaves.
        client.set_flow_run_state(runs["its worker died as it came back"], Pending(), force=True)
    live.wait_for_state(runs["suspended for too long"], "Failed")
    assert live.read(runs["flow and runner killed"]).state_type == StateType.RUNNING

    # The hooks, which run in the worker.
    for end in ("cancelled while running", "flow killed", "told to terminate"):
        wait_until(lambda end=end: not is_alive(cortex, jobs[end]), f"the end of the job that was {end}")
    # Nobody runs a hook for these; an owner that can't see them would pay for them until they idle out.
    silent = ("flow and runner killed", "its worker died as it came back")
    unseen = ("cancelled while suspended", "suspended for too long", *silent)
    assert [end for end in unseen if is_alive(cortex, jobs[end])] == list(unseen)

    live.watch("watch", "--cancel-on", "cancelled,failed,crashed", "--crashed-after", str(CRASHED_AFTER_S))
    for end in unseen:
        wait_until(lambda end=end: not is_alive(cortex, jobs[end]), f"the end of the job that was {end}")
    for end in silent:
        assert live.read(runs[end]).state_type == StateType.CRASHED
    assert live.read(suspended).state_name == "Suspended", "silence is no death of a run that is suspended"
    assert live_jobs(cortex) == [kept]
    cancel(suspended)
    wait_until(lambda: live_jobs(cortex) == [], "the end of the last job")
    wait_until(lambda: all(is_reconciled(live, runs[end]) for end in unseen), "the notes that all of it is done")


def test_by_default_only_a_cancelled_run_loses_its_job(live: Live, cortex: Any) -> None:
    """A run that failed may be retried, and goes on with the job that is there. Two watchers change nothing."""
    failed = live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=1)
    cancelled = live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=3600)
    kept, ended = with_job(live, cortex, failed), with_job(live, cortex, cancelled)
    live.wait_for_state(failed, "Failed")
    live.wait_for_state(cancelled, "Suspended")
    live.watch("watch")
    live.watch("watch-2")
    try:
        cancel(cancelled)
        wait_until(lambda: not is_alive(cortex, ended), "the end of the cancelled run's job")
        assert is_alive(cortex, kept)
    finally:
        live.stop("watch-2")
        with client_of(cortex) as client:
            client.cancel_job(kept)


def test_a_flow_run_that_another_one_started_has_an_end_of_its_own(live: Live, cortex: Any) -> None:
    """Cancelling a parent cancels its job. Its child's job lives exactly as long as the child does."""
    parent = live.run("starts-another/live", sub_jobs=sub_jobs())
    of_parent = with_job(live, cortex, parent)
    wait_until(lambda: len(children_of(parent)) == 1, "the child")
    (child,) = children_of(parent)
    of_child = with_job(live, cortex, child)
    cancel(parent)
    live.wait_for_state(parent, "Cancelled")
    wait_until(lambda: not is_alive(cortex, of_parent), "the end of the parent's job")
    assert live.read(child).state_type == StateType.RUNNING
    assert is_alive(cortex, of_child)
    cancel(child)
    wait_until(lambda: not is_alive(cortex, of_child), "the end of the child's job")


def children_of(flow_run_id: UUID) -> list[UUID]:
    """Flow runs that a flow run has started."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
        )
    return [run.id for run in found]


def test_an_automation_does_it_too(live: Live, cortex: Any) -> None:
    live.start("automation", str(REPOSITORY / "flows" / "cancel_jobs_of_ended_runs.py"))
    try:
        wait_until(has_automation, "the automation")
        failed = live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=1)
        cancelled = live.run("asks-a-person/live", sub_jobs=sub_jobs(), timeout_s=3600)
        jobs = [with_job(live, cortex, run) for run in (failed, cancelled)]
        live.wait_for_state(cancelled, "Suspended")
        cancel(cancelled)
        for job_id in jobs:
            wait_until(lambda job_id=job_id: not is_alive(cortex, job_id), "the end of the job")
    finally:
        live.stop("automation")
        with get_client(sync_client=True) as client:
            for found in client.read_automations_by_name("cancel-jobs-of-ended-runs"):
                client.delete_automation(found.id)


def is_deployed(name: str) -> bool:
    with get_client(sync_client=True) as client:
        return any(f"{deployment.name}" == name.split("/")[1] for deployment in client.read_deployments())


def has_automation() -> bool:
    with get_client(sync_client=True) as client:
        return bool(client.read_automations_by_name("cancel-jobs-of-ended-runs"))


def is_reconciled(live: Live, flow_run_id: UUID) -> bool:
    from prefect_cortex_training.labels import labels_of

    return any(key.startswith("reconciled.") for key in labels_of(live.read(flow_run_id)))
