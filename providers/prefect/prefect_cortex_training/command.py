"""``prefect-cortex-training``: the two processes that keep suspended flow runs going.

    prefect-cortex-training watch    resume whose wait is over; cancel the jobs of runs that ended
    prefect-cortex-training drive    train for flow runs that are suspended in `train`

Both keep nothing and need what a flow run needs: ``PREFECT_API_URL``, and the way to the service. Each may be stopped
and started at any time, and run more than once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from prefect.logging.configuration import setup_logging

from cortex_training.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    setup_logging()
    for name in ("prefect_cortex_training.watch", "prefect_cortex_training.drive"):
        logging.getLogger(f"prefect.{name}").setLevel(logging.INFO)
    try:
        asyncio.run(_watch(options) if options.verb == "watch" else _drive(options))
    except ConfigurationError as error:
        sys.stderr.write(f"prefect-cortex-training {options.verb}: {error}\n")
        return 2
    return 0


async def _watch(options: argparse.Namespace) -> None:
    from prefect_cortex_training.reconcile import Rules
    from prefect_cortex_training.watch import Watcher

    rules = Rules(
        cancel_on=frozenset(end for end in options.cancel_on.split(",") if end),
        look_back_s=options.look_back,
        crashed_after_s=options.crashed_after,
    )
    async with Watcher(every_s=options.every, rules=rules) as watcher:
        if options.once:
            await watcher.look()
        else:
            await watcher.watch(_stop_on_signals())


async def _drive(options: argparse.Namespace) -> None:
    from prefect_cortex_training.drive import Drive

    await Drive(every_s=options.every, max_runs=options.max_runs).drive(_stop_on_signals())


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    return stop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prefect-cortex-training", description="Keep flow runs going that are suspended while GPUs work."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    watch = verbs.add_parser("watch", help="resume flow runs whose wait is over; cancel the jobs of runs that ended")
    _seconds(watch, "--every", 5.0, "seconds between two passes")
    watch.add_argument(
        "--cancel-on",
        default="cancelled",
        metavar="END,...",
        help="ends of flow runs that cancel their jobs: cancelled, failed, crashed, completed; '' for none "
        "(default: cancelled)",
    )
    _seconds(watch, "--look-back", 86_400.0, "runs that ended longer ago are left alone, in seconds")
    _seconds(watch, "--crashed-after", None, "mark a run as crashed that has sent no heartbeat for so many seconds")
    watch.add_argument("--once", action="store_true", help="make one pass and end, e.g. from a schedule")
    drive = verbs.add_parser("drive", help="train for flow runs that are suspended in `train`")
    _seconds(drive, "--every", 5.0, "seconds between two passes")
    drive.add_argument(
        "--max-runs", type=_whole, default=16, metavar="N", help="runs of this process at once (default: 16)"
    )
    return parser


def _seconds(parser: argparse.ArgumentParser, name: str, default: float | None, meaning: str) -> None:
    shown = f" (default: {default:g})" if default is not None else ""
    parser.add_argument(name, type=_positive, default=default, metavar="S", help=meaning + shown)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
