"""The DAG that users copy, whole: a Snowflake-compatible server, the local service, a real Airflow, the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex_training.publication import PublicationLog, SaveManifest
from cortex_training.states import is_terminal_job
from cortex_training.training import status
from demo.airflow_cluster import SlotSampler
from demo.rows import load_rows, standard_library_rows
from tests.faults.proxy import DROP_BEFORE
from tests.live.conftest import PAT, PROMPT, Night, Run
from tests.live.searching import in_database, in_files

DAG_ID = "finetune_from_snowflake"
STEPS = 6
ROWS = 400

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture
def rows(snowflake: Any) -> list[Any]:
    rows = standard_library_rows()[:ROWS]
    with snowflake.connect() as connection:
        load_rows(connection, rows)
    return rows


@pytest.fixture
def conf(night: Night) -> dict[str, Any]:
    root = night.folder / "shared"
    root.mkdir()
    return {
        "cortex_conn_id": night.conn_id,
        "root": str(root),
        "steps": STEPS,
        "save_every_steps": 3,
        "references": ["a list"],
    }


@pytest.mark.short
def test_rows_become_a_published_checkpoint_and_no_job_is_left(
    night: Night, rows: list[Any], conf: dict[str, Any]
) -> None:
    root = Path(conf["root"])
    run = night.start(DAG_ID, **conf)
    with SlotSampler(night.airflow, DAG_ID, run.run_id) as slots:
        run.wait(timeout_s=360)
    assert set(run.states().values()) == {"success"}

    trained, published, job_id = run.xcom("train"), run.xcom("publish"), run.xcom("create_job")
    assert (trained["job_id"], trained["steps"]) == (job_id, STEPS)
    assert trained["last_loss"] < trained["first_loss"]

    log = PublicationLog(str(root / "models"))
    latest = log.latest()
    assert latest is not None
    assert latest.name == published["entry"]
    manifest = SaveManifest.read(log.store, latest.save)
    assert (manifest.job_id, manifest.global_steps) == (job_id, STEPS)
    assert {f.path for f in manifest.files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert manifest.metrics["last_loss"] == trained["last_loss"]

    before, after = (_samples(root, when) for when in ("before", "after"))
    assert [s["prompt"] for s in before] == [s["prompt"] for s in after] == [PROMPT]
    assert [s["text"] for s in before] != [s["text"] for s in after]
    evaluated = run.xcom("evaluate")
    assert (evaluated["prompts"], evaluated["changed"]) == (1, 1)
    assert 0 <= evaluated["overlap_before"] <= 1

    assert list(night.jobs()) == [job_id]
    assert is_terminal_job(night.jobs()[job_id])
    # The run went on in the triggerer: its worker legs are the start and the end.
    assert slots.seconds.get("train", 0.0) < 30
    assert "loss" in run.log("train")
    for task in run.states():
        assert len(json.dumps(run.xcom(task) if task != "select_rows" else None)) < 2000
    # Neither the credential nor what was trained on or answered is in Airflow's files or tables.
    for secret in (PAT, rows[0].completion[:60], after[0]["text"][:60]):
        if len(secret) > 20:
            assert in_files(night.airflow.home, secret) == []
            assert in_database(night.airflow, secret) == []

    _nights_that_cant_go_well(night, conf)
    assert list(night.jobs()) == [job_id]
    assert status(trained["root"]).state.finished_steps == STEPS
    night.settle(steps=STEPS)


def test_a_step_that_never_arrived_costs_a_job_and_no_step(night: Night, rows: list[Any], conf: dict[str, Any]) -> None:
    night.proxy.add(r"POST .*/step$", DROP_BEFORE, skip=4)
    run = night.start(DAG_ID, **conf)
    run.wait(timeout_s=360)
    # It may still arrive, so nobody goes on in this job: a new one begins with what a save of it rescued.
    trained = run.xcom("train")
    assert trained["job_id"] != run.xcom("create_job")
    assert (trained["segments"], trained["steps"]) == (2, STEPS)
    latest = PublicationLog(str(Path(conf["root"]) / "models")).latest()
    assert latest is not None
    assert (latest.name, latest.step) == (run.xcom("publish")["entry"], STEPS)
    night.settle(jobs=2, steps=STEPS)


def _nights_that_cant_go_well(night: Night, conf: dict[str, Any]) -> None:
    """No job is created for them."""
    nowhere = f"{night.folder}/not-mounted"
    # At most one run of this DAG is active, so they wait for each other.
    for changes, task, words in (
        ({"warmup_steps": STEPS + 1}, "settle", "learning_rate.warmup_steps"),
        ({"root": nowhere}, "settle", "not-mounted"),
        ({"source_table": "NO_SUCH_TABLE"}, "select_rows", "NO_SUCH_TABLE"),
    ):
        run: Run = night.start(DAG_ID, **{**conf, **changes})
        run.wait("failed")
        assert words in run.log(task)


def _samples(root: Path, when: str) -> list[dict[str, Any]]:
    (path,) = (root / "samples").glob(f"*-{when}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
