"""The nightly fine-tuning from single operations: every forward-backward and every optimizer step is a task.

For when something has to happen between steps that a training run does not do: another loss, a batch that depends on
what came before, an approval. Each task costs the scheduler some seconds; for more than a few dozen steps take
`CortexTrainingTrainOperator`, which is one task and survives more (see `finetune_from_snowflake`).

No retry repeats a step: `expected_global_step` says what the job's counter must be after each one. When the reply of
a step was lost the pipeline fails, the teardown frees the GPUs, and the next run starts from the table again.
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, chain, task

from airflow_cortex_training.operators.checkpoints import (
    CortexTrainingExportOperator,
    CortexTrainingPublishOperator,
    CortexTrainingSaveOperator,
)
from airflow_cortex_training.operators.datasets import CortexTrainingBuildDatasetOperator
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.training import (
    CortexTrainingForwardBackwardOperator,
    CortexTrainingStepOperator,
)
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor

STEPS = int(os.environ.get("FINETUNE_SINGLE_STEPS", "3"))
MICRO_BATCHES_PER_STEP = 2
QUERY = "SELECT DISTINCT PROMPT, COMPLETION FROM TRAINING_EXAMPLES WHERE SPLIT = 'train' ORDER BY PROMPT, COMPLETION"


def default(name: str, otherwise: Any) -> Any:
    """FINETUNE_<NAME> of the environment, JSON where it is not plain text; else `otherwise`."""
    text = os.environ.get(f"FINETUNE_{name}", "")
    try:
        return json.loads(text)
    except ValueError:
        return text or otherwise


PARAMS = {
    "snowflake_conn_id": Param(default("SNOWFLAKE_CONN_ID", "snowflake_default"), type="string"),
    "cortex_conn_id": Param(default("CORTEX_CONN_ID", "cortex_training_default"), type="string"),
    "root": Param(default("ROOT", "/mnt/finetune"), type="string", description="folder that workers share"),
    "tokenizer": Param(default("TOKENIZER", "/mnt/finetune/tokenizer"), type="string"),
    "model_name": Param(default("MODEL_NAME", "Qwen/Qwen3-0.6B"), type="string"),
    "dtype": Param(default("DTYPE", "bfloat16"), type="string"),
    "max_seq_len": Param(default("MAX_SEQ_LEN", 1024), type="integer"),
    "micro_batch_size": Param(default("MICRO_BATCH_SIZE", 8), type="integer"),
    "learning_rate": Param(default("LEARNING_RATE", 2e-4), type="number"),
}

SUB_JOB = {
    "job_type": "training",
    "model_name": "{{ params.model_name }}",
    "dtype": "{{ params.dtype }}",
    "seed": 0,
    "training_config": {
        "optimizer": {"name": "AdamW", "lr": "{{ params.learning_rate }}"},
        "train_batch_size": "{{ params.micro_batch_size }}",
        "gradient_clipping": 1.0,
        "max_seq_len": "{{ params.max_seq_len }}",
        "n_gpus": 1,
    },
}


@task
def folders(params: dict[str, Any], run_id: str) -> dict[str, str]:
    run = "".join(c if c.isalnum() or c in "-_." else "-" for c in run_id)
    for folder in ("datasets", "models"):
        Path(params["root"], folder).mkdir(exist_ok=True)
    return {"dataset": f"{params['root']}/datasets/{run}", "models": f"{params['root']}/models"}


with DAG(
    "finetune_step_by_step",
    description="The nightly fine-tuning with a task for every operation",
    schedule=None,
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    render_template_as_native_obj=True,
    params=PARAMS,
    tags=["cortex-training"],
    default_args={
        "conn_id": "{{ params.cortex_conn_id }}",
        "deferrable": True,
        "retries": 2,
        "retry_delay": timedelta(seconds=30),
    },
):
    here = folders()
    dataset = CortexTrainingBuildDatasetOperator(
        task_id="build_dataset",
        sql_conn_id="{{ params.snowflake_conn_id }}",
        sql=QUERY,
        out=here["dataset"],
        tokenizer="{{ params.tokenizer }}",
        max_seq_len="{{ params.max_seq_len }}",
        overlong="skip",
    )
    create_job = CortexTrainingCreateJobOperator(task_id="create_job", sub_jobs=[SUB_JOB])
    running = CortexTrainingWaitForRunningSensor(task_id="wait_until_running", job_id=create_job.output)
    chain(here, dataset, create_job, running)

    before: Any = running
    for step in range(1, STEPS + 1):
        for micro_batch in range(MICRO_BATCHES_PER_STEP):
            forward_backward = CortexTrainingForwardBackwardOperator(
                task_id=f"forward_backward_{step}_{micro_batch}",
                job_id=create_job.output,
                dataset=dataset.output["manifest"],
                step=step,
                micro_batch=micro_batch,
                micro_batch_size="{{ params.micro_batch_size }}",
                micro_batches_per_step=MICRO_BATCHES_PER_STEP,
            )
            # One after the other: nothing promises an order among calls that wait together.
            before = before >> forward_backward
        before = before >> CortexTrainingStepOperator(
            task_id=f"step_{step}", job_id=create_job.output, expected_global_step=step
        )

    save = CortexTrainingSaveOperator(task_id="save", job_id=create_job.output, checkpoint_type="weights-only")
    export = CortexTrainingExportOperator(
        task_id="export",
        job_id=create_job.output,
        checkpoint_id=save.output["checkpoint_id"],
        root=here["models"],
        metrics={"last_loss": forward_backward.output["loss"]},
    )
    publish = CortexTrainingPublishOperator(
        task_id="publish",
        root=here["models"],
        save=export.output["save"],
        step=export.output["global_steps"],
        epoch=export.output["epoch"],
        loss=forward_backward.output["loss"],
    )
    cancel_job = CortexTrainingCancelJobOperator(task_id="cancel_job", job_id=create_job.job_id_output)
    chain(before, save, export, publish, cancel_job.as_teardown(setups=create_job))
