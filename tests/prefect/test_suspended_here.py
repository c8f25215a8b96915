"""Suspensions of deployed flow runs that this process executes: the server is real, and only the worker is not."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from prefect import Flow, flow, suspend_flow_run, task
from prefect.cache_policies import INPUTS, RUN_ID
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.flow_runs import resume_flow_run
from prefect.runtime import flow_run

from demo.prefect_server import PrefectServer
from prefect_cortex_training import create_job, jobs_cancelled_at_end, wait_for_capacity
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.presence import WATCHERS, Presence
from prefect_cortex_training.reconcile import Rules
from prefect_cortex_training.waits import CAPACITY, Wait, wait_of
from prefect_cortex_training.watch import Watcher

from .scripted_service import ScriptedService
from .test_rerun import NOTHING, SUB_JOBS, service

__all__ = ["service"]


def deployed(body: Flow[..., Any], **parameters: Any) -> UUID:
    """A run of a deployment of a flow, which no worker knows of."""
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(body), name="here")
        return client.create_flow_run_from_deployment(deployment, parameters=parameters).id


def read(flow_run_id: UUID) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id)


def executed(body: Flow[..., Any], flow_run_id: UUID) -> Any:
    """What a worker's process does; the flow's result, or None when it was suspended."""
    run = read(flow_run_id)
    try:
        return run_flow(body, flow_run=run, parameters=run.parameters)
    except Pause:
        return None


@pytest.fixture
def watched(on_server: PrefectServer, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that says it is there, and asks the same service."""

    class Block:
        async def aget_client(self, **options: Any) -> ScriptedService:
            return service

    async def load(name: str) -> Block:
        return Block()

    monkeypatch.setattr("prefect_cortex_training.watch._LOOK_S", 200.0)
    monkeypatch.setattr("prefect_cortex_training.watch.load_credentials", load)
    run_to_end(Presence(WATCHERS).tell())


async def look_once() -> None:
    async with Watcher(every_s=0.01, rules=Rules(cancel_on=frozenset())) as watcher:
        await watcher.look()


@flow(persist_result=True, result_serializer="json")
def needs_gpus() -> int:
    return wait_for_capacity("block", 4, hardware="H200", poll_s=0.01)


def test_capacity_is_waited_for_without_a_process_and_again_when_somebody_was_faster(
    service: ScriptedService, watched: None
) -> None:
    full = NOTHING | {"max_total_gpus": 8, "in_use_gpus": 8}
    free = NOTHING | {"max_total_gpus": 8, "available_gpus": 6}
    service.capacities = [full]
    run = deployed(needs_gpus)
    assert executed(needs_gpus, run) is None
    assert read(run).state_name == "Suspended"
    assert wait_of(read(run)) == Wait(CAPACITY, "block", ("H200", "4", "1"))
    run_to_end(look_once())
    assert read(run).state_name == "Suspended"

    service.capacities = [free]
    run_to_end(look_once())
    assert read(run).state_name == "Resuming"
    service.capacities = [full]
    assert executed(needs_gpus, run) is None
    assert read(run).state_name == "Suspended"

    service.capacities = [free]
    run_to_end(look_once())
    assert executed(needs_gpus, run) == 6
    assert read(run).state_name == "Completed"
    assert read(run).run_count == 1


BEATS: list[int] = []
SUSPENDED: list[int] = []


@task(cache_policy=RUN_ID + INPUTS, persist_result=True, result_serializer="json")
def beat(number: int) -> int:
    BEATS.append(number)
    return number


@flow(persist_result=True, result_serializer="json")
def goes_task_by_task(tasks: int) -> str:
    with jobs_cancelled_at_end():
        job_id = create_job("block", SUB_JOBS)
        for number in range(tasks):
            beat(number)
            if number == 2 and not SUSPENDED:
                SUSPENDED.append(number)
                suspend_flow_run(flow_run_id=UUID(str(flow_run.id)))
    return job_id


def test_a_run_that_is_suspended_from_outside_stops_between_two_tasks_and_goes_on_with_its_job(
    service: ScriptedService, on_server: PrefectServer
) -> None:
    BEATS.clear()
    SUSPENDED.clear()
    run = deployed(goes_task_by_task, tasks=6)
    assert executed(goes_task_by_task, run) is None
    assert read(run).state_name == "Suspended"
    assert BEATS == [0, 1, 2]
    (job,) = service.jobs.values()
    assert job["status"] == "running"

    resume_flow_run(run)
    assert executed(goes_task_by_task, run) == job["job_id"]
    assert list(range(6)) == BEATS
    assert len(service.named("create")) == 1
    assert job["status"] == "cancelled"
