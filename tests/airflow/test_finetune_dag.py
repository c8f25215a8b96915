"""The DAG that users copy: what its first task refuses, before anything is asked of a service."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError

from cortex_training.training import TrainingPlan

FILE = Path(__file__).parents[2] / "dags" / "finetune_from_snowflake.py"


@pytest.fixture(scope="module")
def pipeline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune_from_snowflake_dag", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def params(pipeline: ModuleType, tmp_path: Path) -> dict[str, Any]:
    defaults = {name: param.value for name, param in pipeline.PARAMS.items()}
    return {**defaults, "root": str(tmp_path)}


def test_usable_parameters_settle(pipeline: ModuleType, params: dict[str, Any]) -> None:
    settled = pipeline.settle.function(params, "scheduled__2026-01-01T00:00:00+00:00")
    assert settled["run"].startswith(f"{params['root']}/runs/")
    assert [sub_job["job_type"] for sub_job in settled["sub_jobs"]] == ["training", "sampling"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 3, "warmup_steps": 4}, "learning_rate.warmup_steps"),
        ({"learning_rate": float("nan")}, "learning_rate.peak"),
        ({"steps": 0}, "plan.steps"),
        ({"micro_batch_size": "8"}, "plan.micro_batch_size"),
        ({"root": "/no/such/folder"}, "root /no/such/folder"),
        ({"prompts": ["a", "b"], "references": ["c"]}, "1 references for 2 prompts"),
    ],
)
def test_unusable_parameters_end_the_run_at_once(
    pipeline: ModuleType, params: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(AirflowFailException, match=named):
        pipeline.settle.function({**params, **changes}, "run")
    assert list(Path(params["root"]).iterdir()) == []


def test_a_run_without_prompts_is_refused_when_it_is_triggered(pipeline: ModuleType) -> None:
    with pytest.raises(ParamValidationError, match="non-empty"):
        pipeline.PARAMS["prompts"].resolve([])


def test_what_was_checked_is_what_is_trained(pipeline: ModuleType, params: dict[str, Any]) -> None:
    template = pipeline.dag.get_task("train").plan
    sub_jobs = pipeline.settle.function(params, "run")["sub_jobs"]
    checked = pipeline.training_plan(params, root="r", dataset="d", job_id="j", sub_jobs=sub_jobs)
    assert template.keys() == checked.keys()
    assert template["learning_rate"].keys() == checked["learning_rate"].keys()
    assert template["steps"] == "{{ params.steps }}"
    assert TrainingPlan.from_dict(checked).steps == params["steps"]


def test_the_evaluation_compares_the_answers_with_the_references(pipeline: ModuleType, tmp_path: Path) -> None:
    for name, texts in (("before", ["No idea.", "It sorts"]), ("after", ["It merges sorted inputs", "It sorts"])):
        lines = [json.dumps({"prompt": "p", "text": text}) for text in texts]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / name) for name in ("before", "after")]
    out = tmp_path / "evaluation.json"
    found = pipeline.evaluate.function(*files, ["it merges inputs", "it sorts"], str(out))
    assert found == {"prompts": 2, "changed": 1, "overlap_before": 0.5, "overlap_after": round((6 / 7 + 1) / 2, 4)}
    assert json.loads(out.read_text()) == found
    assert pipeline.evaluate.function(*files, [], str(out)) == {"prompts": 2, "changed": 1}
