"""The DAGs that users copy, beside the nightly one: each runs as it stands, against the local service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex_training.publication import PublicationLog, SaveManifest
from demo.airflow_cluster import AirflowCluster, ClusterError
from demo.rows import load_rows, standard_library_rows
from tests.live.conftest import PROMPT, Night, Run, wait_until

ROWS = "snowflake://myorg-myaccount/TRAINING/PUBLIC/TRAINING_EXAMPLES"

# States in which a task waits for a person, and how long this one reads what is asked.
_WAITING = ("awaiting_input", "deferred")
_READING_S = 3.0

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture
def loaded(snowflake: Any) -> None:
    with snowflake.connect() as connection:
        load_rows(connection, standard_library_rows()[:200])


@pytest.fixture
def paused_again(airflow: AirflowCluster) -> Iterator[list[str]]:
    """DAGs that a test unpaused and nobody else wants to run."""
    dag_ids: list[str] = []
    yield dag_ids
    for dag_id in dag_ids:
        airflow.request("PATCH", f"/dags/{dag_id}", {"is_paused": True})


def test_new_rows_start_a_training_whose_publication_starts_an_evaluation(
    night: Night, loaded: None, examples_root: Path, paused_again: list[str]
) -> None:
    airflow = night.airflow
    night.connect(conn_id="ct_examples")
    for dag_id in ("finetune_on_new_rows", "evaluate_publication"):
        airflow.wait_for_dag(dag_id)
        airflow.request("PATCH", f"/dags/{dag_id}", {"is_paused": False})
        paused_again.append(dag_id)
    watching = wait_for_watcher(airflow)
    nothing_reported = state_of(airflow, watching)

    # Whoever loads the table says so.
    airflow.request("POST", "/assets/events", {"asset_id": asset_id(airflow, ROWS), "extra": {"rows": 200}})
    training = Run(night, "finetune_on_new_rows", only_run(airflow, "finetune_on_new_rows"))
    training.wait(timeout_s=300)
    published = training.xcom("publish")
    evaluation = Run(night, "evaluate_publication", only_run(airflow, "evaluate_publication"))
    evaluation.wait(timeout_s=300)

    (answer,) = [json.loads(line) for line in Path(evaluation.xcom("answer")["output_path"]).read_text().splitlines()]
    assert answer["prompt"] == PROMPT
    assert answer["text"]
    (event,) = events_about(airflow, watching)
    assert event["extra"]["payload"]["entry"] == published["entry"]
    assert event["extra"]["payload"]["job_id"] == training.xcom("create_job")
    night.settle(jobs=2, steps=4)

    # Both triggerers are restarted: what is remembered as reported is not reported again, what is new is. A watcher
    # remembers one look after it reported; whoever dies earlier reports again.
    wait_until(lambda: state_of(airflow, watching) != nothing_reported, "what was reported is remembered")
    for component in ("triggerer", "triggerer-2"):
        airflow.kill_component(component)
        airflow.restart_triggerer(component)
    log = PublicationLog(str(examples_root / "models"))
    log.publish(log.latest().save, published["epoch"], published["step"] + 1)  # type: ignore[union-attr]
    wait_until(lambda: published["step"] + 1 in reported_steps(airflow, watching), "the next publication is reported")
    assert reported_steps(airflow, watching) == [published["step"], published["step"] + 1]


def test_the_pipeline_of_single_operations(night: Night, loaded: None, tmp_path: Path) -> None:
    run = night.start("finetune_step_by_step", cortex_conn_id=night.conn_id, root=str(tmp_path))
    run.wait(timeout_s=400)
    published = run.xcom("publish")
    log = PublicationLog(str(tmp_path / "models"))
    assert log.latest().name == published["entry"]  # type: ignore[union-attr]
    assert published["step"] == 3
    losses = [run.xcom(f"forward_backward_{step}_{part}")["loss"] for step in (1, 2, 3) for part in (0, 1)]
    assert losses[-1] < losses[0]
    assert len(night.executed("forward-backward")) == 6
    night.settle(steps=3)


def test_a_candidate_is_promoted_by_a_person_and_not_otherwise(night: Night, tmp_path: Path) -> None:
    job_id, checkpoint = trained_checkpoint(night)
    candidates = tmp_path / "models"
    (candidates / "exec/by-hand-e1").mkdir(parents=True)
    log = PublicationLog(str(candidates))
    SaveManifest(job_id, checkpoint, "weights-only", 0).write(log.store, "exec/by-hand-e1")
    log.publish("exec/by-hand-e1", 1, 7)

    rejected = ask(night, tmp_path, "Reject")
    rejected.wait()
    assert rejected.states() | {"export": "skipped", "promote": "skipped"} == rejected.states()
    approved = ask(night, tmp_path, "Approve")
    approved.wait()
    production = PublicationLog(str(tmp_path / "production"))
    (entry,) = production.entries()
    assert entry.name == approved.xcom("promote")["entry"]
    assert (Path(entry.location) / "model.safetensors").is_file()
    night.settle()


def ask(night: Night, root: Path, answer: str) -> Run:
    """Run the promotion and answer it through the REST API, as often as it asks.

    It asks again when the answer was there before the scheduler had read that the asking process ended: the scheduler
    takes the resumed task for one that was killed, and retries it.
    """
    run = night.start("promote_with_approval", cortex_conn_id=night.conn_id, root=str(root))
    path = f"/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/approve/-1/hitlDetails"

    def answered() -> bool:
        if run.wait_for_task("approve", *_WAITING, "success", "failed")["state"] not in _WAITING:
            return True
        time.sleep(_READING_S)
        asked = night.airflow.request("GET", path)
        assert asked["subject"] == "Promote step 7 to production?"
        if not asked["response_received"]:
            night.airflow.request("PATCH", path, {"chosen_options": [answer]})
        return False

    wait_until(answered, "the answer is taken", timeout_s=240)
    return run


def trained_checkpoint(night: Night) -> tuple[str, str]:
    """A weights-only checkpoint of a job that ended."""
    from cortex_training.protocol.results import checkpoint_id
    from tests.live.plans import training_sub_job

    with night.client() as client:
        job_id = client.create_job_from_body({"sub_job_configs": [training_sub_job()]})["job_id"]
        client.wait_for_job(job_id, timeout_s=240)
        saved = client.poll_request(job_id, client.save(job_id, None, "weights-only"), timeout_s=240)
        client.cancel_job(job_id)
    checkpoint = checkpoint_id(saved)
    assert checkpoint is not None
    return job_id, checkpoint


def asset_id(airflow: AirflowCluster, uri: str) -> int:
    (asset,) = (a for a in airflow.request("GET", "/assets", query={"limit": 100})["assets"] if a["uri"] == uri)
    return int(asset["id"])


def wait_for_watcher(airflow: AirflowCluster) -> int:
    """The watched asset, once the watcher has looked for the first time."""
    (models,) = (
        a
        for a in airflow.request("GET", "/assets", query={"limit": 100})["assets"]
        if a["uri"].startswith("cortex-training://")
    )
    wait_until(lambda: state_of(airflow, models["id"]) is not None, "the watcher has looked once")
    return int(models["id"])


def state_of(airflow: AirflowCluster, asset: int) -> Any:
    stored = airflow.request("GET", f"/assets/{asset}/state-store")
    return next(iter(next((v for v in stored.values() if isinstance(v, list)), [])), None)


def events_about(airflow: AirflowCluster, asset: int) -> list[dict[str, Any]]:
    """Airflow 3.3 answers 500 while a run that one of the events started is queued: it has no start yet."""
    told: list[dict[str, Any]] = []

    def look() -> bool:
        try:
            told[:] = airflow.request("GET", "/assets/events", query={"asset_id": asset, "limit": 50})["asset_events"]
        except ClusterError as error:
            if "was answered 500" not in str(error):
                raise
            return False
        return True

    wait_until(look, "the runs that were started by an asset's events have begun")
    return told


def reported_steps(airflow: AirflowCluster, asset: int) -> list[int]:
    return sorted(event["extra"]["payload"]["step"] for event in events_about(airflow, asset))


def only_run(airflow: AirflowCluster, dag_id: str) -> str:
    runs: list[str] = []

    def look() -> bool:
        runs[:] = [r["dag_run_id"] for r in airflow.request("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]]
        return bool(runs)

    wait_until(look, f"{dag_id} is started")
    (run_id,) = runs
    return run_id
