"""Runs in a Python with the public client: each command of its CLI, against the service whose URL is the argument.

The commands run in this process, because each one alone would import torch for seconds. Prints one JSON object: by
command, its exit code and the JSON it printed (or what it said on stderr).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from cortex_training import _cli
from cortex_training.client import CortexTrainingClient

SUB_JOBS = [
    {
        "job_type": "training",
        "model_name": "Qwen/Qwen3-1.7B",
        "training_config": {
            "optimizer": {"name": "AdamW", "lr": 1e-4},
            "max_seq_len": 128,
            "train_batch_size": 2,
            "n_gpus": 1,
        },
    },
    {"job_type": "sampling", "model_name": "Qwen/Qwen3-1.7B", "inference_config": {"max_seq_len": 128, "n_gpus": 1}},
]
BATCH = {
    "payload": {
        "kwargs": {
            "input_ids": {"data": [[5, 6, 7, 8], [9, 10, 11, 12]], "dtype": "long"},
            "labels": {"data": [[5, 6, 7, 8], [9, 10, 11, 12]], "dtype": "long"},
        }
    }
}


def main(base_url: str, folder: Path) -> None:
    os.environ["CORTEX_TRAINING_LOGIN_FILE"] = str(folder / "login.json")
    seen: dict[str, Any] = {}

    def written(name: str, content: Any) -> str:
        path = folder / name
        path.write_text(json.dumps(content))
        return str(path)

    def run(name: str, *arguments: str) -> dict[str, Any]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = _cli.main(["--compact", *arguments])
            except SystemExit as ended:
                code = ended.code
        lines = out.getvalue().splitlines()
        # Its operations print a line of their own before the answer.
        seen[name] = {
            "code": code,
            "answer": json.loads(lines[-1]) if lines and not code else None,
            "said": err.getvalue(),
        }
        return seen[name]["answer"] or {}

    connection = {"base_url": base_url, "database": "DB", "schema": "PUBLIC", "poll_interval": 0.05}
    run("login", "login", written("connection.json", {"connection": connection}))
    body = written("job.json", {"sub_job_configs": SUB_JOBS})
    run("dry run", "submit", body, "--dry-run")
    job = run("submit", "submit", body, "--wait")["job_id"]
    run("get", "get", job)
    run("list", "list", "--status", "running")
    run("capacity", "capacity")
    run("capacity of one", "capacity", "--hardware", "H200")
    run("wait", "wait", job)
    run("fwd-bwd", "--job", job, "fwd-bwd", written("batch.json", BATCH))
    run("step", "--job", job, "step", "--lr", "0.01")
    run("weight-sync", "--job", job, "weight-sync")
    run(
        "generate",
        "--job",
        job,
        "generate",
        written("prompts.json", {"prompts": ["Hello", [5, 6]], "sampling_params": {"max_tokens": 4}}),
    )
    # The CLI has no command that saves.
    client = CortexTrainingClient(base_url, "DB", "PUBLIC", poll_interval=0.05)
    saved = client.poll_request(job, client.save(job, checkpoint_type="resumable"))["checkpoint_id"]
    run("load", "--job", job, "load", saved, "--source-job-id", job, "--target-sub-job-id", f"{job}:training:0")
    run("load into sampling", "--job", job, "load", saved, "--target-sub-job-id", f"{job}:sampling:0")
    run("checkpoints", "checkpoints", job)
    run("download-log", "download-log", job, "--output-dir", str(folder))
    run("download-metrics", "download-metrics", job, "--output-dir", str(folder))
    run("cancel", "cancel", job)
    print(json.dumps(seen))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1], Path(temporary))
