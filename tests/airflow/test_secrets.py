"""The token is nowhere but in the connection and in the header: not stored, not sent along, not logged, not shown."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.sampling import CortexTrainingGenerateOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor
from tests.airflow.test_operators import SAMPLING, TRAINING

PAT = "pat-0123456789-very-secret"
PROMPT = "A prompt that nobody but the service may read"


def test_a_whole_pipeline_leaves_no_token(
    task_run, service_connection, manifest, tmp_path: Path, no_grace, caplog, capfd
) -> None:
    caplog.set_level(logging.DEBUG)
    runs = {name: task_run(name) for name in ("create", "wait", "generate", "train", "cancel")}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(PROMPT) + "\n")
    common = {"conn_id": service_connection}

    job_id = runs["create"].execute(
        CortexTrainingCreateJobOperator(task_id="create", sub_jobs=[TRAINING, SAMPLING], **common)
    )
    runs["wait"].execute(
        CortexTrainingWaitForRunningSensor(task_id="wait", job_id=job_id, deferrable=True, inline_s=0.1, **common)
    )
    runs["generate"].execute(
        CortexTrainingGenerateOperator(
            task_id="generate",
            job_id=job_id,
            prompts_path=str(prompts),
            output_path=str(tmp_path / "samples.jsonl"),
            sampling_params={"max_tokens": 2, "temperature": 0.0},
            deferrable=True,
            inline_s=0.0,
            **common,
        )
    )
    plan = {"root": str(tmp_path / "run"), "dataset": manifest, "steps": 1, "micro_batch_size": 2, "job_id": job_id}
    runs["train"].execute(CortexTrainingTrainOperator(task_id="train", plan=plan, deferrable=True, **common))
    runs["cancel"].execute(CortexTrainingCancelJobOperator(task_id="cancel", job_id=job_id, **common))

    kept = [caplog.text, *capfd.readouterr()]
    for run in runs.values():
        kept += [json.dumps([run.store.writes, run.xcoms, run.events])]
        kept += [json.dumps(deferral.trigger.serialize()) + repr(deferral.trigger) for deferral in run.deferrals]
    kept += [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert all(PAT not in text for text in kept)
    assert all(PROMPT not in text for text in kept)
    for run in runs.values():
        sizes = [len(json.dumps(document)) for document in (*run.store.writes, *run.events)]
        assert max(sizes, default=0) < 1000
