"""A training run is its root: one that Airflow's trigger drove goes on under Prefect, and the other way round.

Each engine's own code drives the run, in a process of its own that is killed. Only an environment that holds both can
run this.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortex_training import CortexTrainingClient
from cortex_training.publication import PosixStore, PublicationLog
from cortex_training.states import is_terminal_job
from cortex_training.training import status
from cortex_training.training.journal import read_journal
from demo.prefect_server import PrefectServer
from prefect_cortex_training import CortexTrainingCredentials

from .conftest import PAT
from .test_finetune_flow import REPOSITORY, steps_in, wait_until
from .test_taken_over import STEPS, plan

__all__ = ["plan"]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("airflow") is None, reason="there is no Airflow beside this Prefect"),
    pytest.mark.timeout(600),
]

SCRIPTS = {"airflow": "airflow_task.py", "prefect": "train_in_a_flow.py"}


@pytest.mark.parametrize(("first", "second"), [("airflow", "prefect"), ("prefect", "airflow")])
def test_a_run_whose_engine_was_killed_goes_on_under_the_other(
    first: str,
    second: str,
    plan: dict[str, Any],
    on_server: PrefectServer,
    local_service: Any,
    tmp_path: Path,
) -> None:
    block = CortexTrainingCredentials(
        host=local_service.base_url, database=local_service.database, schema_=local_service.schema, pat=PAT
    )
    block.save("cortex", overwrite=True)
    begun = start(first, plan, on_server, local_service, tmp_path)
    try:
        wait_until(
            lambda: len(steps_in(local_service, plan["root"])) >= 3 or begun.poll() is not None, "three steps", 400
        )
    finally:
        if begun.poll() is None:
            os.killpg(begun.pid, signal.SIGKILL)
        output, _ = begun.communicate()
    assert begun.returncode == -signal.SIGKILL, output
    assert len(steps_in(local_service, plan["root"])) < STEPS
    (job_id,) = status(plan["root"]).state.job_ids

    went_on = start(second, plan, on_server, local_service, tmp_path)
    try:
        output, _ = went_on.communicate(timeout=240)
    finally:
        if went_on.poll() is None:
            os.killpg(went_on.pid, signal.SIGKILL)
    assert went_on.returncode == 0, output

    trained = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    jobs = status(plan["root"]).state.job_ids
    assert (trained["steps"], trained["job_id"], jobs[0]) == (STEPS, jobs[-1], job_id)
    assert steps_in(local_service, plan["root"]) == list(range(1, STEPS + 1))
    assert len([record for record in read_journal(PosixStore(plan["root"])) if record.type == "takeover"]) >= 2
    published = PublicationLog(plan["root"]).entries()
    assert [entry.step for entry in published] == [10, 20, STEPS]
    assert published[-1].name == trained["entry"]
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        assert all(is_terminal_job(client.get_job(job)["status"]) for job in jobs)


def start(engine: str, plan: dict[str, Any], server: PrefectServer, service: Any, folder: Path) -> Any:
    """Begin to train, or go on, in a process of this engine."""
    file = folder / "plan.json"
    file.write_text(json.dumps(plan))
    connection = {
        "conn_type": "cortex_training",
        "host": service.base_url,
        "schema": service.schema,
        "password": PAT,
        "extra": {"database": service.database},
    }
    environment = server.environment() | {
        "AIRFLOW_CONN_CT": json.dumps(connection),
        "PREFECT_LOCAL_STORAGE_PATH": str(folder / "results-of-its-own"),
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(SCRIPTS[engine])), str(file)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
