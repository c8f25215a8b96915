"""The flow to copy, served: what ends its remote job when the flow itself can't."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from cortex_training.publication import PosixStore
from cortex_training.training.journal import read_journal
from demo.prefect_server import PrefectServer
from demo.processes import stop_group

from .test_finetune_flow import REPOSITORY, job_status, jobs_of, steps_of, wait_until


@pytest.fixture
def runner(on_server: PrefectServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``python flows/finetune_from_snowflake.py``, as the documentation says."""
    environment = on_server.environment() | {
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_LOCAL_STORAGE_PATH": str(tmp_path / "served-results"),
        "PYTHONPATH": str(REPOSITORY),
    }
    log = tmp_path / "runner.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "flows" / "finetune_from_snowflake.py")],
            env=environment,
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    yield process
    stop_group(process)


def flow_process_of(runner: subprocess.Popen[str]) -> int:
    """The child of the runner that executes the flow; beside it there is one that watches over shared resources."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(runner.pid)], capture_output=True, text=True, check=True
    ).stdout
    (found,) = [line.split()[0] for line in listed.splitlines() if "multiprocessing.spawn" in line]
    return int(found)


def state_of(flow_run_id: UUID) -> StateType:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
    assert state is not None
    return state.type


def begin_training(parameters: dict[str, Any], service: Any) -> UUID:
    """Start the deployment and wait until the job trains; returns the flow run's id."""
    wait_until(_is_served, "the deployment")
    run = run_deployment("finetune-from-snowflake/nightly", parameters=parameters, timeout=0)
    wait_until(lambda: any(steps_of(service, job_id) for job_id in jobs_of(run.id)), "a step")
    return run.id


def _is_served() -> bool:
    with get_client(sync_client=True) as client:
        return any(deployment.name == "nightly" for deployment in client.read_deployments())


@pytest.mark.parametrize("end", ["cancelled", "killed"])
def test_the_job_ends_with_the_flow_run(
    end: str, runner: subprocess.Popen[str], flow_parameters: dict[str, Any], local_service: Any
) -> None:
    flow_run_id = begin_training(flow_parameters | {"steps": 2000, "save_every_steps": 1000}, local_service)
    (job_id,) = jobs_of(flow_run_id)
    assert job_status(local_service, job_id) == "running"

    if end == "cancelled":
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run_id, Cancelling())
        expected = StateType.CANCELLED
    else:
        os.kill(flow_process_of(runner), signal.SIGKILL)
        expected = StateType.CRASHED

    wait_until(lambda: job_status(local_service, job_id) == "cancelled", "the job's cancellation")
    wait_until(lambda: state_of(flow_run_id) == expected, f"state {expected}")
    assert jobs_of(flow_run_id) == [job_id]
    # Told to stop, the run said so in its journal; killed, it could not. Then it was taken away, before its job ended.
    written = [record.type for record in read_journal(PosixStore(flow_parameters["root"]))]
    assert ("released" in written) == (end == "cancelled")
    assert written[-1] == "takeover"
