"""Commands for single requests and operations of a job: logs, cancellation, prefix cache, router replay."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cortex_training.cli.connection import connect
from cortex_training.cli.documents import print_document
from cortex_training.cli.jobs import add_job_argument, job_of


def add_parsers(subparsers: Any) -> None:
    run = subparsers.add_parser("experiment-run", help="print the names under which a job's logs are kept")
    add_job_argument(run)
    run.set_defaults(handler=run_experiment_run)

    tail = subparsers.add_parser("tail-logs", help="print a page of a job's log, or follow it")
    add_job_argument(tail)
    _add_sub_job(tail)
    tail.add_argument("--cursor", help="go on after this page's cursor")
    tail.add_argument("--max-lines", type=int)
    tail.add_argument("--follow", action="store_true", help="print entries, one JSON value a line, until the job ends")
    tail.set_defaults(handler=run_tail_logs)

    cancel = subparsers.add_parser("cancel-request", help="ask the service to stop a request")
    cancel.add_argument("request", metavar="REQUEST_ID")
    _add_sub_job(cancel)
    cancel.set_defaults(handler=run_cancel_request)

    reset = subparsers.add_parser("reset-prefix-cache", help="empty the prefix cache of a sampling sub-job")
    _add_sub_job(reset)
    reset.add_argument("--no-drain", action="store_true", help="do not wait for generations in flight")
    reset.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    reset.set_defaults(handler=run_reset_prefix_cache)

    bootstrap = subparsers.add_parser("bootstrap-router-replay", help="connect expert routing of sampling to training")
    bootstrap.add_argument("--source-sub-job-id", metavar="ID", help="default: JOB_ID:sampling:0")
    bootstrap.add_argument("--target-sub-job-id", metavar="ID", help="default: JOB_ID:training:0")
    bootstrap.add_argument("--max-cache-bytes", type=int)
    bootstrap.set_defaults(handler=run_bootstrap_router_replay)

    discard = subparsers.add_parser("router-replay-discard", help="forget recorded routing of samples")
    discard.add_argument("samples", metavar="SAMPLE_ID", nargs="+")
    _add_sub_job(discard)
    discard.set_defaults(handler=run_router_replay_discard)


def _add_sub_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sub-job-id", metavar="ID", help="sub-job that the operation is for")
    parser.add_argument("--sub-job-type", metavar="TYPE", help="or its type")


def _sub_job(options: argparse.Namespace) -> dict[str, Any]:
    return {"sub_job_id": options.sub_job_id, "sub_job_type": options.sub_job_type}


def run_experiment_run(options: argparse.Namespace) -> int:
    with connect(options) as client:
        print_document(options, client.get_experiment_run(job_of(options)))
    return 0


def run_tail_logs(options: argparse.Namespace) -> int:
    where = {**_sub_job(options), "cursor": options.cursor, "max_lines": options.max_lines}
    with connect(options) as client:
        if not options.follow:
            print_document(options, client.tail_logs(job_of(options), **where))
            return 0
        for entry in client.stream_logs(job_of(options), follow=True, **where):
            print(json.dumps(entry, sort_keys=True), flush=True)
    return 0


def run_cancel_request(options: argparse.Namespace) -> int:
    with connect(options) as client:
        print_document(options, client.cancel_request(job_of(options), options.request, **_sub_job(options)))
    return 0


def run_reset_prefix_cache(options: argparse.Namespace) -> int:
    where = {name: value for name, value in _sub_job(options).items() if value is not None}
    with connect(options) as client:
        reply = client.reset_prefix_cache(
            job_of(options), drain=not options.no_drain, timeout_s=options.timeout, **where
        )
    print_document(options, reply)
    return 0


def run_bootstrap_router_replay(options: argparse.Namespace) -> int:
    job = job_of(options)
    source = options.source_sub_job_id or f"{job}:sampling:0"
    target = options.target_sub_job_id or f"{job}:training:0"
    with connect(options) as client:
        # The receiver is the replay's target; in a job with both kinds the service cannot guess it.
        reply = client.bootstrap_router_replay(
            job, source, target, max_cache_bytes=options.max_cache_bytes, sub_job_id=target
        )
    print_document(options, reply)
    return 0


def run_router_replay_discard(options: argparse.Namespace) -> int:
    with connect(options) as client:
        print_document(options, client.router_replay_discard(job_of(options), options.samples, **_sub_job(options)))
    return 0
