"""`cortex-training publish`: the verbs of `cortex-publish`, for those who have the whole command line installed."""

from __future__ import annotations

import argparse
from typing import Any


def add_parsers(subparsers: Any) -> None:
    """Add the command to an argparse object that ``add_subparsers`` returned."""
    publish = subparsers.add_parser(
        "publish",
        help="checkpoint publication: resolve, watch, publish, prune, probe (as cortex-publish)",
        # What follows has flags of its own, -help among them, that start with one dash. None of them is argparse's.
        add_help=False,
        prefix_chars="\0",
    )
    publish.add_argument("arguments", nargs=argparse.REMAINDER, metavar="VERB ...")
    publish.set_defaults(handler=run_publish)


def run_publish(options: argparse.Namespace) -> int:
    """Hand the rest of the command line on as it is. Returns the exit code of the verb: 0 done, 1 failed, 2 usage."""
    from cortex_training.publication.command import main

    return main(options.arguments)
