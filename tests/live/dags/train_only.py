"""One training run and nothing else; the run's plan is a parameter."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator

with DAG(
    "train_only",
    schedule=None,
    params={"plan": Param({}, type="object")},
    render_template_as_native_obj=True,
    default_args={"conn_id": "ct", "retries": 1, "retry_delay": timedelta(seconds=1)},
):
    train = CortexTrainingTrainOperator(task_id="train", plan="{{ params.plan }}", deferrable=True)
    cancel = CortexTrainingCancelJobOperator(task_id="cancel", root="{{ params.plan.root }}", trigger_rule="all_done")
    train >> cancel
