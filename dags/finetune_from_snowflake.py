"""Fine-tune a model on rows of a Snowflake table, every night, and publish what came out.

    rows in a table -> dataset -> job -> training -> checkpoint -> export -> publication
                                    \\-> completions before and after, from the same prompts -> evaluation

Copy this file, set the defaults below or the FINETUNE_* variables, and make two connections: one of type Snowflake, one
of type Cortex Training. Workers and triggerers must see `root` under the same path. The job is cancelled at the end
whatever happens in between, and nothing is asked of the training service before there are rows to train on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from airflow.providers.common.sql.operators.sql import SQLExecuteQueryOperator
from airflow.sdk import DAG, Param, chain, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.operators.checkpoints import (
    CortexTrainingExportOperator,
    CortexTrainingPublishOperator,
    CortexTrainingSaveOperator,
)
from airflow_cortex_training.operators.datasets import CortexTrainingBuildDatasetOperator
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.sampling import CortexTrainingGenerateOperator, CortexTrainingWeightSyncOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor
from cortex_training.errors import ConfigurationError
from cortex_training.training import TrainingPlan

# What is trained on. Change it: join, filter, deduplicate, take last week only. It has to end up with `prompt` and
# `completion`, or `messages`, or `text`, and should leave out what the model is evaluated on.
TRANSFORM = """
CREATE OR REPLACE TABLE {{ params.training_table }} AS
SELECT DISTINCT PROMPT, COMPLETION
FROM {{ params.source_table }}
WHERE SPLIT = 'train'
"""

# In an order that does not change: rows in another order are another dataset, and a training run keeps to one.
ROWS = "SELECT PROMPT, COMPLETION FROM {{ params.training_table }} ORDER BY PROMPT, COMPLETION"

LORA = {
    "peft_type": "Lora",
    "task_type": "CAUSAL_LM",
    "r": 16,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def default(name: str, otherwise: Any) -> Any:
    """FINETUNE_<NAME> as JSON (or as plain text where that is no JSON), else `otherwise`."""
    text = os.environ.get(f"FINETUNE_{name.upper()}")
    if text is None:
        return otherwise
    try:
        return json.loads(text)
    except ValueError:
        return text


def param(name: str, otherwise: Any, kind: str | list[str], **schema: Any) -> Param:
    return Param(default(name, otherwise), type=kind, **schema)


PARAMS = {
    "snowflake_conn_id": param("snowflake_conn_id", "snowflake_default", "string"),
    "cortex_conn_id": param("cortex_conn_id", "cortex_training_default", "string"),
    "source_table": param(
        "source_table", "TRAINING_EXAMPLES", "string", description="has PROMPT, COMPLETION and SPLIT"
    ),
    "training_table": param("training_table", "FINETUNE_ROWS", "string", description="made anew from the source table"),
    "root": param("root", "/mnt/finetune", "string", description="folder that workers and triggerers share"),
    "tokenizer": param(
        "tokenizer", "/mnt/finetune/tokenizer", "string", description="folder with the model's tokenizer.json"
    ),
    "model_name": param("model_name", "Qwen/Qwen3-0.6B", "string"),
    "lora": param("lora", LORA, ["object", "null"], description="null trains all weights"),
    "dtype": param("dtype", None, ["string", "null"]),
    "n_gpus": param("n_gpus", 1, "integer", minimum=1),
    "max_seq_len": param("max_seq_len", 1024, "integer", minimum=2),
    "overlong": param("overlong", "error", "string", enum=["error", "truncate", "skip"]),
    "seed": param("seed", 0, "integer", minimum=0),
    "steps": param("steps", 200, "integer", minimum=1),
    "micro_batch_size": param("micro_batch_size", 8, "integer", minimum=1),
    "micro_batches_per_step": param("micro_batches_per_step", 1, "integer", minimum=1),
    "learning_rate": param("learning_rate", 2e-4, "number", exclusiveMinimum=0),
    "warmup_steps": param("warmup_steps", 4, "integer", minimum=0),
    "save_every_steps": param("save_every_steps", 50, "integer", minimum=1),
    "prompts": param(
        "prompts",
        ["def merge(a, b)\nWhat does heapq.merge do?\n"],
        "array",
        minItems=1,
        description="shown before and after",
    ),
    "references": param(
        "references", [], "array", description="what each prompt should be answered, for the evaluation; may be empty"
    ),
    "max_new_tokens": param("max_new_tokens", 64, "integer", minimum=1),
}


def training_plan(params: Mapping[str, Any], *, root: Any, dataset: Any, job_id: Any, sub_jobs: Any) -> dict[str, Any]:
    """The plan of `train`, of values or of the templates that stand for them.

    It begins in the job that is there, and may replace it: a job that is lost at night costs no night.
    """
    names = ("steps", "seed", "micro_batch_size", "micro_batches_per_step", "save_every_steps")
    return {
        "root": root,
        "dataset": dataset,
        "job_id": job_id,
        "sub_jobs": sub_jobs,
        # The tasks after it work with the job; `cancel_job` ends it.
        "when_done": "keep",
        **{name: params[name] for name in names},
        "learning_rate": {
            "schedule": "linear",
            "peak": params["learning_rate"],
            "warmup_steps": params["warmup_steps"],
        },
    }


def check(params: Mapping[str, Any], sub_jobs: list[dict[str, Any]]) -> None:
    """Fail on a parameter that `train` would refuse, when a job had been created and waited for."""
    try:
        root = params["root"]
        plan = training_plan(params, root=root, dataset=root, job_id="not-created-yet", sub_jobs=sub_jobs)
        TrainingPlan.from_dict(plan).validate()
    except ConfigurationError as error:
        raise AirflowFailException(f"the DAG's parameters: {error}") from error


@task
def settle(params: dict[str, Any], run_id: str) -> dict[str, Any]:
    """Folders of this run, made, and the sub-jobs of its job, when the parameters are usable."""
    root = Path(params["root"])
    if not root.is_dir():
        raise AirflowFailException(
            f"root {root} is not a folder here: create or mount it, or set the DAG's parameter root"
        )
    if len(params["references"]) not in (0, len(params["prompts"])):
        raise AirflowFailException(
            f"the DAG's parameters: {len(params['references'])} references for {len(params['prompts'])} prompts: give "
            "one for each prompt, or none"
        )
    adapter = {"peft_config": params["lora"]} if params["lora"] else {}
    shared = {"model_name": params["model_name"], "seed": params["seed"]}
    if params["dtype"]:
        shared["dtype"] = params["dtype"]
    sized = {"max_seq_len": params["max_seq_len"], "n_gpus": params["n_gpus"]}
    training = {
        "optimizer": {"name": "AdamW", "lr": params["learning_rate"]},
        "train_batch_size": params["micro_batch_size"],
        "gradient_clipping": 1.0,
    }
    sub_jobs = [
        {"job_type": "training", **shared, "training_config": {**training, **sized, **adapter}},
        {"job_type": "sampling", **shared, "inference_config": {**sized, **adapter}},
    ]
    check(params, sub_jobs)
    run = "".join(c if c.isalnum() or c in "-_." else "-" for c in run_id)
    for folder in ("datasets", "runs", "models", "samples"):
        (root / folder).mkdir(exist_ok=True)
    return {
        "dataset": f"{root}/datasets/{run}",
        "run": f"{root}/runs/{run}",
        "models": f"{root}/models",
        "before": f"{root}/samples/{run}-before.jsonl",
        "after": f"{root}/samples/{run}-after.jsonl",
        "evaluation": f"{root}/samples/{run}-evaluation.json",
        "sub_jobs": sub_jobs,
    }


def overlap(answer: str, reference: str) -> float:
    """How much of two texts is the same: the F1 of their words, 0 to 1, as question answering is scored."""
    given, wanted = Counter(answer.lower().split()), Counter(reference.lower().split())
    shared = (given & wanted).total()
    return 2 * shared / (given.total() + wanted.total()) if shared else 0.0


@task
def evaluate(before: str, after: str, references: list[str], out: str) -> dict[str, Any]:
    """What the training changed in the answers. Change it: call your own metric, fail where the model got worse."""
    answers = {
        when: [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
        for when, path in (("before", before), ("after", after))
    }
    changed = sum(a != b for a, b in zip(answers["before"], answers["after"], strict=True))
    found: dict[str, Any] = {"prompts": len(answers["after"]), "changed": changed}
    if references:
        for when, texts in answers.items():
            found[f"overlap_{when}"] = round(fmean(map(overlap, texts, references)), 4)
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
    return found


with DAG(
    "finetune_from_snowflake",
    description="Snowflake rows become a fine-tuned, published checkpoint",
    schedule=os.environ.get("FINETUNE_SCHEDULE") or None,
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
) as dag:
    settled = settle()

    select_rows = SQLExecuteQueryOperator(
        task_id="select_rows",
        conn_id="{{ params.snowflake_conn_id }}",
        sql=TRANSFORM,
        retries=1,
    )

    build_dataset = CortexTrainingBuildDatasetOperator(
        task_id="build_dataset",
        sql_conn_id="{{ params.snowflake_conn_id }}",
        sql=ROWS,
        out=settled["dataset"],
        tokenizer="{{ params.tokenizer }}",
        max_seq_len="{{ params.max_seq_len }}",
        overlong="{{ params.overlong }}",
        seed="{{ params.seed }}",
    )

    create_job = CortexTrainingCreateJobOperator(task_id="create_job", sub_jobs=settled["sub_jobs"])

    wait_until_running = CortexTrainingWaitForRunningSensor(
        task_id="wait_until_running", job_id=create_job.output, timeout=6 * 3600
    )

    prompts = {
        "prompts": "{{ params.prompts }}",
        "sampling_params": {"max_tokens": "{{ params.max_new_tokens }}", "temperature": 0.0},
    }
    generate_before = CortexTrainingGenerateOperator(
        task_id="generate_before", job_id=create_job.output, output_path=settled["before"], **prompts
    )

    train = CortexTrainingTrainOperator(
        task_id="train",
        plan=training_plan(
            {name: f"{{{{ params.{name} }}}}" for name in PARAMS},
            root=settled["run"],
            dataset=build_dataset.output["manifest"],
            job_id=create_job.output,
            sub_jobs=settled["sub_jobs"],
        ),
    )
    # The job that trained to the end: another one, if the first was lost.
    trained_job = train.output["job_id"]

    save = CortexTrainingSaveOperator(task_id="save", job_id=trained_job, checkpoint_type="weights-only")

    export = CortexTrainingExportOperator(
        task_id="export",
        job_id=trained_job,
        checkpoint_id=save.output["checkpoint_id"],
        root=settled["models"],
        metrics={"first_loss": train.output["first_loss"], "last_loss": train.output["last_loss"]},
    )

    publish = CortexTrainingPublishOperator(
        task_id="publish",
        root=settled["models"],
        save=export.output["save"],
        step=export.output["global_steps"],
        epoch=export.output["epoch"],
        loss=train.output["last_loss"],
    )

    weight_sync = CortexTrainingWeightSyncOperator(task_id="weight_sync", job_id=trained_job)

    generate_after = CortexTrainingGenerateOperator(
        task_id="generate_after", job_id=trained_job, output_path=settled["after"], **prompts
    )

    evaluated = evaluate(settled["before"], settled["after"], "{{ params.references }}", settled["evaluation"])

    cancel_job = CortexTrainingCancelJobOperator(
        task_id="cancel_job", job_id=create_job.job_id_output, root=settled["run"]
    ).as_teardown(setups=create_job)

    chain(settled, select_rows, build_dataset, create_job, wait_until_running, generate_before, train, save, export)
    chain(export, publish, weight_sync, generate_after, [evaluated, cancel_job])
