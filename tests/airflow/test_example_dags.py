"""What every DAG that users copy keeps to, read from the DAGs themselves; tests/live runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, Asset
from airflow.sdk.exceptions import AirflowSkipException

from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator

FOLDER = Path(__file__).parents[2] / "dags"
FILES = sorted(FOLDER.glob("*.py"))


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _dags(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[DAG]:
    found: list[DAG] = []
    leave = DAG.__exit__

    def collect(self: DAG, *raised: object) -> None:
        found.append(self)
        leave(self, *raised)

    monkeypatch.setattr(DAG, "__exit__", collect)
    _module(path)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_job_has_a_teardown_that_cancels_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dags = _dags(path, monkeypatch)
    assert dags
    for dag in dags:
        created = [t for t in dag.tasks if isinstance(t, CortexTrainingCreateJobOperator)]
        for create in created:
            assert create.is_setup
            teardowns = [t for t in create.downstream_list if isinstance(t, CortexTrainingCancelJobOperator)]
            assert any(t.is_teardown for t in teardowns), f"{dag.dag_id}: nobody cancels the job of {create.task_id}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_defaults_are_those_of_a_deployment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dag in _dags(path, monkeypatch):
        assert dag.catchup is False
        assert "cortex-training" in dag.tags
        for task in dag.tasks:
            # Nothing that spends a person's or a GPU's time depends on a schedule that nobody set.
            assert task.start_date is not None
            # A task that never gets to its own code (its worker could not reach Airflow) ends the night without one.
            assert task.retries >= 1
            assert task.retry_delay.total_seconds() >= 30


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_ROOT", str(tmp_path))
    monkeypatch.setenv("FINETUNE_STEPS", "7")
    module = _module(FOLDER / "finetune_on_new_rows.py")
    assert str(tmp_path) == module.ROOT
    assert module.train.plan["steps"] == 7
    assert module.dataset.inlets == [Asset("snowflake://myorg-myaccount/TRAINING/PUBLIC/TRAINING_EXAMPLES")]


def test_a_publication_without_a_checkpoint_of_the_service_is_not_evaluated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETUNE_ROOT", str(tmp_path))
    module = _module(FOLDER / "finetune_on_new_rows.py")
    told = [{"entry": "1-4", "epoch": 1, "step": 4, "job_id": "j", "checkpoint_id": "c"}]

    def evaluate() -> dict[str, Any]:
        events = [SimpleNamespace(extra={"payload": one}) for one in told]
        monkeypatch.setattr(module, "get_current_context", lambda: {"triggering_asset_events": {"models": events}})
        return dict(module.published.function())

    (sub_job,) = evaluate()["sub_jobs"]
    assert sub_job["source_checkpoint_info"] == {"source_job_id": "j", "checkpoint_id": "c"}
    # A trainer's own save, which the command line published, names none.
    told.append({"entry": "1-5", "epoch": 1, "step": 5, "location": "/mnt/models/exec/5"})
    with pytest.raises(AirflowSkipException, match="/mnt/models/exec/5"):
        evaluate()
