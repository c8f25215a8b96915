"""What the manual promises a new user: the flow's process goes while the GPUs work, and a bad night changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect_snowflake import SnowflakeConnector, SnowflakeCredentials

from cortex_training.local.models import model_folder
from cortex_training.publication import PublicationLog
from cortex_training.training import status as training_status
from demo import snowflake_server
from demo.rows import load_rows, standard_library_rows
from demo.snowflake_server import SnowflakeServer

from .conftest import REPOSITORY, Live, client_of, flow_processes, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

STEPS = 120


@pytest.fixture
def snowflake(live: Live, tmp_path: Path) -> Iterator[SnowflakeServer]:
    with SnowflakeServer(tmp_path / "snowflake") as server:
        rows = [row for row in standard_library_rows() if len(row.prompt) + len(row.completion) < 400]
        with server.connect() as connection:
            load_rows(connection, rows[:200])
        account = SnowflakeCredentials(account="local", user="demo", password="demo")
        SnowflakeConnector(
            credentials=account, database=snowflake_server.DATABASE, schema=snowflake_server.SCHEMA, warehouse="ANY"
        ).save("snowflake", overwrite=True)
        yield server


def parameters(snowflake: SnowflakeServer, folder: Path) -> dict[str, Any]:
    for name in ("runs", "models"):
        (folder / name).mkdir()
    connection = snowflake.connection_arguments()
    return {
        "root": str(folder / "runs" / "nightly"),
        "models": str(folder / "models"),
        "tokenizer": str(model_folder("tiny")),
        "model": "tiny",
        "cortex": "cortex",
        "connect_options": {name: connection[name] for name in ("host", "port", "insecure_mode")},
        "max_seq_len": 256,
        "overlong": "skip",
        "steps": STEPS,
        "micro_batch_size": 2,
        "save_every_steps": 60,
        "learning_rate": 5e-3,
        "dtype": "float32",
        "max_tokens": 8,
    }


def steps_of(service: Any, job_id: str) -> list[int]:
    return [entry["global_steps"] for entry in service.execution_log(job_id) if entry["op"] == "step"]


def start_all(live: Live) -> None:
    live.start("runner", str(REPOSITORY / "flows" / "finetune_from_snowflake.py"))
    live.watch()
    live.drive()


def is_served() -> bool:
    with get_client(sync_client=True) as client:
        return any(deployment.name == "nightly" and not deployment.paused for deployment in client.read_deployments())


def the_job_of(live: Live, flow_run_id: UUID) -> str:
    (job_id,) = live.jobs_of(flow_run_id)
    return job_id


def test_every_step_once_and_one_published_checkpoint(
    live: Live, cortex: Any, snowflake: SnowflakeServer, tmp_path: Path
) -> None:
    given = parameters(snowflake, tmp_path)
    start_all(live)
    wait_until(is_served, "the deployment")
    run = live.run("finetune-from-snowflake/nightly", **given)

    # The GPUs work, and no process of the flow is there.
    live.wait_for_state(run, "Suspended", patience_s=300)
    wait_until(lambda: not flow_processes(run), "the end of the flow's process")
    job_id = the_job_of(live, run)
    wait_until(lambda: len(steps_of(cortex, job_id)) >= 5, "five steps")
    assert not flow_processes(run)

    for name in ("runner", "watch", "drive", "worker"):
        live.kill_all(name)
    live.server.kill()
    assert len(steps_of(cortex, job_id)) < STEPS
    live.server.start()
    live.worker()
    start_all(live)

    live.wait_for_state(run, "Completed", patience_s=300)
    # One job, unless the kill came between a step's record and its request: then a second one went on from there.
    jobs = training_status(given["root"]).state.job_ids
    assert jobs[0] == the_job_of(live, run) == job_id
    assert [step for job in jobs for step in steps_of(cortex, job)] == list(range(1, STEPS + 1))
    with client_of(cortex) as client:
        assert {client.get_job(job)["status"] for job in jobs} == {"cancelled"}
    (entry,) = PublicationLog(given["models"]).entries()
    assert entry.step == STEPS
    assert {"Suspended", "Resuming", "Completed"} <= set(live.states(run))
    assert not {"Crashed", "Failed"} & set(live.states(run))
    assert live.read(run).run_count == 1
    live.stop("runner")
