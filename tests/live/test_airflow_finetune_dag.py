"""The DAG that users copy, whole: a Snowflake-compatible server, the local service, a real Airflow, the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex_training.client import CortexTrainingClient
from cortex_training.local.models import model_folder
from cortex_training.publication import PublicationLog, SaveManifest
from cortex_training.states import is_terminal_job
from cortex_training.training import status
from demo.airflow_cluster import AirflowCluster, SlotSampler
from demo.rows import load_rows, standard_library_rows
from demo.snowflake_server import SnowflakeServer

DAG_ID = "finetune_from_snowflake"
DAGS = Path(__file__).parents[2] / "dags"
PAT = "a-token-for-the-local-service"
STEPS = 6
ROWS = 400
SETUP_AND_TEARDOWN = {"create_job", "cancel_job"}

pytestmark = [pytest.mark.live, pytest.mark.short, pytest.mark.timeout(600)]


@pytest.fixture
def snowflake(tmp_path: Path) -> Iterator[SnowflakeServer]:
    with SnowflakeServer(tmp_path / "snowflake") as server:
        with server.connect() as connection:
            load_rows(connection, standard_library_rows()[:ROWS])
        yield server


@pytest.fixture
def airflow(
    start_airflow: Callable[..., AirflowCluster], snowflake: SnowflakeServer, local_service: Any
) -> AirflowCluster:
    cortex = {
        "conn_type": "cortex_training",
        "host": local_service.base_url,
        "schema": local_service.schema,
        "password": PAT,
        "extra": {"database": local_service.database},
    }
    return start_airflow(DAGS, connections={"ct": cortex, "sf": json.loads(snowflake.airflow_connection_json())})


@pytest.fixture
def conf(tmp_path: Path) -> dict[str, Any]:
    root = tmp_path / "shared"
    root.mkdir()
    return {
        "snowflake_conn_id": "sf",
        "cortex_conn_id": "ct",
        "root": str(root),
        "tokenizer": str(model_folder("tiny")),
        "model_name": "tiny",
        "dtype": "float32",
        "lora": None,
        "max_seq_len": 256,
        "overlong": "skip",
        "steps": STEPS,
        "micro_batch_size": 4,
        "save_every_steps": 3,
        "learning_rate": 5e-3,
        "prompts": ["def merge(a, b)\nWhat does merge do?\n"],
        "max_new_tokens": 8,
    }


def test_rows_become_a_published_checkpoint_and_no_job_is_left(
    airflow: AirflowCluster, local_service: Any, conf: dict[str, Any], tmp_path: Path
) -> None:
    root = Path(conf["root"])
    jobs_before = set(_jobs(local_service))

    run_id = airflow.trigger_dag(DAG_ID, conf)
    with SlotSampler(airflow, DAG_ID, run_id) as slots:
        state = airflow.wait_for_run(DAG_ID, run_id, timeout_s=360)
    states = airflow.task_states(DAG_ID, run_id)
    assert state == "success", _why(airflow, run_id)
    assert set(states.values()) == {"success"}

    trained = airflow.xcom(DAG_ID, run_id, "train")
    published = airflow.xcom(DAG_ID, run_id, "publish")
    job_id = airflow.xcom(DAG_ID, run_id, "create_job")
    assert (trained["job_id"], trained["steps"]) == (job_id, STEPS)
    assert trained["last_loss"] < trained["first_loss"]
    steps = [e["global_steps"] for e in local_service.execution_log(job_id) if e["op"] == "step"]
    assert steps == list(range(1, STEPS + 1))

    log = PublicationLog(str(root / "models"))
    assert log.latest().name == published["entry"]
    manifest = SaveManifest.read(log.store, log.latest().save)
    assert (manifest.job_id, manifest.global_steps) == (job_id, STEPS)
    assert {f.path for f in manifest.files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert manifest.metrics["last_loss"] == trained["last_loss"]

    before, after = (_samples(root, when) for when in ("before", "after"))
    assert [s["prompt"] for s in before] == [s["prompt"] for s in after] == conf["prompts"]
    assert [s["text"] for s in before] != [s["text"] for s in after]

    assert set(_jobs(local_service)) - jobs_before == {job_id}
    assert is_terminal_job(_jobs(local_service)[job_id])
    # The run went on in the triggerer: its worker legs are the start and the end.
    assert slots.seconds.get("train", 0.0) < 30
    assert "loss" in airflow.task_log(DAG_ID, run_id, "train")
    for task in states:
        assert len(json.dumps(airflow.xcom(DAG_ID, run_id, task) if task != "select_rows" else None)) < 2000
    assert _files_with(tmp_path / "airflow-0", PAT) == []

    # And nights that can't go well: no job is created for them.
    failing = {**conf, "warmup_steps": STEPS + 1}
    wrong_plan = airflow.trigger_dag(DAG_ID, failing)
    assert airflow.wait_for_run(DAG_ID, wrong_plan, timeout_s=150) == "failed"
    assert "learning_rate.warmup_steps" in airflow.task_log(DAG_ID, wrong_plan, "settle")
    assert set(_jobs(local_service)) - jobs_before == {job_id}

    no_root = airflow.trigger_dag(DAG_ID, {**conf, "root": str(tmp_path / "not-mounted")})
    assert airflow.wait_for_run(DAG_ID, no_root, timeout_s=150) == "failed"
    assert "not-mounted" in airflow.task_log(DAG_ID, no_root, "settle")
    no_table = airflow.trigger_dag(DAG_ID, {**conf, "source_table": "NO_SUCH_TABLE"})
    assert airflow.wait_for_run(DAG_ID, no_table, timeout_s=200) == "failed"
    assert "NO_SUCH_TABLE" in airflow.task_log(DAG_ID, no_table, "select_rows")
    assert set(_jobs(local_service)) - jobs_before == {job_id}
    assert status(trained["root"]).state.finished_steps == STEPS


def _jobs(service: Any) -> dict[str, str]:
    with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
        return {job["job_id"]: job["status"] for job in client.list_jobs()}


def _samples(root: Path, when: str) -> list[dict[str, Any]]:
    (path,) = (root / "samples").glob(f"*-{when}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _why(airflow: AirflowCluster, run_id: str) -> str:
    states = airflow.task_states(DAG_ID, run_id)
    failed = [task for task, state in states.items() if state in ("failed", "up_for_retry")]
    return "\n".join([str(states), *(airflow.task_log(DAG_ID, run_id, task)[-4000:] for task in failed)])


def _files_with(folder: Path, secret: str) -> list[str]:
    """Files of an AIRFLOW_HOME, its database and logs included, that hold a secret."""
    wanted = secret.encode()
    return [str(path) for path in folder.rglob("*") if path.is_file() and wanted in path.read_bytes()]
