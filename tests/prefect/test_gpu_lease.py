"""GPU slots that a flow run holds on the Prefect server: for as long as its jobs live, and no longer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.exceptions import Pause
from prefect.runtime import flow_run

from cortex_training.errors import ConfigurationError
from demo.prefect_server import PrefectServer
from prefect_cortex_training import cancel_job, create_job, gpu_lease, jobs_cancelled_at_end, train
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.gpu_lease import LeaseRenewer, hold_gpus, release_gpus
from prefect_cortex_training.labels import RunLabels

from .scripted_service import ScriptedService
from .test_rerun import in_a_flow, service

__all__ = ["service"]

LOGGER = logging.getLogger("a-test")


def sub_jobs(gpus: int) -> list[dict[str, Any]]:
    return [{"job_type": "training", "model_name": "tiny", "training_config": {"n_gpus": gpus}}]


@pytest.fixture
def limit(on_server: PrefectServer) -> Iterator[str]:
    """A limit of four slots."""
    name = f"gpus-{uuid4().hex[:8]}"
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=4))
        yield name
        client.delete_global_concurrency_limit_by_name(name)


def taken(limit: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(limit).active_slots


def test_slots_are_taken_before_the_job_and_given_back_with_it(service: ScriptedService, limit: str) -> None:
    seen: list[int] = []
    service.before["create"] = lambda job_id: seen.append(taken(limit))

    def body() -> list[int]:
        with jobs_cancelled_at_end():
            create_job("block", sub_jobs(3), gpu_limit=limit)
            create_job("block", sub_jobs(3), gpu_limit=limit)
            seen.append(taken(limit))
        seen.append(taken(limit))
        # A rerun looks its finished job up, and needs nothing.
        create_job("block", sub_jobs(3), gpu_limit=limit)
        return [*seen, taken(limit)]

    assert in_a_flow(body) == [3, 3, 0, 0]


def test_two_jobs_hold_their_own_and_a_cancelled_one_gives_back_its_own(service: ScriptedService, limit: str) -> None:
    def body() -> list[int]:
        first = create_job("block", sub_jobs(3), name="a", gpu_limit=limit)
        create_job("block", sub_jobs(1), name="b", gpu_limit=limit)
        both = taken(limit)
        cancel_job("block", first)
        left = taken(limit)
        run_to_end(release_gpus(RunLabels(flow_run.id)))
        return [both, left, taken(limit)]

    assert in_a_flow(body) == [4, 1, 0]


def test_a_suspended_run_keeps_its_slots(service: ScriptedService, limit: str) -> None:
    def body() -> list[int]:
        def suspends() -> None:
            with jobs_cancelled_at_end():
                create_job("block", sub_jobs(2), gpu_limit=limit)
                raise Pause

        with pytest.raises(Pause):
            suspends()
        held = taken(limit)
        with jobs_cancelled_at_end():
            # Back again: the lease that it has is enough.
            create_job("block", sub_jobs(2), gpu_limit=limit)
            again = taken(limit)
        return [held, again, taken(limit)]

    assert in_a_flow(body) == [2, 2, 0]


def test_two_processes_of_one_flow_run_take_the_slots_once(
    service: ScriptedService, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has written its lease down when the other one looks; one that ran out before is in nobody's way."""
    acquire = gpu_lease._acquire

    async def acquire_beside_another(prefect: Any, *arguments: Any) -> Any:
        theirs = await acquire(prefect, *arguments)
        await RunLabels(flow_run.id).write({"lease.training.theirs": f"{theirs} 2 {limit}"})
        return await acquire(prefect, *arguments)

    monkeypatch.setattr(gpu_lease, "_acquire", acquire_beside_another)

    def body() -> list[int]:
        with jobs_cancelled_at_end():
            gone = "00000000-0000-4000-8000-000000000000"
            run_to_end(RunLabels(flow_run.id).write({"lease.training.gone": f"{gone} 2 {limit}"}))
            create_job("block", sub_jobs(2), gpu_limit=limit)
            held = taken(limit)
        return [held, taken(limit)]

    assert in_a_flow(body) == [2, 0]


