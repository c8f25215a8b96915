"""The command line drives the local service through a whole job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
