"""The public client drives the local service, in its own Python: every method, its CLI, the documented examples.

Set CORTEX_TRAINING_PUBLIC_PYTHON to a Python that has ``cortex-training==0.0.3``, torch and numpy. What comes back is
compared with the shapes of the service's reference, field by field: a field that is missing, of another type, or
neither in the reference nor listed as an addition of this service, fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import RunningService, ServiceFactory, start_service

pytestmark = pytest.mark.public_client

_PYTHON = os.environ.get("CORTEX_TRAINING_PUBLIC_PYTHON")
_HERE = Path(__file__).parent
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


class Time:
    """An RFC 3339 text in UTC."""


Shape = Any
"""A type, a list of one shape for its elements, or an object's fields; "name?" is a field that may be absent, and "+"
names the fields that this service adds to the reference's."""

OPEN: Shape = dict

SUB_JOB: Shape = {
    "sub_job_id": str,
    "job_type": str,
    "status": str,
    "model_name": str,
    "dtype?": str,
    "training_config?": {
        "optimizer": OPEN,
        "max_seq_len": int,
        "train_batch_size": int,
        "n_gpus": int,
        "peft_config?": OPEN,
        "step_peak_memory_log?": bool,
    },
    "inference_config?": {"max_seq_len": int, "n_gpus": int, "peft_config?": OPEN},
    "source_checkpoint_info?": {"checkpoint_id": str, "source_job_id": str},
}
JOB: Shape = {
    "job_id": str,
    "status": str,
    "reason": str,
    "created_at": Time,
    "updated_at": Time,
    "submitted_by": str,
    "owner_role": str,
    "sub_jobs": [SUB_JOB],
    "+": ("hardware", "idle_timeout_seconds", "pending_timeout_seconds", "gpu_seconds", "experiment_name"),
}
CAPACITY: Shape = {
    "has_reservation": bool,
    "max_total_gpus": int,
    "reserved_gpus": int,
    "in_use_gpus": int,
    "pending_gpus": int,
    "available_gpus": int,
}
FORWARD_BACKWARD: Shape = {"job_id": str, "avg_loss": float, "metrics": OPEN, "post_process_outputs": OPEN}
STEP: Shape = {
    "global_steps": int,
    "last_lr": float,
    "peak_memory?": {"gpu_peak": int, "cpu_peak": int},
    "+": ("metrics",),
}
SAVED: Shape = {
    "checkpoint_id": str,
    "checkpoint_path": str,
    "checkpoint_tag": str,
    "job_id": str,
    "stage_path": str,
    "version": float,
    "+": ("checkpoint_type", "global_steps"),
}
LOADED: Shape = {"checkpoint_id": str, "+": ("job_id", "source_job_id", "global_steps")}
SAMPLE: Shape = {
    "text": str,
    "token_ids": [int],
    "finish_reason": str,
    "+": ("logprobs", "prompt_tokens"),
}
GENERATED: Shape = {"job_id": str, "results": [SAMPLE]}
SYNCED: Shape = {
    "+": ("job_id", "source_sub_job_id", "target_sub_job_ids", "weight_format", "tensors", "bytes", "global_steps")
}
DOCUMENTED: dict[str, Shape] = {
    "job": JOB,
    "got": JOB,
    "jobs": [JOB],
    "capacity": CAPACITY,
    "capacity_of_one": CAPACITY,
    "experiment_run": {"experiment_name": str, "experiment_run_name": str},
    "forward_backwards": [FORWARD_BACKWARD],
    "steps": [STEP],
    "forwards": [FORWARD_BACKWARD],
    "saved": SAVED,
    "loaded": LOADED,
    "checkpoints": [
        {
            "checkpoint_id": str,
            "global_steps": int,
            "avg_loss": float,
            "created_at": Time,
            "checkpoint_type": str,
        }
    ],
    "export": {
        "checkpoint_id": str,
        "files": [{"filename": str, "url": str, "size_bytes": int}],
        "expires_at": Time,
    },
    "before": GENERATED,
    "after": GENERATED,
    "from_saved": GENERATED,
    "status": {
        "request_id": str,
        "status": str,
        "created_at": Time,
        "updated_at": Time,
        "result": {"content_type": str, "encoding": str, "wire_format": str, "payload_b64": str},
        "error": str,
        "events": list,
        "next_cursor": str,
    },
    "sync": SYNCED,
    "stream": {"request_id": str, "job_id": str, "count": int},
    "tail": {"entries": [OPEN], "next_cursor": str, "eof": bool},
}


