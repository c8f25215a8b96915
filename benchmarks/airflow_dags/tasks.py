"""What `benchmarks/airflow_tasks.py` runs: three chains of waits of equal length, and trainings."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG, BaseOperator, Param
from airflow_bare import BareOperator

from airflow_cortex_training.operators.checkpoints import CortexTrainingSaveOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator

LINKS, WAIT_S = int(os.environ["BENCH_LINKS"]), float(os.environ["BENCH_WAIT_S"])


def chain(name: str) -> BaseOperator:
    """The last link of the chain `name`."""
    last = None
    for number in range(LINKS):
        task_id = f"{name}_{number}"
        if name == "bare":
            link: BaseOperator = BareOperator(task_id=task_id, wait_s=WAIT_S)
        else:
            inline = {"inline_s": 0.0} if name == "deferred" else {}
            link = CortexTrainingSaveOperator(
                task_id=task_id,
                conn_id="waits",
                job_id=f"{{{{ params.{name} }}}}",
                checkpoint_type="weights-only",
                deferrable=True,
                retries=0,
                **inline,
            )
        if last is not None:
            last >> link
        last = link
    return last


with DAG("waits", schedule=None, params={"deferred": "", "default": ""}):
    for kind in ("bare", "deferred", "default"):
        chain(kind)

for name, deferrable in (("train_deferrable", True), ("train_blocking", False)):
    with DAG(
        name,
        schedule=None,
        params={"plan": Param({}, type="object")},
        render_template_as_native_obj=True,
        default_args={"conn_id": "training", "retries": 2, "retry_delay": timedelta(seconds=1)},
    ):
        CortexTrainingTrainOperator(task_id="train", plan="{{ params.plan }}", deferrable=deferrable)
