"""What a watcher makes of suspended and ended flow runs, on a real server and a service that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import Event, Resource
from prefect.events.clients import PrefectEventsClient
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, Pending, Running, Scheduled, Suspended

from cortex_training.errors import ApiError, AuthError, ServiceError, TransportError
from demo.prefect_server import PrefectServer
from prefect_cortex_training.handover import FAILED, Outcome, outcome_key
from prefect_cortex_training.labels import TAG, RunLabels, labels_of
from prefect_cortex_training.reconcile import Rules, _was_heard
from prefect_cortex_training.waits import CAPACITY, REQUEST, RUNNING, TRAINING, Wait
from prefect_cortex_training.watch import Watcher

from .scripted_service import ScriptedService

JOB = Wait(RUNNING, "block", ("j",))
REQUEST_OF_JOB = Wait(REQUEST, "block", ("j", "r1"))
TRAINED = Wait(TRAINING, "block", ("0123456789ab", "ba9876543210", "1"))


@flow
def waiting() -> None: ...


class ScriptedBlock:
    """Stands where a credentials block does."""

    def __init__(self, service: ScriptedService) -> None:
        self.service = service
        self.clients = 0

    async def aget_client(self, **options: Any) -> ScriptedService:
        self.clients += 1
        return self.service


@pytest.fixture
def service(on_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedService:
    scripted = ScriptedService()
    scripted.block = ScriptedBlock(scripted)  # type: ignore[attr-defined]

    async def load(name: str) -> ScriptedBlock:
        return scripted.block  # type: ignore[attr-defined,no-any-return]

    @asynccontextmanager
    async def connected(name: str) -> AsyncIterator[ScriptedService]:
        yield scripted

    # How long a look may take is for services that hang, not for a machine that has much to do.
    monkeypatch.setattr("prefect_cortex_training.watch._LOOK_S", 200.0)
    monkeypatch.setattr("prefect_cortex_training.watch.load_credentials", load)
    monkeypatch.setattr("prefect_cortex_training.cleanup.connected", connected)
    return scripted


async def a_run(state: State[Any], labels: dict[str, Any] | None = None) -> UUID:
    """A flow run of a deployment, brought into `state`."""
    async with get_client() as client:
        deployment = await client.create_deployment(await client.create_flow(waiting), name="a-test")
        run = await client.create_flow_run_from_deployment(deployment, tags=[TAG])
        await client.set_flow_run_state(run.id, Running(), force=True)
        if labels:
            await RunLabels(run.id).write(labels)
        await client.set_flow_run_state(run.id, state, force=True)
    return run.id


async def suspended(wait: Wait, *, timeout_s: int = 3600, **labels: Any) -> UUID:
    return await a_run(Suspended(timeout_seconds=timeout_s, pause_key=wait.key(1)), labels)


async def read(flow_run_id: UUID) -> FlowRun:
    async with get_client() as client:
        return await client.read_flow_run(flow_run_id)


async def is_resumed(flow_run_id: UUID) -> bool:
    state = (await read(flow_run_id)).state
    assert state is not None
    return (state.type, state.name) == (StateType.SCHEDULED, "Resuming")


def watcher(rules: Rules | None = None) -> Watcher:
    return Watcher(every_s=5.0, rules=rules or Rules(cancel_on=frozenset()))


async def look(rules: Rules | None = None) -> None:
    async with watcher(rules) as one:
        await one.look()


@pytest.mark.parametrize(
    ("status", "over"),
    [
        ("pending", False),
        ("placing", False),
        ("initializing", False),
        ("running", True),
        ("failed", True),
        ("cancelled", True),
        ("a state of the future", False),
    ],
)
async def test_a_run_comes_back_when_its_job_runs_or_never_will(
    service: ScriptedService, status: str, over: bool
) -> None:
    service.jobs["j"] = {"job_id": "j", "status": status}
    run = await suspended(JOB)
    await look()
    assert await is_resumed(run) is over


NO_CAPACITY = dict.fromkeys(("max_total_gpus", "reserved_gpus", "in_use_gpus", "pending_gpus", "available_gpus"), 0)


@pytest.mark.parametrize(
    ("capacity", "over"),
    [
        ({"max_total_gpus": 8, "available_gpus": 3}, False),
        ({"max_total_gpus": 8, "available_gpus": 4}, True),
        ({"max_total_gpus": -1}, True),
        ({"max_total_gpus": 2, "available_gpus": 2}, True),  # it never will, and the flow says so
        ({}, True),  # nobody knows
    ],
)
async def test_a_run_comes_back_when_gpus_are_free_or_waiting_would_have_no_end(
    service: ScriptedService, capacity: dict[str, int], over: bool
) -> None:
    service.capacities = [{"has_reservation": False, **NO_CAPACITY, **capacity}]
    run = await suspended(Wait(CAPACITY, "block", ("H200", "4", "1")))
    await look()
    # Runs of other tests are still waiting.
    assert set(service.named("capacity")) == {("capacity", "H200")}
    assert await is_resumed(run) is over


@pytest.mark.parametrize(
    ("error", "over"),
    [
        (ServiceError(status=503, message="busy"), False),
        (TransportError("reset", sent=True), False),
        (AuthError(status=401, message="expired"), False),
        (RuntimeError("a bug in the client"), False),
        (ApiError(status=409, message="the job has ended"), True),
    ],
)
async def test_a_run_is_left_while_the_service_is_out_of_reach(
    service: ScriptedService, error: Exception, over: bool
) -> None:
    def fail(request_id: str) -> None:
        raise error

    service.results["r1"] = {}
    service.before["status"] = fail
    run = await suspended(REQUEST_OF_JOB)
    async with watcher() as one:
        await one.look()
        assert await is_resumed(run) is over
        if not over:
            service.before.clear()
            await one.look()
            assert await is_resumed(run)
    if isinstance(error, AuthError):
        assert service.block.clients == 2  # type: ignore[attr-defined]


async def test_what_the_service_does_not_know_yet_is_no_answer(service: ScriptedService) -> None:
    run = await suspended(REQUEST_OF_JOB)
    await look()
    assert not await is_resumed(run)


@pytest.mark.parametrize(("looks_per_s", "noticed"), [(2.0, True), (0.01, False)])
async def test_a_few_waits_are_looked_at_in_each_pass_and_many_take_turns(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch, looks_per_s: float, noticed: bool
) -> None:
    """However long they have been waiting: hours of queueing are no reason to notice the end late."""
    monkeypatch.setattr("prefect_cortex_training.watch._LOOKS_PER_S", looks_per_s)
    monkeypatch.setattr("prefect_cortex_training.watch._age_s", lambda run: 36_000.0)
    service.jobs["j"] = {"job_id": "j", "status": "pending"}
    run = await suspended(JOB)
    async with watcher() as one:
        await one.look()
        service.jobs["j"]["status"] = "running"
        await one.look()
    assert await is_resumed(run) is noticed


async def test_a_wait_whose_time_is_over_ends_in_the_flow(service: ScriptedService) -> None:
    """Before Prefect fails the run without asking it, and leaves its job behind."""
    service.jobs["j"] = {"job_id": "j", "status": "pending"}
    over, not_over = await suspended(JOB, timeout_s=50), await suspended(JOB, timeout_s=500)
    await look()
    assert await is_resumed(over)
    assert not await is_resumed(not_over)


async def test_the_slots_of_a_run_are_renewed_until_a_process_does_it(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was resumed may wait for a worker for hours."""
    renewed: list[Any] = []

    async def renew(prefect: Any, lease: Any) -> bool:
        renewed.append(lease)
        return True

    monkeypatch.setattr("prefect_cortex_training.gpu_lease._renewed", renew)
    states = [Suspended(timeout_seconds=3600, pause_key="approval"), Scheduled(name="Resuming"), Pending(), Running()]
    leases = [uuid4() for _ in states]
    for state, lease in zip(states, leases, strict=True):
        await a_run(state, {"lease.training.claim": f"{lease} 1 gpus"})
    await look()
    assert sorted(renewed) == sorted(leases[:3])