def test_a_job_waits_for_the_slots_of_another_flow_run(service: ScriptedService, limit: str) -> None:
    with get_client(sync_client=True) as client:
        lease = client.increment_concurrency_slots_with_lease([limit], 2, "concurrency", 60.0).json()["lease_id"]
        refused = threading.Event()
        seen: list[bool] = []

        class Waiting(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "waiting for 3 slots" in record.getMessage():
                    seen.append(bool(service.named("create")))
                    refused.set()

        handler = Waiting()
        logging.getLogger("prefect.task_runs").addHandler(handler)

        def give_back() -> None:
            refused.wait(60)
            client.release_concurrency_slots_with_lease(lease)

        other = threading.Thread(target=give_back)
        other.start()
        try:
            in_a_flow(lambda: create_job("block", sub_jobs(3), gpu_limit=limit))
        finally:
            logging.getLogger("prefect.task_runs").removeHandler(handler)
            refused.set()
            other.join()
    assert seen == [False]
    assert len(service.named("create")) == 1


@pytest.mark.parametrize(
    ("gpus", "name", "message"),
    [
        (5, None, "prefect gcl inspect"),
        (1, "no-such-limit", "prefect gcl create no-such-limit"),
        (0, None, "none here"),
    ],
)
def test_a_limit_that_cannot_hold_the_job_is_named_before_the_job_exists(
    service: ScriptedService, limit: str, gpus: int, name: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        in_a_flow(lambda: create_job("block", sub_jobs(gpus), gpu_limit=name or limit))
    assert service.calls == []
    assert taken(limit) == 0


def test_a_training_that_creates_no_job_of_its_own_is_refused_a_limit(service: ScriptedService, limit: str) -> None:
    plan = {"root": "/r", "dataset": "/d/manifest.json", "steps": 1, "micro_batch_size": 1, "job_id": "a-job"}
    with pytest.raises(ConfigurationError, match="give the limit to create_job"):
        in_a_flow(lambda: train("block", plan, gpu_limit=limit))


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Leases that were renewed, each time."""
    real, seen = gpu_lease._renewed, []

    async def renewed(prefect: Any, lease: Any) -> bool:
        seen.append(lease)
        return await real(prefect, lease)

    monkeypatch.setattr(gpu_lease, "_renewed", renewed)
    return seen


async def look_after(renewer: LeaseRenewer, flow_run_id: Any) -> None:
    async with get_client() as prefect:
        await renewer.look_after(prefect, [await prefect.read_flow_run(flow_run_id)])


def test_who_looks_after_a_run_renews_once_a_minute(limit: str, renewals: list[Any]) -> None:
    @flow
    def holds() -> None:
        labels = RunLabels(flow_run.id)
        run_to_end(hold_gpus(labels, "a-job", limit, 1, LOGGER))
        renewer = LeaseRenewer(LOGGER)
        for _ in range(3):
            run_to_end(look_after(renewer, labels.flow_run_id))
        assert len(renewals) == 1
        run_to_end(release_gpus(labels))

    holds()


@pytest.fixture
def nobody_renews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lease, "_keep_renewed", lambda flow_run_id: None)
    monkeypatch.setattr(gpu_lease, "RENEW_EVERY_S", 0.0)


def run_out(lease: Any) -> None:
    """What the server does with a lease that nobody renews."""
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots_with_lease(lease)


def test_a_lease_that_ran_out_while_the_job_lives_is_taken_again_once_its_slots_are_free(
    limit: str, renewals: list[Any], nobody_renews: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody was there to renew it for a while, and somebody else was faster."""

    @flow
    def holds() -> list[int]:
        labels = RunLabels(flow_run.id)
        run_to_end(hold_gpus(labels, "a-job", limit, 3, LOGGER))
        run_to_end(hold_gpus(labels, "another", limit, 1, LOGGER))
        renewer = LeaseRenewer(LOGGER)
        run_to_end(look_after(renewer, labels.flow_run_id))
        run_out(renewals[0])
        seen = [taken(limit)]
        with get_client(sync_client=True) as client:
            other = client.increment_concurrency_slots_with_lease([limit], 2, "concurrency", 900.0).json()["lease_id"]
        run_to_end(look_after(renewer, labels.flow_run_id))
        seen.append(taken(limit))
        assert f"3 slots of {limit} has run out, and they are not free" in caplog.text
        run_out(other)
        for _ in range(2):
            run_to_end(look_after(renewer, labels.flow_run_id))
            seen.append(taken(limit))
        run_to_end(release_gpus(labels))
        return [*seen, taken(limit)]

    assert holds() == [1, 3, 4, 4, 0]


def test_two_who_look_after_a_run_take_its_slots_again_once(
    limit: str, renewals: list[Any], nobody_renews: None
) -> None:
    @flow
    def holds() -> list[int]:
        labels = RunLabels(flow_run.id)
        run_to_end(hold_gpus(labels, "a-job", limit, 1, LOGGER))
        one, other = LeaseRenewer(LOGGER), LeaseRenewer(LOGGER)
        run_to_end(look_after(one, labels.flow_run_id))
        run_out(renewals[0])

        async def both() -> None:
            await asyncio.gather(*(look_after(renewer, labels.flow_run_id) for renewer in (one, other)))

        run_to_end(both())
        for renewer in (one, other):
            run_to_end(look_after(renewer, labels.flow_run_id))
        seen = taken(limit)
        run_to_end(release_gpus(labels))
        return [seen, taken(limit)]

    assert holds() == [1, 0]


def test_a_limit_that_is_gone_or_too_small_by_now_keeps_nobody_from_the_other_runs(
    limit: str, renewals: list[Any], nobody_renews: None, caplog: pytest.LogCaptureFixture
) -> None:
    @flow
    def holds() -> None:
        labels = RunLabels(flow_run.id)
        run_to_end(labels.write({"lease.a-job.gone": f"{uuid4()} 5 {limit}"}))
        run_to_end(labels.write({"lease.another.gone": f"{uuid4()} 1 no-such-limit"}))
        run_to_end(look_after(LeaseRenewer(LOGGER), labels.flow_run_id))
        run_to_end(release_gpus(labels))

    holds()
    assert len(renewals) == 2
    assert "prefect gcl inspect" in caplog.text
    assert "prefect gcl create no-such-limit" in caplog.text
    assert taken(limit) == 0


def test_slots_are_renewed_while_a_flow_run_waits_for_its_next_try(
    limit: str, renewals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease, "RENEW_EVERY_S", 0.2)
    before: list[int] = []

    @flow(retries=1, retry_delay_seconds=10)
    def holds() -> int:
        run_to_end(hold_gpus(RunLabels(flow_run.id), "a-job", limit, 2, LOGGER))
        if not before:
            until(lambda: bool(renewals))
            before.append(len(renewals))
            raise RuntimeError("the next try goes on")
        return len(renewals)

    # One by `hold_gpus`, and one may have been on its way.
    assert holds() > before[0] + 2
    until(lambda: taken(limit) == 0)


def test_the_process_of_a_run_renews_what_it_holds_and_gives_it_back_after_its_end(
    limit: str, renewals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease, "RENEW_EVERY_S", 0.2)

    @flow
    def holds() -> None:
        run_to_end(hold_gpus(RunLabels(flow_run.id), "a-job", limit, 2, LOGGER))
        until(lambda: len(renewals) >= 2)

    holds()
    until(lambda: taken(limit) == 0)


def test_a_renewal_that_fails_harms_no_run(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is away for a while: the flow goes on, and its slots are given back all the same."""
    monkeypatch.setattr(gpu_lease, "RENEW_EVERY_S", 0.1)
    failures: list[object] = []

    async def out_of_reach(prefect: object, lease: object) -> bool:
        failures.append(lease)
        raise httpx.ConnectError("the server is away")

    @flow
    def holds() -> str:
        labels = RunLabels(flow_run.id)
        run_to_end(hold_gpus(labels, "a-job", limit, 2, LOGGER))
        monkeypatch.setattr(gpu_lease, "_renewed", out_of_reach)
        until(lambda: len(failures) >= 2)
        return "done"

    assert holds() == "done"
    until(lambda: taken(limit) == 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_the_slots_of_a_crashed_run_are_free_when_its_lease_has_run_out(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody renews: the process is gone, and the run is not suspended. The server's shortest lease is a minute."""
    monkeypatch.setattr(gpu_lease, "LEASE_S", 60.0)
    monkeypatch.setattr(gpu_lease, "_keep_renewed", lambda flow_run_id: None)

    @flow
    def crashes() -> None:
        run_to_end(hold_gpus(RunLabels(flow_run.id), "a-job", limit, 4, LOGGER))

    crashes()
    assert taken(limit) == 4
    deadline = time.monotonic() + 200
    while taken(limit):
        assert time.monotonic() < deadline
        time.sleep(1)
