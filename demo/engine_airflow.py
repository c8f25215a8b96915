"""The main job on a real Airflow: api-server, scheduler, dag-processor, triggerer, LocalExecutor."""

from __future__ import annotations

import json
import time
from pathlib import Path

from demo.airflow_cluster import TERMINAL_RUN_STATES, AirflowCluster, ClusterError, SlotSampler
from demo.follow import States, Steps
from demo.recipes import DATABASE, SCHEMA, TABLE
from demo.stage import Outcome, Stage

DAG_ID = "finetune_from_snowflake"
DAGS = Path(__file__).resolve().parent.parent / "dags"
_TIMEOUT_S = 1800.0


def run_pipeline(stage: Stage) -> Outcome:
    """Start Airflow, run the DAG that users copy, collect what it left. Raises `ClusterError` when the DAG fails."""
    cluster = AirflowCluster(
        stage.work / "airflow",
        DAGS,
        connections={
            "snowflake_default": json.loads(stage.snowflake.airflow_connection_json(DATABASE, SCHEMA)),
            "cortex_training_default": {
                "conn_type": "cortex_training",
                "host": stage.service.base_url,
                "schema": SCHEMA,
                "password": stage.service.token,
                "extra": {"database": DATABASE},
            },
        },
    )
    stage.servers.callback(cluster.stop)
    cluster.start()
    stage.say(f"Airflow is healthy on {cluster.url}")
    run_id = cluster.trigger_dag(DAG_ID, _parameters(stage))
    with SlotSampler(cluster, DAG_ID, run_id) as slots:
        _follow(stage, cluster, run_id)
    run_root = Path(cluster.xcom(DAG_ID, run_id, "train")["root"])
    return Outcome(
        run_root=run_root,
        model=Path(cluster.xcom(DAG_ID, run_id, "export")["path"]),
        entry=cluster.xcom(DAG_ID, run_id, "publish")["entry"],
        before=_texts(Path(cluster.xcom(DAG_ID, run_id, "generate_before")["output_path"])),
        after=_texts(Path(cluster.xcom(DAG_ID, run_id, "generate_after")["output_path"])),
        job_ids=[cluster.xcom(DAG_ID, run_id, "train")["job_id"]],
        worker_slot_s=slots.total,
        look_at=f"{cluster.url}/dags/{DAG_ID}/runs/{run_id}",
    )


def _parameters(stage: Stage) -> dict[str, object]:
    recipe = stage.recipe
    return {
        "source_table": TABLE,
        "root": str(stage.work),
        "tokenizer": str(stage.tokenizer),
        "model_name": recipe.model_name,
        "lora": recipe.lora,
        "dtype": "float32",
        "max_seq_len": recipe.max_seq_len,
        "seed": 1,
        "steps": recipe.steps,
        "micro_batch_size": recipe.micro_batch_size,
        "learning_rate": recipe.learning_rate,
        "warmup_steps": recipe.warmup_steps,
        "save_every_steps": recipe.save_every_steps,
        "prompts": stage.sample_prompts,
        "references": stage.sample_references,
        "max_new_tokens": recipe.max_new_tokens,
    }


def _follow(stage: Stage, cluster: AirflowCluster, run_id: str) -> None:
    states, steps = States(stage.say), Steps(stage.runs_root, stage.recipe.steps, stage.say)
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        state = cluster.run_state(DAG_ID, run_id)
        tasks = cluster.task_states(DAG_ID, run_id)
        states.look(tasks)
        steps.look()
        if state in TERMINAL_RUN_STATES:
            break
        if time.monotonic() > deadline:
            raise ClusterError(f"{DAG_ID} {run_id} is {state} after {_TIMEOUT_S:.0f} s: {tasks}")
        time.sleep(1.0)
    if state != "success":
        failed = [task for task, how in tasks.items() if how == "failed"]
        logs = "\n".join(cluster.task_log(DAG_ID, run_id, task)[-3000:] for task in failed)
        raise ClusterError(f"{DAG_ID} {run_id} ended {state}; failed tasks: {', '.join(failed) or 'none'}\n{logs}")


def _texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
