"""Commands that change a training sub-job: fwd-bwd, step, save, load, weight-sync. They need ``--job``."""

from __future__ import annotations

import argparse
from typing import Any

from cortex_training.cli.connection import connect
from cortex_training.cli.documents import print_document, read_object
from cortex_training.cli.jobs import job_of
from cortex_training.cli.waiting import shown
from cortex_training.config import CheckpointType
from cortex_training.errors import ConfigurationError
from cortex_training.protocol.results import checkpoint_id
from cortex_training.protocol.training import WEIGHT_FORMATS


def add_parsers(subparsers: Any) -> None:
    fwd_bwd = subparsers.add_parser("fwd-bwd", help="send one batch: forward and backward")
    fwd_bwd.add_argument("file", metavar="FILE", help="the batch as JSON, or - for standard input")
    fwd_bwd.add_argument("--chunk-group-id", metavar="ID", help="name of the operation; it is executed once per name")
    fwd_bwd.set_defaults(handler=run_forward_backward)

    step = subparsers.add_parser("step", help="make one optimizer step")
    step.add_argument("--lr", type=float, help="learning rate (default: the job's optimizer decides)")
    add_no_poll(step)
    step.set_defaults(handler=run_step)

    save = subparsers.add_parser("save", help="save a checkpoint")
    save.add_argument("--type", dest="checkpoint_type", choices=[str(kind) for kind in CheckpointType])
    save.add_argument("--checkpoint-id", metavar="ID", help="a wish; the service names the checkpoint")
    add_no_poll(save)
    save.set_defaults(handler=run_save)

    load = subparsers.add_parser("load", help="load a checkpoint into the running job")
    load.add_argument("checkpoint", metavar="CHECKPOINT_ID")
    load.add_argument("--source-job-id", metavar="JOB_ID", help="the job that saved it (default: this one)")
    load.add_argument("--target-sub-job-id", metavar="ID")
    add_no_poll(load)
    load.set_defaults(handler=run_load)

    sync = subparsers.add_parser("weight-sync", help="copy the training weights to sampling sub-jobs")
    sync.add_argument("--source-sub-job-id", metavar="ID", help="default: JOB_ID:training:0")
    sync.add_argument(
        "--target-sub-job-id", metavar="ID", action="append", help="default: JOB_ID:sampling:0; may be repeated"
    )
    sync.add_argument("--operation-sub-job-id", metavar="ID", help="sub-job that carries the operation out")
    sync.add_argument("--operation-sub-job-type", metavar="TYPE")
    sync.add_argument("--weight-format", choices=WEIGHT_FORMATS)
    add_no_poll(sync)
    sync.set_defaults(handler=run_weight_sync)


def add_no_poll(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-poll", action="store_true", help="print the request id without waiting for the result")


def finish(options: argparse.Namespace, client: Any, document: dict[str, Any], *, poll: bool) -> dict[str, Any]:
    """Wait for the request in `document` if asked to, print the document with its result, return the result."""
    if poll:
        document["result"] = result_of(client, document["job_id"], document["request_id"])
    print_document(options, {name: value for name, value in document.items() if value is not None})
    return document.get("result") or {}


def result_of(client: Any, job_id: str, request_id: str) -> dict[str, Any]:
    """The result of a request; a terminal shows meanwhile what is waited for."""
    with shown(f"request {request_id}"):
        result: dict[str, Any] = client.poll_request(job_id, request_id)
        return result


def poll_wish(spec: dict[str, Any]) -> bool:
    """The ``poll`` of a request file, true by default. Raises `ConfigurationError` unless it is a boolean."""
    poll = spec.pop("poll", True)
    if not isinstance(poll, bool):
        raise ConfigurationError.of("poll", poll, "must be true or false")
    return poll


def run_forward_backward(options: argparse.Namespace) -> int:
    from cortex_training.payloads import build_forward_backward_payload

    job = job_of(options)
    spec = read_object(options.file)
    poll = poll_wish(spec)
    frame = build_forward_backward_payload(spec)
    with connect(options) as client:
        request_id = client.forward_backward(job, frame, chunk_group_id=options.chunk_group_id)
        document = {"job_id": job, "payload_size_bytes": len(frame), "request_id": request_id}
        finish(options, client, document, poll=poll)
    return 0


def run_step(options: argparse.Namespace) -> int:
    job = job_of(options)
    with connect(options) as client:
        request_id = client.step(job, options.lr)
        document = {"job_id": job, "learning_rate": options.lr, "request_id": request_id}
        finish(options, client, document, poll=not options.no_poll)
    return 0


def run_save(options: argparse.Namespace) -> int:
    job = job_of(options)
    with connect(options) as client:
        request_id = client.save(job, options.checkpoint_id, options.checkpoint_type)
        document: dict[str, Any] = {"job_id": job, "request_id": request_id}
        if not options.no_poll:
            document["result"] = result_of(client, job, request_id)
            document["checkpoint_id"] = checkpoint_id(document["result"])
    print_document(options, document)
    return 0


def run_load(options: argparse.Namespace) -> int:
    job = job_of(options)
    with connect(options) as client:
        request_id = client.load(
            job, options.checkpoint, options.source_job_id, target_sub_job_id=options.target_sub_job_id
        )
        document = {
            "checkpoint_id": options.checkpoint,
            "job_id": job,
            "request_id": request_id,
            "source_job_id": options.source_job_id,
            "target_sub_job_id": options.target_sub_job_id,
        }
        finish(options, client, document, poll=not options.no_poll)
    return 0


def run_weight_sync(options: argparse.Namespace) -> int:
    job = job_of(options)
    source = options.source_sub_job_id or f"{job}:training:0"
    targets = options.target_sub_job_id or [f"{job}:sampling:0"]
    with connect(options) as client:
        request_id = client.weight_sync(
            job,
            source,
            targets,
            weight_format=options.weight_format,
            sub_job_id=options.operation_sub_job_id,
            sub_job_type=options.operation_sub_job_type,
        )
        document = {
            "job_id": job,
            "request_id": request_id,
            "source_sub_job_id": source,
            "target_sub_job_ids": targets,
            "weight_format": options.weight_format,
        }
        finish(options, client, document, poll=not options.no_poll)
    return 0
