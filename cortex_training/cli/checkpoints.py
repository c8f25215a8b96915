"""Commands about checkpoints: checkpoints, export, delete-checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from cortex_training.cli.connection import connect
from cortex_training.cli.documents import print_document
from cortex_training.cli.jobs import add_job_argument, job_of


def add_parsers(subparsers: Any) -> None:
    listing = subparsers.add_parser("checkpoints", help="print a job's checkpoints")
    add_job_argument(listing)
    listing.set_defaults(handler=run_checkpoints)

    export = subparsers.add_parser("export", help="print (secret) links to a checkpoint's files")
    export.add_argument("checkpoint", metavar="CHECKPOINT_ID")
    export.set_defaults(handler=run_export)

    delete = subparsers.add_parser("delete-checkpoint", help="delete a checkpoint")
    delete.add_argument("checkpoint", metavar="CHECKPOINT_ID")
    delete.set_defaults(handler=run_delete)


def run_checkpoints(options: argparse.Namespace) -> int:
    with connect(options) as client:
        print_document(options, {"checkpoints": client.list_checkpoints(job_of(options))})
    return 0


def run_export(options: argparse.Namespace) -> int:
    with connect(options) as client:
        print_document(options, client.export_checkpoint(job_of(options), options.checkpoint))
    return 0


def run_delete(options: argparse.Namespace) -> int:
    job = job_of(options)
    with connect(options) as client:
        client.delete_checkpoint(job, options.checkpoint)
    print_document(options, {"checkpoint_id": options.checkpoint, "deleted": True, "job_id": job})
    return 0
