"""A training run is its root: one that the command line began goes on in a flow, and the other way round."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from cortex_training.datasets import build_dataset
from cortex_training.local.models import model_folder
from cortex_training.training import TrainingPlan, status
from prefect_cortex_training import train

from .conftest import PAT
from .test_finetune_flow import steps_in, steps_of, wait_until
from .test_operations import SUB_JOBS

STEPS = 30


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    """A run that creates and ends its own job."""
    rows = [{"prompt": f"question {n}? ", "completion": f"answer {n}."} for n in range(20)]
    build_dataset(rows, tmp_path / "dataset", tokenizer=model_folder("tiny"), max_seq_len=128)
    return TrainingPlan(
        root=str(tmp_path / "run"),
        dataset=str(tmp_path / "dataset" / "manifest.json"),
        steps=STEPS,
        micro_batch_size=2,
        save_every_steps=10,
        sub_jobs=tuple(SUB_JOBS[:1]),
    ).to_dict()


def by_the_command_line(plan: dict[str, Any], service: Any, folder: Path) -> subprocess.Popen[str]:
    file = folder / "plan.json"
    file.write_text(json.dumps(plan))
    where = ["--base-url", service.base_url, "--database", service.database, "--schema", service.schema]
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("cortex-training")), *where, "train", str(file)],
        env={**os.environ, "CORTEX_TRAINING_PAT": PAT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@flow(result_serializer="json")
def goes_on(plan: dict[str, Any]) -> dict[str, Any]:
    return train("cortex", plan)


def test_a_killed_command_line_run_goes_on_in_a_flow_and_takes_each_step_once(
    plan: dict[str, Any], stored_blocks: None, local_service: Any, tmp_path: Path
) -> None:
    before = len(steps_of(local_service))
    process = by_the_command_line(plan, local_service, tmp_path)
    wait_until(lambda: len(steps_of(local_service)) >= before + 3 or process.poll() is not None, "three steps")
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    begun = status(plan["root"]).state.current
    assert begun is not None
    assert 0 < len(steps_of(local_service)) - before < STEPS

    trained = goes_on(plan)

    assert trained["steps"] == STEPS
    assert status(plan["root"]).state.job_ids[0] == begun.job_id
    assert steps_in(local_service, plan["root"]) == list(range(1, STEPS + 1))

    # And back: the command line finds it finished, and says the same.
    again = by_the_command_line(plan, local_service, tmp_path)
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert trained["entry"] in output
    assert steps_in(local_service, plan["root"]) == list(range(1, STEPS + 1))
