"""A person decides whether the latest fine-tuned model goes to production.

    latest publication in <root>/models -> a person approves or rejects -> <root>/production

Promoting is publishing again, in a log of its own: what serves the model reads the latest of `production` and never
sees a candidate. The job that trained the candidate ended long ago, so no GPU waits for the person; the files are
downloaded from the service's checkpoint once more, and checked.

The person answers in the UI (Required Actions), or through the REST API.
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param, task

from airflow_cortex_training.operators.checkpoints import CortexTrainingExportOperator, CortexTrainingPublishOperator
from airflow_cortex_training.operators.publication import CortexTrainingResolveOperator


def default(name: str, otherwise: str) -> Any:
    """FINETUNE_<NAME> of the environment, JSON where it is not plain text; else `otherwise`."""
    text = os.environ.get(f"FINETUNE_{name}", "")
    try:
        return json.loads(text)
    except ValueError:
        return text or otherwise


with DAG(
    "promote_with_approval",
    description="The latest candidate goes to production when a person approves",
    schedule=None,
    start_date=datetime(2026, 1, 1),
    catchup=False,
    # Two candidates are not put before a person at the same time.
    max_active_runs=1,
    render_template_as_native_obj=True,
    params={
        "cortex_conn_id": Param(default("CORTEX_CONN_ID", "cortex_training_default"), type="string"),
        "root": Param(default("ROOT", "/mnt/finetune"), type="string", description="folder that workers share"),
    },
    tags=["cortex-training"],
    default_args={
        "conn_id": "{{ params.cortex_conn_id }}",
        "retries": 2,
        "retry_delay": timedelta(seconds=30),
    },
):

    @task
    def production(params: dict[str, Any]) -> str:
        folder = Path(params["root"], "production")
        folder.mkdir(exist_ok=True)
        return str(folder)

    candidate = CortexTrainingResolveOperator(task_id="candidate", root="{{ params.root }}/models", missing="skip")

    approve = ApprovalOperator(
        task_id="approve",
        subject="Promote step {{ ti.xcom_pull('candidate', key='step') }} to production?",
        body=(
            "Checkpoint `{{ ti.xcom_pull('candidate', key='checkpoint_id') }}` of job"
            " `{{ ti.xcom_pull('candidate', key='job_id') }}`, published in"
            " `{{ ti.xcom_pull('candidate', key='location') }}`.\n\n"
            "Look at its answers below `{{ params.root }}/answers` or `{{ params.root }}/samples` first."
        ),
        # Nobody answers: the candidate stays a candidate.
        defaults="Reject",
        response_timeout=timedelta(days=2),
    )

    export = CortexTrainingExportOperator(
        task_id="export",
        job_id=candidate.output["job_id"],
        checkpoint_id=candidate.output["checkpoint_id"],
        root=production(),
    )

    promote = CortexTrainingPublishOperator(
        task_id="promote",
        root="{{ params.root }}/production",
        save=export.output["save"],
        step=export.output["global_steps"],
        epoch=export.output["epoch"],
    )

    candidate >> approve >> export >> promote
