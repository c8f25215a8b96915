"""The command line drives the local service through a whole job."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortex_training import identity

JOB = {
    "sub_job_configs": [
        {
            "job_type": "training",
            "model_name": "tiny",
            "training_config": {
                "optimizer": {"name": "AdamW", "lr": 0.01},
                "max_seq_len": 64,
                "train_batch_size": 2,
                "n_gpus": 1,
            },
        },
        {"job_type": "sampling", "model_name": "tiny", "inference_config": {"max_seq_len": 64, "n_gpus": 1}},
    ]
}
BATCH = {"kwargs": {"input_ids": {"data": [[72, 101, 108, 108, 111]]}, "labels": {"data": [[72, 101, 108, 108, 111]]}}}


@pytest.fixture
def ct(run: Any, environment: Any, local_service: Any, tmp_path: Path) -> Any:
    """Run a command against the local service; its one document, or the failure."""
    environment.setenv("CORTEX_TRAINING_BASE_URL", local_service.base_url)
    environment.setenv("CORTEX_TRAINING_DATABASE", "DB")
    for name, content in (("job", JOB), ("batch", BATCH), ("prompts", {"prompts": ["Hello"]})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    def ct(*arguments: str) -> Any:
        done = run(*(str(tmp_path / f"{part[1:]}.json") if part.startswith("@") else part for part in arguments))
        assert done.code == 0, done.err
        return done.document

    return ct


def test_a_job_from_submission_to_a_sample(ct: Any, run: Any, local_service: Any) -> None:
    job = ct("submit", "@job", "--wait")["job_id"]
    try:
        losses = []
        for step in (1, 2):
            losses.append(ct("--job", job, "fwd-bwd", "@batch")["result"]["avg_loss"])
            assert ct("--job", job, "step")["result"]["global_steps"] == step
        assert losses[1] < losses[0]
        checkpoint = ct("--job", job, "save", "--type", "weights-only")["checkpoint_id"]
        assert [listed["checkpoint_id"] for listed in ct("checkpoints", job)["checkpoints"]] == [checkpoint]
        assert ct("--job", job, "export", checkpoint)["files"]
        ct("--job", job, "load", checkpoint)
        ct("--job", job, "weight-sync")
        assert ct("--job", job, "generate", "@prompts")["result"]["results"][0]["token_ids"]
        assert ct("tail-logs", job)["entries"]
        assert job in {listed["job_id"] for listed in ct("list", "--status", "active")["jobs"]}
    finally:
        assert ct("cancel", job) == {"cancelled": True, "job_id": job}
    refused = run("--job", job, "step")
    assert refused.code == 1
    assert "cancelled" in refused.err
    executed = [entry["op"] for entry in local_service.execution_log(job)]
    assert executed.count("step") == 2


@pytest.fixture
def job(ct: Any) -> Any:
    """A running job with both kinds of sub-jobs, made and cancelled by commands."""
    job_id = ct("submit", "@job", "--job-id", identity.new_job_id(), "--wait")["job_id"]
    yield job_id
    assert ct("cancel", job_id) == {"cancelled": True, "job_id": job_id}


def test_every_command_of_a_training_job_and_its_flags(
    ct: Any, run: Any, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = identity.group_id(job, 0, 1, 0)
    first = ct("--job", job, "fwd-bwd", "@batch", "--chunk-group-id", group)["result"]["avg_loss"]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**BATCH, "poll": False})))
    submitted = ct("--job-id", job, "--compact", "fwd-bwd", "-")
    assert set(submitted) == {"job_id", "payload_size_bytes", "request_id"}
    assert ct("--job", job, "fwd-bwd", "@batch", "--chunk-group-id", group)["result"]["avg_loss"] == first

    stepped = ct("--job", job, "step", "--lr", "0.002")
    assert (stepped["learning_rate"], stepped["result"]["last_lr"]) == (0.002, 0.002)
    assert set(ct("--job", job, "step", "--no-poll")) == {"job_id", "request_id"}
    saved = ct("--job", job, "save", "--type", "resumable", "--checkpoint-id", "wish")
    assert saved["result"]["global_steps"] == 2
    assert set(ct("--job", job, "save", "--no-poll")) == {"job_id", "request_id"}
    where = ("--source-job-id", job, "--target-sub-job-id", f"{job}:training:0")
    loaded = ct("--job", job, "load", saved["checkpoint_id"], *where)
    assert loaded["result"]["global_steps"] == 2
    assert loaded["target_sub_job_id"] == f"{job}:training:0"
    assert "result" not in ct("--job", job, "load", saved["checkpoint_id"], "--no-poll")
    refused = run("--job", job, "load", saved["checkpoint_id"], "--target-sub-job-id", f"{job}:sampling:0")
    assert refused.code == 1
    assert "501" in refused.err
    assert "snowflake request id: " in refused.err

    # With what is still in flight done, both checkpoints are there.
    ct("--job", job, "weight-sync", "--weight-format", "hf")
    routed = ("--operation-sub-job-id", f"{job}:training:0", "--operation-sub-job-type", "training")
    ends = ("--source-sub-job-id", f"{job}:training:0", "--target-sub-job-id", f"{job}:sampling:0")
    assert "result" not in ct("--job", job, "weight-sync", *ends, *routed, "--no-poll")
    listed = [one["checkpoint_id"] for one in ct("--job", job, "checkpoints")["checkpoints"]]
    assert saved["checkpoint_id"] in listed
    assert ct("--job", job, "export", saved["checkpoint_id"])["files"]
    assert ct("--job", job, "delete-checkpoint", saved["checkpoint_id"])["deleted"] is True
    assert run("--job", job, "delete-checkpoint", saved["checkpoint_id"]).code == 1


def test_every_command_of_a_sampling_job_and_its_flags(ct: Any, run: Any, job: str, tmp_path: Path) -> None:
    def written(name: str, content: Any) -> str:
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return str(path)

    prompts = {
        "prompts": ["Hello", [5, 6]],
        "sampling_params": [{"max_tokens": 3, "temperature": 0}, None],
        "routing_key": ["a", None],
        "strict": False,
    }
    generated = ct("--job", job, "generate", written("generate.json", {"payload": prompts, "poll": True}))
    assert generated["prompt_count"] == 2
    assert len(generated["result"]["results"][0]["token_ids"]) == 3
    submitted = ct("--job", job, "generate", written("later.json", {**prompts, "poll": False}))
    assert "result" not in submitted
    assert isinstance(ct("--job", job, "cancel-request", submitted["request_id"]), dict)

    stream = written("stream.json", {"prompts": ["a", "b"], "sampling_params": {"max_tokens": 2}})
    done = run("--job", job, "generate-stream", stream)
    events = [json.loads(line) for line in done.out.splitlines()]
    assert (done.code, [event["type"] for event in events]) == (0, ["result", "result", "done"])

    assert ct("--job", job, "reset-prefix-cache", "--no-drain", "--timeout", "5")["success"] is True
    assert ct("--job", job, "reset-prefix-cache", "--sub-job-id", f"{job}:sampling:0")["success"] is True
    assert ct("--job", job, "bootstrap-router-replay", "--max-cache-bytes", "4096")["status"] == "ok"
    discarded = ct("--job", job, "router-replay-discard", "s1", "s2", "--sub-job-type", "sampling")
    assert discarded["discarded"] == 0  # nothing was recorded for them


def test_every_command_about_jobs_and_logs(ct: Any, run: Any, job: str, local_service: Any, tmp_path: Path) -> None:
    assert ct("submit", "@job", "--dry-run") == JOB
    assert ct("--job", job, "wait")["status"] == "running"
    assert ct("get", job)["sub_jobs"][0]["sub_job_id"] == f"{job}:training:0"
    for flags in (
        ["--all"],
        ["--status", "running,placing"],
        ["--status", "active", "--user", "local"],
        ["--since", "1h"],
    ):
        assert job in [one["job_id"] for one in ct("list", *flags)["jobs"]]
    assert [one["job_id"] for one in ct("list", "--since", "1h", "--limit", "1")["jobs"]] == [job]
    assert set(ct("capacity")["capacity_by_hardware"]) == {"H200", "B200", "B300"}
    assert ct("capacity", "--hardware", "B200")["max_total_gpus"] == 4096
    assert ct("experiment-run", job)["experiment_run_name"]

    ct("--job", job, "fwd-bwd", "@batch")
    page = ct("tail-logs", job, "--sub-job-id", f"{job}:training:0", "--max-lines", "2")
    ct("--job", job, "fwd-bwd", "@batch")
    following = ct("tail-logs", job, "--sub-job-type", "training", "--cursor", page["next_cursor"])
    assert len(page["entries"]) == 2
    assert following["entries"]
    assert following["entries"][0] not in page["entries"]
    for command in ("download-log", "download-metrics"):
        refused = run(command, job, "--output-dir", str(tmp_path))
        assert (refused.code, refused.out) == (1, "")
        assert "use a connection profile or a token" in refused.err

    assert ct("doctor")["ok"] is True
    assert job in [one["job_id"] for one in ct("sweep", "--older-than", "0")["found"]]
    config = tmp_path / "connection.json"
    config.write_text(json.dumps({"url": local_service.base_url, "db": "DB", "poll_interval": 0.05}))
    assert ct("login", "--config", str(config), "--check")["logged_in"] is True

    follow = [str(Path(sys.executable).with_name("ct")), "tail-logs", job, "--follow"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        first = json.loads(following.stdout.readline())
        ct("cancel", job)
        rest, said = following.communicate(timeout=60)
    assert (following.returncode, said) == (0, "")
    assert first
    assert all(json.loads(line) for line in rest.splitlines())
    refused = run("tail-logs", job, "--follow")
    assert (refused.code, refused.out) == (1, "")
    assert "cancelled by the caller" in refused.err