def differences(value: Any, shape: Shape, where: str) -> list[str]:
    """What is wrong with `value`, one line each."""
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: not a list with something in it"]
        return [line for index, one in enumerate(value) for line in differences(one, shape[0], f"{where}.{index}")]
    if isinstance(shape, dict):
        return _object_differences(value, shape, where)
    if shape is Time:
        good = isinstance(value, str) and _TIME.fullmatch(value) is not None
    elif shape is int:
        good = isinstance(value, int) and not isinstance(value, bool)
    else:
        good = isinstance(value, shape)
    return [] if good else [f"{where}: {value!r:.80} is no {shape.__name__}"]


def _object_differences(value: Any, shape: dict[str, Shape], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r:.80} is no object"]
    fields = {name.rstrip("?"): one for name, one in shape.items() if name != "+"}
    lines = [f"{where}.{name}: missing" for name in shape if name[-1] not in "?+" and name not in value]
    lines += [f"{where}.{name}: unknown" for name in value if name not in fields and name not in shape.get("+", ())]
    for name, one in fields.items():
        if name in value:
            lines += differences(value[name], one, f"{where}.{name}")
    return lines


def ran(folder: Path, program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON that a program printed last, in the Python of the public client."""
    if not _PYTHON:
        pytest.skip("CORTEX_TRAINING_PUBLIC_PYTHON is not set to a Python with cortex-training==0.0.3")
    # Elsewhere than in this repository, whose package has the same import name.
    ended = subprocess.run(
        [_PYTHON, str(_HERE / program), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # Its operations also print what they send.
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the public client got from each of its calls, on a service whose GPUs nobody else uses."""
    folder = tmp_path_factory.mktemp("public_client")
    service = start_service(folder / "service", gpus=4096)
    try:
        yield ran(folder, "public_client_walk.py", service.base_url)
    finally:
        service.stop()


@pytest.fixture(scope="module")
def commands(local_service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command of its CLI printed, and its exit code."""
    return ran(tmp_path_factory.mktemp("public_cli"), "public_cli_walk.py", local_service.base_url)


def test_no_method_is_left_out(seen: dict[str, Any]) -> None:
    assert seen["missed"] == []


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_answers_have_the_documented_fields(seen: dict[str, Any], name: str) -> None:
    assert differences(seen[name], DOCUMENTED[name], name) == []


def test_a_difference_is_noticed() -> None:
    good = {"request_id": "r", "job_id": "j", "count": 2}
    for wrong in ({**good, "count": 2.0}, {**good, "count": True}, {**good, "more": 1}, {"count": 2}, [good], None):
        assert differences(wrong, DOCUMENTED["stream"], "stream")
    assert not differences(good, DOCUMENTED["stream"], "stream")


def test_jobs(seen: dict[str, Any]) -> None:
    job = seen["job"]
    assert job["status"] == "running"
    assert [one["job_type"] for one in job["sub_jobs"]] == seen["types"]
    assert [one["sub_job_id"] for one in job["sub_jobs"]] == [
        f"{job['job_id']}:training:0",
        f"{job['job_id']}:sampling:0",
    ]
    assert job["job_id"] in [one["job_id"] for one in seen["jobs"]]
    assert {one["status"] for one in seen["jobs"]} == {"running"}
    assert seen["capacity"]["has_reservation"] is True
    assert seen["capacity_of_one"]["in_use_gpus"] == 9
    assert seen["experiment_run"]["experiment_name"] == "DB.PUBLIC.WALK"
    assert (seen["cancel"], seen["ended"]) in ((None, "cancelled"), (None, "cancelling"))


def test_training(seen: dict[str, Any]) -> None:
    assert all(5 < result["avg_loss"] < 8 for result in seen["forward_backwards"])
    assert all(result["post_process_outputs"] == {} for result in seen["forward_backwards"])
    assert [step["global_steps"] for step in seen["steps"]] == [1, 2, 3]
    assert {step["last_lr"] for step in seen["steps"]} == {1e-2}
    assert all(step["peak_memory"]["gpu_peak"] > 0 for step in seen["steps"])
    # All three names are one call, and none of them learns.
    assert seen["forwards"][0] == seen["forwards"][1] == seen["forwards"][2]


def test_checkpoints(seen: dict[str, Any]) -> None:
    assert seen["saved"]["checkpoint_tag"] == "global_step3"
    assert f"/{seen['saved']['checkpoint_id']}/" in seen["saved"]["stage_path"]
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
    assert seen["replay"]["status"] == "ok"
    assert seen["discarded"]["discarded"] == 1
    assert "request_id" in seen["cancelled_request"]
    assert "ended with state 'cancelled'" in seen["poll_of_cancelled"]["message"]
    # The merged weights that a new job samples from are the adapter's on top of the base.
    synced, merged = (seen[name]["results"][1]["logprobs"][0] for name in ("after", "from_saved"))
    assert merged == pytest.approx(synced, abs=0.05)


def test_streaming(seen: dict[str, Any]) -> None:
    *results, end = seen["events"]
    assert end == {"type": "done", "completed": 2, "failed": 0}
    assert sorted(event["index"] for event in results) == [0, 1]
    for event in results:
        assert differences(event["result"], SAMPLE, "event") == []


def test_logs(seen: dict[str, Any]) -> None:
    assert len(seen["tail"]["entries"]) == 5
    assert seen["tail"]["eof"] is False
    assert len(seen["streamed"]) >= 9
    # The service does not take this operation, and the client offers it all the same.
    for name in ("tail_events", "stream_events"):
        assert (seen[name]["status"], "operation_type" in seen[name]["body"]["message"]) == (400, True)
    for name in ("fetch_execution_logs", "download_stdout_logs", "download_metrics"):
        assert "PAT-authenticated" in seen[name]["message"]


def test_every_command_of_its_cli(commands: dict[str, Any]) -> None:
    failed = {name: ended["said"] for name, ended in commands.items() if ended["code"]}
    assert sorted(failed) == ["download-log", "download-metrics", "load into sampling"]
    assert "501" in failed["load into sampling"]
    assert '"code":501' in failed["load into sampling"]
    answers = {name: ended["answer"] for name, ended in commands.items()}
    job = answers["submit"]["job_id"]
    for name in ("submit", "get", "wait"):
        assert differences(answers[name], JOB, name) == []
        assert (answers[name]["job_id"], answers[name]["status"]) == (job, "running")
    assert job in [one["job_id"] for one in answers["list"]["jobs"]]
    assert set(answers["capacity"]["capacity_by_hardware"]) == {"H200", "B200", "B300"}
    assert differences(answers["capacity of one"], CAPACITY, "capacity") == []
    assert differences(answers["fwd-bwd"]["result"], FORWARD_BACKWARD, "fwd-bwd") == []
    assert differences(answers["step"]["result"], STEP, "step") == []
    assert differences(answers["generate"]["result"], GENERATED, "generate") == []
    assert answers["weight-sync"]["result"]["weight_format"] == "vllm"
    assert answers["load"]["result"]["global_steps"] == 1
    assert [one["checkpoint_id"] for one in answers["checkpoints"]["checkpoints"]] == [answers["load"]["checkpoint_id"]]
    assert answers["cancel"] == {"cancelled": True, "job_id": job}


def test_the_documented_examples_run_to_the_end(start_local_service: ServiceFactory, tmp_path: Path) -> None:
    """As they are written: a host name and a token, so https, and the GPUs that there are by default."""
    if not _PYTHON:
        pytest.skip("CORTEX_TRAINING_PUBLIC_PYTHON is not set to a Python with cortex-training==0.0.3")
    service = start_local_service(tls=True)
    place = {
        "HOST": service.base_url.removeprefix("https://"),
        "PAT": "any",
        "DATABASE": "DB",
        "SCHEMA": "PUBLIC",
        "REQUESTS_CA_BUNDLE": service.ready["ca_bundle"],
        "CORTEX_TRAINING_DISABLE_TELEMETRY": "1",
    }
    answers = ran(tmp_path, "documented_examples.py", "loop", **place)
    assert differences(answers["rollouts"], [SAMPLE], "rollouts") == []
    assert differences(answers["train_result"], FORWARD_BACKWARD, "train_result") == []
    assert answers["step_result"]["global_steps"] == 1
    assert answers["synced"]["weight_format"] == "vllm"
    assert (answers["resumable"]["checkpoint_type"], answers["loaded"]["global_steps"]) == ("resumable", 1)
    [sampler] = answers["sampler"]["sub_jobs"]
    assert answers["sampler"]["status"] == "running"
    assert sampler["source_checkpoint_info"]["checkpoint_id"] == answers["checkpoint"]["checkpoint_id"]

    answers = ran(tmp_path, "documented_examples.py", "lora", **place)
    assert (answers["synced"]["weight_format"], answers["synced"]["tensors"]) == ("lora", 16)
    assert differences(answers["result"], GENERATED, "result") == []
