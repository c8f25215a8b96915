"""Two DAGs that data starts: new rows in a table start a training, a new publication starts its evaluation.

    whoever loads the table ──(asset: the table)──> finetune_on_new_rows ──> publication
                                                                                 │
         publications from anywhere ──(asset: the log, watched)──> evaluate_publication ──> answers

Copy this file and set the constants. The DAG that loads the table has `ROWS` among the outlets of its last task. The
evaluation runs for everything that is published in `MODELS`, also from the command line or from Prefect, because a
watcher looks into the log itself. Workers and triggerers must see `ROOT` under the same path.
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Asset, chain, get_current_context, task
from airflow.sdk.exceptions import AirflowSkipException

from airflow_cortex_training.assets import watched_publications
from airflow_cortex_training.operators.checkpoints import (
    CortexTrainingExportOperator,
    CortexTrainingPublishOperator,
    CortexTrainingSaveOperator,
)
from airflow_cortex_training.operators.datasets import CortexTrainingBuildDatasetOperator
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.sampling import CortexTrainingGenerateOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor


def setting(name: str, otherwise: Any) -> Any:
    """FINETUNE_<NAME> of the environment, JSON where it is not plain text; else `otherwise`."""
    text = os.environ.get(f"FINETUNE_{name}", "")
    try:
        return json.loads(text)
    except ValueError:
        return text or otherwise


ROWS = Asset(setting("ROWS_ASSET", "snowflake://myorg-myaccount/TRAINING/PUBLIC/TRAINING_EXAMPLES"))
ROOT = setting("ROOT", "/mnt/finetune")
TOKENIZER = setting("TOKENIZER", f"{ROOT}/tokenizer")
MODEL = {"model_name": setting("MODEL_NAME", "Qwen/Qwen3-0.6B"), "seed": 0}
if setting("DTYPE", None):
    MODEL["dtype"] = setting("DTYPE", None)
MAX_SEQ_LEN = setting("MAX_SEQ_LEN", 1024)
BATCH = setting("MICRO_BATCH_SIZE", 8)
PROMPTS = setting("PROMPTS", ["def merge(a, b)\nWhat does heapq.merge do?\n"])

MODELS = f"{ROOT}/models"
QUERY = "SELECT DISTINCT PROMPT, COMPLETION FROM TRAINING_EXAMPLES WHERE SPLIT = 'train' ORDER BY PROMPT, COMPLETION"

TRAINING = {
    "job_type": "training",
    **MODEL,
    "training_config": {
        "optimizer": {"name": "AdamW", "lr": 2e-4},
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "max_seq_len": MAX_SEQ_LEN,
        "n_gpus": 1,
    },
}
SAMPLING = {"job_type": "sampling", **MODEL, "inference_config": {"max_seq_len": MAX_SEQ_LEN, "n_gpus": 1}}

COMMON = {
    "conn_id": setting("CORTEX_CONN_ID", "cortex_training_default"),
    "deferrable": True,
    "retries": 2,
    "retry_delay": timedelta(seconds=30),
}


@task
def folders(run_id: str) -> dict[str, str]:
    """Where this run keeps what it makes."""
    run = "".join(c if c.isalnum() or c in "-_." else "-" for c in run_id)
    for folder in ("datasets", "runs", "models"):
        Path(ROOT, folder).mkdir(exist_ok=True)
    return {"dataset": f"{ROOT}/datasets/{run}", "run": f"{ROOT}/runs/{run}"}


with DAG(
    "finetune_on_new_rows",
    description="New rows in the table become a published checkpoint",
    schedule=ROWS,
    start_date=datetime(2026, 1, 1),
    catchup=False,
    # Rows that arrive while one run trains start the next one, not a second one beside it.
    max_active_runs=1,
    render_template_as_native_obj=True,
    tags=["cortex-training"],
    default_args=COMMON,
):
    here = folders()
    dataset = CortexTrainingBuildDatasetOperator(
        task_id="build_dataset",
        sql_conn_id=setting("SNOWFLAKE_CONN_ID", "snowflake_default"),
        sql=QUERY,
        out=here["dataset"],
        tokenizer=TOKENIZER,
        max_seq_len=MAX_SEQ_LEN,
        overlong="skip",
        inlets=[ROWS],
    )
    create_job = CortexTrainingCreateJobOperator(task_id="create_job", sub_jobs=[TRAINING])
    running = CortexTrainingWaitForRunningSensor(task_id="wait_until_running", job_id=create_job.output)
    train = CortexTrainingTrainOperator(
        task_id="train",
        plan={
            "root": here["run"],
            "dataset": dataset.output["manifest"],
            # Begun in this job; one that is lost is replaced, and `cancel_job` ends whichever there is.
            "job_id": create_job.output,
            "sub_jobs": [TRAINING],
            "when_done": "keep",
            "steps": setting("STEPS", 200),
            "micro_batch_size": BATCH,
            "save_every_steps": setting("SAVE_EVERY_STEPS", 50),
            "learning_rate": {"schedule": "constant", "peak": setting("LEARNING_RATE", 2e-4)},
        },
    )
    trained_job = train.output["job_id"]
    save = CortexTrainingSaveOperator(task_id="save", job_id=trained_job, checkpoint_type="weights-only")
    export = CortexTrainingExportOperator(
        task_id="export", job_id=trained_job, checkpoint_id=save.output["checkpoint_id"], root=MODELS
    )
    publish = CortexTrainingPublishOperator(
        task_id="publish",
        root=MODELS,
        save=export.output["save"],
        step=export.output["global_steps"],
        epoch=export.output["epoch"],
        loss=train.output["last_loss"],
    )
    cancel_job = CortexTrainingCancelJobOperator(
        task_id="cancel_job", job_id=create_job.job_id_output, root=here["run"]
    ).as_teardown(setups=create_job)
    chain(here, dataset, create_job, running, train, save, export, publish, cancel_job)


@task
def published() -> dict[str, Any]:
    """The publication this run is about: the sub-jobs that load it, and where its answers go.

    Several publications may have started one run; the latest is evaluated.
    """
    events = [event for events in get_current_context()["triggering_asset_events"].values() for event in events]
    latest = max((event.extra["payload"] for event in events), key=lambda told: told["entry"])
    if not latest.get("checkpoint_id"):
        # Published from the command line, from files that the service never had.
        raise AirflowSkipException(f"{latest['location']} names no checkpoint of the service: nothing to evaluate here")
    checkpoint = {"source_job_id": latest["job_id"], "checkpoint_id": latest["checkpoint_id"]}
    Path(ROOT, "answers").mkdir(exist_ok=True)
    return {
        "sub_jobs": [{**SAMPLING, "source_checkpoint_info": checkpoint}],
        "answers": f"{ROOT}/answers/{latest['epoch']}-{latest['step']}.jsonl",
    }


with DAG(
    "evaluate_publication",
    description="A new publication answers the prompts it is judged by",
    schedule=watched_publications(MODELS),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    render_template_as_native_obj=True,
    tags=["cortex-training"],
    default_args=COMMON,
):
    subject = published()
    load = CortexTrainingCreateJobOperator(task_id="create_job", sub_jobs=subject["sub_jobs"])
    loaded = CortexTrainingWaitForRunningSensor(task_id="wait_until_running", job_id=load.output)
    answer = CortexTrainingGenerateOperator(
        task_id="answer",
        job_id=load.output,
        prompts=PROMPTS,
        sampling_params={"max_tokens": setting("MAX_NEW_TOKENS", 64), "temperature": 0.0},
        output_path=subject["answers"],
    )
    unload = CortexTrainingCancelJobOperator(task_id="cancel_job", job_id=load.job_id_output)
    chain(subject, load, loaded, answer, unload.as_teardown(setups=load))
