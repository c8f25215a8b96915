"""Commands that download what a job leaves behind: download-log, download-metrics."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cortex_training.answers import ExecutionLog
from cortex_training.artifacts import checked_path, folder_name
from cortex_training.cli.connection import connect
from cortex_training.cli.documents import print_document
from cortex_training.cli.jobs import add_job_argument, job_of


def add_parsers(subparsers: Any) -> None:
    logs = subparsers.add_parser("download-log", help="write a job's logs into a folder")
    add_job_argument(logs)
    logs.add_argument("--log-type", choices=("execution", "stdout"), default="execution")
    _add_output(logs)
    logs.set_defaults(handler=run_download_log)

    metrics = subparsers.add_parser("download-metrics", help="write a job's GPU metrics into a folder")
    add_job_argument(metrics)
    _add_output(metrics)
    metrics.set_defaults(handler=run_download_metrics)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", metavar="FOLDER", default=".", help="default: the current one")
    parser.add_argument("--resume", action="store_true", help="fetch only what the last download did not have")


def run_download_log(options: argparse.Namespace) -> int:
    job = job_of(options)
    logs: list[Mapping[str, Any]]
    with connect(options) as client:
        if options.log_type == "stdout":
            logs = [*client.download_stdout_logs(job, options.output_dir, resume=options.resume)]
        else:
            logs = [_saved(log, Path(options.output_dir)) for log in client.fetch_execution_logs(job)]
    print_document(options, {"job_id": job, "logs": logs})
    failed = [log for log in logs if "error" in log]
    for log in failed:
        print(f"{log['sub_job_id']}/{log['filename']}: {log['error']}", file=sys.stderr)
    return 1 if failed else 0


def _saved(log: ExecutionLog, output_dir: Path) -> dict[str, Any]:
    """Write one log and describe it without its content. One that could not be fetched is described, not written."""
    described = {name: value for name, value in log.items() if name != "content"}
    if "error" in log:
        return described
    target = output_dir / folder_name(log["sub_job_id"]) / checked_path(log["filename"])
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
        file.write(log["content"])
    os.replace(name, target)
    return {**described, "saved_path": str(target)}


def run_download_metrics(options: argparse.Namespace) -> int:
    job = job_of(options)
    with connect(options) as client:
        metrics = client.download_metrics(job, options.output_dir, resume=options.resume)
    print_document(options, {"job_id": job, "metrics": metrics})
    return 0
