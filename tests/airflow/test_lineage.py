"""What OpenLineage is told, asked for the way Airflow's own listener asks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.openlineage.extractors.manager import ExtractorManager
from airflow.sdk import AssetAlias
from airflow.sdk.execution_time.context import OutletEventAccessors
from airflow.utils.state import TaskInstanceState

from airflow_cortex_training.operators.checkpoints import (
    CortexTrainingExportOperator,
    CortexTrainingLoadOperator,
    CortexTrainingPublishOperator,
    CortexTrainingSaveOperator,
)
from airflow_cortex_training.operators.datasets import CortexTrainingBuildDatasetOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.operators.training import CortexTrainingForwardBackwardOperator
from cortex_training.publication import Entry, PublicationLog, SaveManifest
from tests.airflow.test_operators import client, job_id  # noqa: F401

ROWS = [(f"What comes after {n}?", f"After {n} comes {n + 1}.") for n in range(20)]


def _told(task: Any) -> Any:
    return ExtractorManager().extract_metadata(
        dagrun=SimpleNamespace(run_id="manual__1"),
        task=task,
        task_instance_state=TaskInstanceState.SUCCESS,
        task_instance=None,
    )


def test_tables_of_the_query_become_the_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task_run: Any) -> None:
    from airflow.providers.snowflake.hooks.snowflake import SnowflakeHook

    from cortex_training.local.models import model_folder

    snowflake = {"conn_type": "snowflake", "login": "u", "password": "p", "schema": "PUBLIC"}
    snowflake["extra"] = {"account": "acme-prod", "database": "SALES", "warehouse": "W"}  # type: ignore[assignment]
    monkeypatch.setenv("AIRFLOW_CONN_SF", json.dumps(snowflake))
    monkeypatch.setattr(SnowflakeHook, "get_conn", lambda self: _Rows())
    task = CortexTrainingBuildDatasetOperator(
        task_id="build",
        sql="SELECT PROMPT, COMPLETION FROM FINETUNE_ROWS JOIN OTHER.CUSTOMERS USING (ID) ORDER BY 1",
        sql_conn_id="sf",
        out=str(tmp_path / "dataset"),
        tokenizer=str(model_folder("tiny")),
        max_seq_len=128,
        outlets=[AssetAlias("training-data")],
    )
    events = OutletEventAccessors()
    built = task.execute({**task_run().context(), "outlet_events": events})
    (event,) = events[AssetAlias("training-data")].asset_alias_events
    assert event.dest_asset_key.uri == f"file://{built['manifest']}"
    assert event.extra["content_sha256"] == built["content_sha256"]

    told = _told(task)
    assert {(i.namespace, i.name) for i in told.inputs} == {
        ("snowflake://acme-prod", "SALES.PUBLIC.FINETUNE_ROWS"),
        ("snowflake://acme-prod", "SALES.OTHER.CUSTOMERS"),
    }
    (output,) = told.outputs
    assert (output.namespace, output.name) == ("file", built["manifest"])
    assert output.facets["version"].datasetVersion == built["content_sha256"]
    assert output.outputFacets["outputStatistics"].rowCount == len(ROWS)
    assert "FINETUNE_ROWS" in told.job_facets["sql"].query


def test_a_dataset_that_was_not_built_is_not_told(tmp_path: Path) -> None:
    task = CortexTrainingBuildDatasetOperator(
        task_id="build", sql="SELECT 1", sql_conn_id="sf", out=str(tmp_path), tokenizer=str(tmp_path), max_seq_len=8
    )
    told = _told(task)
    assert told is None or (not told.inputs and not told.outputs)


def test_a_training_run_that_ended_in_the_triggerer_names_its_dataset_job_and_publication(
    connection: Any, task_run: Any
) -> None:
    conn = connection()
    plan = {"root": "/mnt/runs/r1", "dataset": "/mnt/datasets/d1/manifest.json"}
    task = CortexTrainingTrainOperator(task_id="train", conn_id=conn, plan=plan, deferrable=True)
    entry = Entry(1, 4, "exec/a/cp_1").name
    result = {
        "root": "/mnt/runs/r1",
        "job_id": "job-1",
        "steps": 4,
        "first_loss": 2.0,
        "last_loss": 1.0,
        "entry": entry,
    }
    task.execute_complete(task_run().context(), {"status": "trained", "root": "/mnt/runs/r1", "result": result})

    told = _told(task)
    assert [(i.namespace, i.name) for i in told.inputs] == [("file", "/mnt/datasets/d1/manifest.json")]
    output, weights = told.outputs
    assert (output.namespace, output.name) == ("file", "/mnt/runs/r1")
    assert output.facets["version"].datasetVersion == entry
    query = told.run_facets["externalQuery"]
    assert query.externalQueryId == "job-1"
    assert query.source == "cortex-training://acme.example/TRAINING/PUBLIC/cortex-training"
    # Where a save of the job, which an export reads, goes on.
    assert (weights.namespace, weights.name) == (query.source, "job-1")


def test_a_publication_names_its_files_and_its_entry(tmp_path: Path, task_run: Any) -> None:
    log = PublicationLog(str(tmp_path))
    (tmp_path / "exec/a/cp_1").mkdir(parents=True)
    SaveManifest("job-1", "cp_1", "weights-only", 4).write(log.store, "exec/a/cp_1")
    task = CortexTrainingPublishOperator(task_id="publish", root=str(tmp_path), save="exec/a/cp_1", step=4, epoch=1)
    published = task.execute(task_run().context())

    told = _told(task)
    assert [i.name for i in told.inputs] == [f"{tmp_path}/exec/a/cp_1"]
    assert [(o.name, o.facets["version"].datasetVersion) for o in told.outputs] == [(str(tmp_path), published["entry"])]


def test_an_export_names_the_services_checkpoint_and_what_was_written(connection: Any) -> None:
    task = CortexTrainingExportOperator(
        task_id="export", conn_id=connection(), job_id="job-1", checkpoint_id="cp_1", root="/mnt/models"
    )
    result = {"save": "exec/a/cp_1", "path": "/mnt/models/exec/a/cp_1", "files": 3, "bytes": 99, "epoch": 1}
    task._exported = (result, task.hook.settings())

    told = _told(task)
    service = "cortex-training://acme.example/TRAINING/PUBLIC/cortex-training"
    assert [(i.namespace, i.name) for i in told.inputs] == [(service, "job-1/cp_1")]
    (output,) = told.outputs
    assert (output.name, output.facets["version"].datasetVersion) == ("/mnt/models/exec/a/cp_1", "cp_1")
    written = output.outputFacets["outputStatistics"]
    assert (written.fileCount, written.size) == (3, 99)


def test_what_a_job_was_trained_on_leads_to_what_it_saved(
    task_run: Any,
    service_connection: str,
    local_service: Any,
    job_id: str,  # noqa: F811
    manifest: str,
) -> None:
    job = {"conn_id": service_connection, "job_id": job_id}
    forward_backward = CortexTrainingForwardBackwardOperator(
        task_id="fb", **job, dataset=manifest, micro_batch_size=2, deferrable=False
    )
    save = CortexTrainingSaveOperator(task_id="save", **job, deferrable=False)
    # Nothing was sent yet.
    assert not _told(forward_backward).outputs
    task_run("fb").execute(forward_backward)
    checkpoint = f"{job_id}/{task_run('save').execute(save)['checkpoint_id']}"
    load = CortexTrainingLoadOperator(task_id="load", **job, checkpoint_id=checkpoint.rpartition("/")[2])
    task_run("load").execute(load)

    at = local_service.base_url.partition("//")[2]
    service = f"cortex-training://{at}/{local_service.database}/{local_service.schema}/cortex-training"
    for task, read, written in (
        (forward_backward, ("file", manifest), (service, job_id)),
        (save, (service, job_id), (service, checkpoint)),
        (load, (service, checkpoint), (service, job_id)),
    ):
        told = _told(task)
        assert [(i.namespace, i.name) for i in told.inputs] == [read]
        assert [(o.namespace, o.name) for o in told.outputs] == [written]
        assert told.run_facets["externalQuery"].externalQueryId == job_id


class _Rows:
    """A DB-API connection and cursor in one."""

    description = (("PROMPT",), ("COMPLETION",))

    def __init__(self) -> None:
        self._left = list(ROWS)

    def cursor(self) -> _Rows:
        return self

    def execute(self, sql: str) -> None:
        pass

    def fetchone(self) -> Any:
        return self._left.pop(0) if self._left else None

    def fetchmany(self, size: int = 1) -> list[Any]:
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def close(self) -> None:
        pass
