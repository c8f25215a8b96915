"""The public client drives the local service, in its own Python.

Set CORTEX_TRAINING_PUBLIC_PYTHON to a Python that has ``cortex-training==0.0.3``, torch and numpy.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import RunningService

pytestmark = pytest.mark.public_client

_PYTHON = os.environ.get("CORTEX_TRAINING_PUBLIC_PYTHON")
_WALK = Path(__file__).with_name("public_client_walk.py")


@pytest.fixture(scope="module")
def seen(local_service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the public client got from each of its calls."""
    if not _PYTHON:
        pytest.skip("CORTEX_TRAINING_PUBLIC_PYTHON is not set to a Python with cortex-training==0.0.3")
    command = [_PYTHON, str(_WALK), local_service.base_url]
    # Elsewhere than in this repository, whose package has the same import name.
    folder = tmp_path_factory.mktemp("public_client")
    walked = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, check=False)
    assert walked.returncode == 0, walked.stderr
    # Its operations also print what they send.
    return dict(json.loads(walked.stdout.splitlines()[-1]))


def test_jobs(seen: dict[str, Any]) -> None:
    job = seen["job"]
    assert job["status"] == "running"
    assert [one["job_type"] for one in job["sub_jobs"]] == seen["types"]
    assert job["job_id"] in seen["listed"]
    assert seen["capacity"]["has_reservation"] is True
    assert seen["capacity"]["in_use_gpus"] >= 9
    assert seen["experiment_run"]["experiment_name"] == "DB.PUBLIC.WALK"
    assert (seen["cancel"], seen["ended"]) in ((None, "cancelled"), (None, "cancelling"))


def test_training(seen: dict[str, Any]) -> None:
    assert all(isinstance(loss, float) and 5 < loss < 8 for loss in seen["losses"])
    assert [step["global_steps"] for step in seen["steps"]] == [1, 2, 3]
    assert {step["last_lr"] for step in seen["steps"]} == {1e-2}


def test_checkpoints(seen: dict[str, Any]) -> None:
    assert seen["saved"]["checkpoint_tag"] == "global_step3"
    assert seen["loaded"]["global_steps"] == 3
    assert [one["checkpoint_type"] for one in seen["checkpoints"]] == ["resumable", "weights-only"]
    assert {"config.json", "model.safetensors"} <= {file["filename"] for file in seen["export"]["files"]}
    for file in seen["export"]["files"]:
        assert len(requests.get(file["url"], timeout=60).content) == file["size_bytes"]
    assert seen["left"] == [seen["checkpoints"][1]["checkpoint_id"]]


def test_sampling(seen: dict[str, Any]) -> None:
    for results in (seen["before"]["results"], seen["after"]["results"]):
        assert [len(result["token_ids"]) for result in results] == [8, 8]
        assert all(isinstance(result["logprobs"][0], float) for result in results)
    assert seen["sync"]["weight_format"] == "lora"
    assert seen["before"]["results"][0]["logprobs"] != seen["after"]["results"][0]["logprobs"]
    assert seen["reset"]["success"] is True
    assert "request_id" in seen["cancelled_request"]
    # The merged weights that a new job samples from are the adapter's on top of the base.
    synced, merged = (seen[name]["results"][1]["logprobs"][0] for name in ("after", "from_saved"))
    assert merged == pytest.approx(synced, abs=0.05)


def test_logs(seen: dict[str, Any]) -> None:
    assert len(seen["tail"]["entries"]) == 5
    assert seen["tail"]["eof"] is False
    assert seen["streamed"] >= 9
