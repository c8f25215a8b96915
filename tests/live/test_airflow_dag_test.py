"""`airflow dags test`, the way people try a DAG on their desk: no scheduler, no triggerer, an AIRFLOW_HOME of its own.

Airflow 3.3 resumes a deferred task there with the event alone and drops what `defer` was given beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortex_training.client import CortexTrainingClient
from cortex_training.states import is_terminal_job
from tests.live.conftest import DAGS
from tests.live.plans import training_plan, training_sub_job

DATABASE = "DESK"

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_deferred_waits_and_a_deferred_training_end_on_a_desk(local_service: Any, tmp_path: Path) -> None:
    connection = {
        "conn_type": "cortex_training",
        "host": local_service.base_url,
        "schema": "PUBLIC",
        "password": "any",
        "extra": {"database": DATABASE},
    }
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")},
        "AIRFLOW_HOME": str(tmp_path / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW_CONN_DESK": json.dumps(connection),
    }

    def airflow(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout + done.stderr

    airflow("db", "migrate")
    waits = {"conn_id": "desk", "sub_jobs": [training_sub_job()], "count": 1}
    airflow("dags", "test", "deferred_saves", "--conf", json.dumps(waits))
    airflow(
        "dags",
        "test",
        "train_only",
        "--conf",
        json.dumps({"conn_id": "desk", "plan": training_plan(tmp_path, "run", steps=4)}),
    )

    with CortexTrainingClient(local_service.base_url, DATABASE, "PUBLIC") as client:
        jobs = {job["job_id"]: job["status"] for job in client.list_jobs()}
    assert len(jobs) == 2
    assert all(map(is_terminal_job, jobs.values())), jobs
    done = [(e["op"], e["global_steps"]) for e in local_service.execution_log() if e["job_id"] in jobs]
    assert [step for op, step in done if op == "step"] == [1, 2, 3, 4]
    assert [op for op, _ in done].count("save") >= 2
