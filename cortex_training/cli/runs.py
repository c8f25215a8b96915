"""Commands of durable training runs: build-dataset, train, runs, plot."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex_training.cli.connection import connect_async
from cortex_training.cli.documents import print_document
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from cortex_training.training import Progress, TrainingPlan, TrainingResult
    from cortex_training.training.progress import ProgressCallback

EXIT_INTERRUPTED = 130


def add_parsers(subparsers: Any) -> None:
    build = subparsers.add_parser("build-dataset", help="turn rows of a JSON-lines file into training data")
    build.add_argument("rows", metavar="ROWS.jsonl", help="objects with prompt and completion, messages, or text")
    build.add_argument("out", metavar="FOLDER")
    build.add_argument("--tokenizer", required=True, metavar="FOLDER", help="the model's folder, with tokenizer.json")
    build.add_argument("--max-seq-len", required=True, type=int, metavar="TOKENS")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--overlong", choices=("error", "truncate", "skip"), default="error")
    build.set_defaults(handler=run_build_dataset)

    train = subparsers.add_parser("train", help="begin a training run, or go on with it: the same command does both")
    train.add_argument("plan", metavar="PLAN.toml", help="the training plan, TOML or JSON")
    train.set_defaults(handler=run_train)

    runs = subparsers.add_parser("runs", help="what ran in a root, where it is, why it stopped")
    runs.add_argument("root", metavar="ROOT", help="a directory, or s3://BUCKET/PREFIX")
    runs.add_argument("--creds", metavar="LIST", help="where an s3:// root's credentials are: kind:location,…")
    runs.set_defaults(handler=run_runs)

    plot = subparsers.add_parser("plot", help="draw the loss of a run as a PNG")
    plot.add_argument("root", metavar="ROOT", help="a directory, or s3://BUCKET/PREFIX")
    plot.add_argument("--out", metavar="FILE", help="default: loss.png in the root, or here for an s3:// root")
    plot.add_argument("--creds", metavar="LIST", help="where an s3:// root's credentials are: kind:location,…")
    plot.set_defaults(handler=run_plot)


def run_build_dataset(options: argparse.Namespace) -> int:
    from cortex_training.datasets import build_dataset

    manifest = build_dataset(
        _json_lines(Path(options.rows)),
        options.out,
        tokenizer=options.tokenizer,
        max_seq_len=options.max_seq_len,
        seed=options.seed,
        overlong=options.overlong,
        source=Path(options.rows).name,
    )
    print_document(
        options,
        {
            "manifest": str(Path(options.out).resolve() / "manifest.json"),
            "rows": manifest.rows,
            "sequences": manifest.sequences,
            "tokens": manifest.tokens,
            "content_sha256": manifest.content_sha256,
        },
    )
    return 0


def run_train(options: argparse.Namespace) -> int:
    """Train; on SIGTERM or Ctrl-C let the operation in flight land, release the run and exit with 130."""
    from cortex_training.training import RunInterrupted, TrainingPlan

    plan = TrainingPlan.from_dict(_read_plan(Path(options.plan)))
    try:
        with _progress(plan) as progress:
            result = asyncio.run(_train(options, plan, progress))
    except RunInterrupted as interrupted:
        print(str(interrupted), file=sys.stderr)
        return EXIT_INTERRUPTED
    print_document(options, result.to_dict())
    return 0


def run_runs(options: argparse.Namespace) -> int:
    from cortex_training.training import status

    found = status(options.root, options.creds)
    state = found.state
    print_document(
        options,
        {
            "root": found.root,
            "what": found.what_happened,
            "drivers": found.epochs,
            "driver": found.driven(),
            "stopped_because": state.stopped,
            "entry": found.entry,
            "gpu_seconds": round(state.gpu_seconds(time.time())),
            "skipped_batches": list(state.skipped),
            "identity": found.identity,
            "segments": [
                {
                    "segment": s.number,
                    "job_id": s.job_id,
                    "from_step": s.start_step,
                    "confirmed_step": s.confirmed_step,
                    "begun_as": s.cause,
                    "begun_because": s.reason,
                    "ended_because": s.ended,
                }
                for s in state.segments
            ],
        },
    )
    return 0


def run_plot(options: argparse.Namespace) -> int:
    from cortex_training.training.chart import draw_losses
    from cortex_training.training.root import is_bucket

    out = options.out or ("loss.png" if is_bucket(options.root) else str(Path(options.root) / "loss.png"))
    print_document(options, {"plot": draw_losses(options.root, out, options.creds)})
    return 0


async def _train(options: argparse.Namespace, plan: TrainingPlan, progress: ProgressCallback) -> TrainingResult:
    from cortex_training.training import run

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    async with connect_async(options) as client:
        return await run(plan, client, progress, stop=stop)


@contextlib.contextmanager
def _progress(plan: TrainingPlan) -> Iterator[ProgressCallback]:
    """A bar on a terminal, lines anywhere else; both on standard error: standard output is for the result."""
    if not sys.stderr.isatty():
        yield lambda seen: print(seen.line(), file=sys.stderr, flush=True)
        return
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        yield lambda seen: print(seen.line(), file=sys.stderr, flush=True)
        return
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TextColumn("{task.fields[left]}"),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("start", total=plan.steps or None, facts="", left="")
        left = ""

        def show(seen: Progress) -> None:
            nonlocal left
            if seen.stage == "log":
                bar.console.print(seen.message, markup=False, highlight=False)
                return
            if seen.remaining_s is not None:
                left = f"{timedelta(seconds=round(seen.remaining_s))} left"
            facts = " · ".join(seen.facts())
            bar.update(
                task, total=seen.steps, completed=seen.step, description=seen.stage, facts=escape(facts), left=left
            )

        yield show


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        plan = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, OSError) as problem:
        raise ConfigurationError(f"the plan {path} cannot be read: {problem}", field="plan") from None
    if not isinstance(plan, dict):
        raise ConfigurationError(f"the plan {path} is not an object", field="plan")
    return plan


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as problem:
                raise ConfigurationError(f"{path}, line {number}: not JSON: {problem}", field="rows") from None
            if not isinstance(row, dict):
                raise ConfigurationError(f"{path}, line {number}: not an object", field="rows")
            yield row
