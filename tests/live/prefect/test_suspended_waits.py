"""A flow run that waits for GPUs has no process; it comes back when they are there, and repeats nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ServiceFactory

from .conftest import Live, client_of, flow_processes, live_jobs, save_block, sub_jobs, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


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
    assert live_jobs(full_service) == []
