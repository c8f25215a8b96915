"""`cortex-training`, or `ct`: the service from a shell.

Standard output is one JSON document and nothing else; what went wrong is on standard error. Exit codes: 0 done, 1
failed, 2 used wrongly or without a connection, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from cortex_training.cli import (
    artifacts,
    checkpoints,
    jobs,
    login,
    operations,
    publication,
    runs,
    sampling,
    serve,
    training,
    upkeep,
)
from cortex_training.cli.connection import add_global_flags
from cortex_training.cli.failures import explain

_EPILOG = """\
Flags of the connection and --job stand before the command:
  cortex-training --job JOB_ID step --lr 1e-4
  cortex-training --base-url http://127.0.0.1:8484 --database LOCAL get JOB_ID
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; a parsed command has its `handler`."""
    parser = argparse.ArgumentParser(
        prog="cortex-training",
        description="Fine-tuning on the Cortex Training service.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_global_flags(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in (
        jobs,
        training,
        sampling,
        checkpoints,
        operations,
        artifacts,
        publication,
        runs,
        serve,
        login,
        upkeep,
    ):
        group.add_parsers(commands)
    return parser


def _warn_of_other_client() -> None:
    """The public client owns the same import name; whichever was installed last overwrote files of the other."""
    try:
        metadata.distribution("cortex-training")
    except metadata.PackageNotFoundError:
        return
    print(
        "warning: cortex-training is installed beside cortex-training-client under the same import name; run "
        "`pip uninstall -y cortex-training cortex-training-client`, then `pip install cortex-training-client`",
        file=sys.stderr,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        options = build_parser().parse_args(argv)
    except SystemExit as end:  # argparse: 0 after --help, 2 for a wrong command line
        return end.code if isinstance(end.code, int) else 2
    _warn_of_other_client()
    try:
        exit_code: int = options.handler(options)
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); keep Python from complaining once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return explain(error)
