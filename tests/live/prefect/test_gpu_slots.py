"""GPU slots under a limit of a real server: held while a remote job lives, whoever looks after its flow run, and no
longer.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Cancelling

from prefect_cortex_training.presence import DRIVERS, WATCHERS
from tests.conftest import ServiceFactory
from tests.live.plans import training_plan

from .conftest import Live, client_of, flow_processes, live_jobs, save_block, send_to_flow, sub_jobs, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

WITH_SHORT_LEASES = """
import sys
from prefect_cortex_training import command, gpu_lease
gpu_lease.LEASE_S, gpu_lease.RENEW_EVERY_S = 60.0, 15.0
sys.exit(command.main(sys.argv[1:]))
"""
"""The two processes with leases of a minute, which is the server's shortest; `flows_to_deploy` does the same."""

SLOTS = {"queues": 3, "trains": 2, "dies": 1, "nobody": 1}


@pytest.fixture
def limits(live: Live) -> Iterator[dict[str, str]]:
    names = {name: f"gpus-{name}" for name in SLOTS}
    with get_client(sync_client=True) as client:
        for name, slots in SLOTS.items():
            # The client asks again where an answer is late.
            with contextlib.suppress(ObjectAlreadyExists):
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=names[name], limit=slots))
        yield names
        for name in names.values():
            client.delete_global_concurrency_limit_by_name(name)


def taken(limit: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(limit).active_slots


def test_slots_outlive_their_lease_while_a_job_lives_and_end_with_it_or_with_who_held_them(
    live: Live, start_local_service: ServiceFactory, limits: dict[str, str], tmp_path: Path
) -> None:
    service = start_local_service(gpus=3)
    save_block(service)
    for name, kind in (("watch", WATCHERS), ("drive", DRIVERS)):
        live.start(name, "-c", WITH_SHORT_LEASES, name, "--every", "1")
        live.wait_for_presence(kind)
    short, endless = (training_plan(tmp_path, name, steps=steps) for name, steps in (("short", 4), ("endless", 9000)))

    trains = live.run("trains-on-slots/live", plan=endless, limit=limits["trains"])
    ends = live.run("trains-on-slots/live", plan=short, limit=limits["trains"])
    live.wait_for_state(ends, "Completed")
    # The slot of the training that has ended is free. That of the other one is taken, at the latest when it begins.
    wait_until(lambda: taken(limits["trains"]) == 1, "one slot of two trainings")
    dies = live.run("holds-slots/live", sub_jobs=sub_jobs(), limit=limits["dies"])
    wait_until(lambda: len(live_jobs(service)) == 2, "the jobs of the two runs")
    queues = live.run("queues-on-slots/live", sub_jobs=sub_jobs(n_gpus=3), limit=limits["queues"])
    for run in (trains, queues):
        live.wait_for_state(run, "Suspended")
        wait_until(lambda run=run: not flow_processes(run), "the end of the flow's process")
    assert [taken(limits[name]) for name in ("queues", "trains", "dies")] == [3, 1, 1]

    send_to_flow(dies, signal.SIGKILL)
    live.wait_for_state(dies, "Crashed")
    with get_client(sync_client=True) as client:
        client.increment_concurrency_slots_with_lease([limits["nobody"]], 1, "concurrency", 60.0)
    # A lease that was taken later than all others has run out, and so has that of the run that was killed.
    wait_until(lambda: taken(limits["nobody"]) == 0, "the end of a lease that nobody renews")
    wait_until(lambda: taken(limits["dies"]) == 0, "the end of the lease of the killed run")
    assert [taken(limits[name]) for name in ("queues", "trains")] == [3, 1], "watch and drive renew"

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(trains, Cancelling())
    wait_until(lambda: taken(limits["trains"]) == 0, "the slots of the cancelled training")
    with client_of(service) as client:
        client.cancel_job(live.jobs_of(dies)[0])
    live.wait_for_state(queues, "Completed")
    assert taken(limits["queues"]) == 0
    wait_until(lambda: live_jobs(service) == [], "the end of all jobs")
