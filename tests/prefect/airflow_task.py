"""Execute a training task of Airflow as its worker and triggerer do: ``airflow_task.py <plan.json>``.

The operator defers, and the trigger is made anew from what Airflow stores. The connection is `ct`, of the environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.airflow.conftest import TaskRun, fire_at_once


def main(plan_file: str) -> None:
    from airflow_cortex_training.operators.train import CortexTrainingTrainOperator

    fire_at_once(pytest.MonkeyPatch())
    plan = json.loads(Path(plan_file).read_text())
    operator = CortexTrainingTrainOperator(task_id="train", conn_id="ct", plan=plan, deferrable=True)
    print(json.dumps(TaskRun("train").execute(operator)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
