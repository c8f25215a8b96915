"""Training runs and nothing else; connection and plan are parameters. How they are driven and bounded differs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param

from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator


def training_run(dag_id: str, *, dagrun_timeout: timedelta | None = None, **train: Any) -> DAG:
    with DAG(
        dag_id,
        schedule=None,
        dagrun_timeout=dagrun_timeout,
        params={"conn_id": Param("", type="string"), "plan": Param({}, type="object")},
        render_template_as_native_obj=True,
        default_args={"conn_id": "{{ params.conn_id }}", "retry_delay": timedelta(seconds=1)},
    ) as dag:
        trained = CortexTrainingTrainOperator(task_id="train", plan="{{ params.plan }}", **train)
        trained >> CortexTrainingCancelJobOperator(
            task_id="cancel", root="{{ params.plan.root }}", trigger_rule="all_done"
        )
    return dag


train_only = training_run("train_only", deferrable=True, retries=1)
train_on_worker = training_run("train_on_worker", deferrable=False, retries=9)
train_20_s = training_run("train_20_s", deferrable=True, retries=0, execution_timeout=timedelta(seconds=20))
run_30_s = training_run("run_30_s", deferrable=True, retries=0, dagrun_timeout=timedelta(seconds=30))