async def test_many_runs_and_two_watchers(service: ScriptedService) -> None:
    """On SQLite, which locks: whatever one pass can't do the next one does. Nobody is resumed twice."""
    service.jobs["j"] = {"job_id": "j", "status": "running"}
    runs = [await suspended(JOB) for _ in range(6)]
    async with watcher() as one, watcher() as other:
        for _ in range(3):
            await asyncio.gather(one.look(), other.look())
    assert all([await is_resumed(run) for run in runs])
    async with get_client() as client:
        for run in runs:
            names = [state.name for state in await client.read_flow_run_states(run)]
            assert names.count("Resuming") == 1


async def test_waits_of_others_are_left_alone(service: ScriptedService) -> None:
    run = await a_run(Suspended(timeout_seconds=3600, pause_key="approval"))
    await look()
    assert not await is_resumed(run)


async def test_a_training_that_ended_wakes_its_run(service: ScriptedService) -> None:
    failed = Outcome(FAILED, error="RunFailed", message="look at the data")
    ended = await suspended(TRAINED, **{outcome_key("ba9876543210", 1): failed.to_label()})
    goes_on = await suspended(TRAINED)
    await look()
    assert await is_resumed(ended)
    assert not await is_resumed(goes_on)


async def test_a_run_whose_drivers_are_gone_wakes_to_train_by_itself(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await suspended(TRAINED)
    monkeypatch.setattr("prefect_cortex_training.watch._DRIVER_GONE_S", -1.0)
    await look()
    assert await is_resumed(run)


@pytest.mark.parametrize(
    ("state", "rule", "ends"),
    [
        (Cancelled(), {"cancelled"}, True),
        (Failed(), {"cancelled"}, False),
        (Failed(), {"cancelled", "failed"}, True),
        (Completed(), {"cancelled", "failed", "crashed"}, False),
        (Completed(), {"completed"}, True),
        (Cancelled(), set(), False),
    ],
)
async def test_the_job_of_an_ended_run_is_cancelled_as_the_rules_say(
    service: ScriptedService, state: State[Any], rule: set[str], ends: bool
) -> None:
    """Also where the state was set by force, and no hook ever ran."""
    service.jobs["mine"] = {"job_id": "mine", "status": "running"}
    service.jobs["other"] = {"job_id": "other", "status": "running"}
    run = await a_run(state, {"job.training.0.mine": "block"})
    rules = Rules(cancel_on=frozenset(rule))
    await look(rules)
    assert (service.jobs["mine"]["status"] == "cancelled") is ends
    assert service.jobs["other"]["status"] == "running"
    assert ("reconciled.1" in labels_of(await read(run))) is ends
    cancels = len(service.named("cancel"))
    await look(rules)
    assert len(service.named("cancel")) == cancels, "what is done is done once"


async def test_a_job_of_a_subflow_is_cancelled_with_the_flow_run_around_it(service: ScriptedService) -> None:
    """Which was killed: it is over on the server, and its subflow says for ever that it runs. A run of a deployment
    that it started has an end of its own.
    """
    for job_id in ("mine", "theirs"):
        service.jobs[job_id] = {"job_id": job_id, "status": "running"}
    made: dict[str, UUID] = {}

    @flow
    async def inside(job_id: str) -> None:
        made[job_id] = UUID(str(flow_run.id))
        await RunLabels(made[job_id]).write({f"job.training.0.{job_id}": "block"})

    @flow
    async def around() -> UUID:
        await inside("mine")
        async with get_client() as client:
            deployment = await client.create_deployment(await client.create_flow(waiting), name="a-test")
            parent_task = (await client.read_flow_run(made["mine"])).parent_task_run_id
            started = await client.create_flow_run_from_deployment(deployment, parent_task_run_id=parent_task)
            await client.set_flow_run_state(started.id, Running(), force=True)
        await RunLabels(started.id).write({"job.training.0.theirs": "block"})
        return UUID(str(flow_run.id))

    run = await around()
    async with get_client() as client:
        await client.set_flow_run_state(made["mine"], Running(), force=True)
        await client.set_flow_run_state(run, Cancelled(), force=True)
    await look(Rules())
    assert service.jobs["mine"]["status"] == "cancelled"
    assert service.jobs["theirs"]["status"] == "running"
    assert "reconciled.1" in labels_of(await read(run))


async def test_a_job_that_could_not_be_cancelled_is_cancelled_by_the_next_pass(service: ScriptedService) -> None:
    def fail(job_id: str) -> None:
        if job_id == "stubborn":
            service.before.clear()
            raise ServiceError(status=503, message="busy")

    service.jobs["stubborn"] = {"job_id": "stubborn", "status": "running"}
    await a_run(Cancelled(), {"job.training.0.stubborn": "block"})
    service.before["cancel"] = fail
    async with watcher(Rules()) as one:
        await one.look()
        assert service.jobs["stubborn"]["status"] == "running"
        await one.look()
    assert service.jobs["stubborn"]["status"] == "cancelled"


async def test_only_a_silent_run_that_says_it_runs_is_taken_for_dead(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended run sends no heartbeats either, and is well. Who has just come, or was away, knows of no silence."""
    labels = {"job.training.0.silent": "block"}
    dead, heard = await a_run(Running(), labels), await a_run(Running(), labels)
    stuck, queued = await a_run(Pending(), labels), await a_run(Scheduled(), labels)
    waits, without_jobs = await suspended(JOB, **labels), await a_run(Running())
    service.jobs["j"] = {"job_id": "j", "status": "pending"}

    async def was_heard(prefect: Any, run: FlowRun, since: datetime) -> bool:
        return run.id == heard

    async def states() -> list[StateType | None]:
        return [(await read(run)).state_type for run in (dead, stuck, heard, waits, queued, without_jobs)]

    monkeypatch.setattr("prefect_cortex_training.reconcile._was_heard", was_heard)
    well = [StateType.RUNNING, StateType.PAUSED, StateType.SCHEDULED, StateType.RUNNING]
    alive = [StateType.RUNNING, StateType.PENDING, *well]
    await asyncio.sleep(1.1)
    async with watcher(Rules(cancel_on=frozenset(), crashed_after_s=1.0)) as one:
        await one.look()
        assert await states() == alive
        await asyncio.sleep(1.1)
        one._reconciler.lose_sight()
        await one.look()
        assert await states() == alive
        await asyncio.sleep(1.1)
        await one.look()
        assert await states() == [StateType.CRASHED, StateType.CRASHED, *well]


async def test_a_heartbeat_is_heard(service: ScriptedService) -> None:
    run, other = await a_run(Running()), await a_run(Running())
    resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
    async with PrefectEventsClient() as events:
        await events.emit(Event(event="prefect.flow-run.heartbeat", resource=Resource(resource)))
    since = datetime.now(UTC) - timedelta(hours=1)
    await heard(run)
    async with get_client() as client:
        assert not await _was_heard(client, await read(other), since)


async def heard(flow_run_id: UUID) -> None:
    """Wait until the server has stored the heartbeat."""
    run = await read(flow_run_id)
    async with get_client() as client:
        for _ in range(600):
            if await _was_heard(client, run, datetime.now(UTC) - timedelta(hours=1)):
                return
            await asyncio.sleep(0.1)
    raise AssertionError("the heartbeat was not stored")
