"""A job on which several checkpoints are saved at once: each save is a request that a task waits for."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param, task

from airflow_cortex_training.operators.checkpoints import CortexTrainingSaveOperator
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor


@task
def one_for_each(count: int) -> list[str]:
    return ["weights-only"] * count


def saves(dag_id: str, **save: float) -> DAG:
    with DAG(
        dag_id,
        schedule=None,
        params={
            "conn_id": Param("", type="string"),
            "sub_jobs": Param([], type="array"),
            "count": Param(1, type="integer"),
        },
        render_template_as_native_obj=True,
        max_active_tasks=100,
        default_args={
            "conn_id": "{{ params.conn_id }}",
            "deferrable": True,
            "retries": 2,
            "retry_delay": timedelta(seconds=1),
        },
    ) as dag:
        create = CortexTrainingCreateJobOperator(task_id="create", sub_jobs="{{ params.sub_jobs }}")
        running = CortexTrainingWaitForRunningSensor(task_id="running", job_id=create.output)
        saved = CortexTrainingSaveOperator.partial(task_id="save", job_id=create.output, **save).expand(
            checkpoint_type=one_for_each("{{ params.count }}")
        )
        cancel = CortexTrainingCancelJobOperator(task_id="cancel", job_id=create.job_id_output)
        create >> running >> saved >> cancel.as_teardown(setups=create)
    return dag


quick_saves = saves("quick_saves")
deferred_saves = saves("deferred_saves", inline_s=0.0)
