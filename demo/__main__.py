"""``make demo``: Snowflake rows become a fine-tuned, published checkpoint on this machine."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape

from cortex_training.local.models import model_folder
from cortex_training.training.metrics import read_metrics
from demo.heldout import Comparison, Evaluation, compare
from demo.local_service import LocalService
from demo.processes import clean_environment
from demo.recipes import DATABASE, RECIPES, SCHEMA
from demo.report import Facts, Sample, StepLoss, draw_losses, print_summary, shortfall
from demo.rows import ExampleRow, load_rows, standard_library_rows, write_jsonl
from demo.snowflake_server import SnowflakeServer
from demo.stage import Outcome, Stage

ENGINES = {"airflow": "demo.engine_airflow", "prefect": "demo.engine_prefect", "cli": "demo.engine_cli"}
SAMPLES = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="airflow")
    parser.add_argument("--model", choices=sorted(RECIPES), default="smollm2")
    parser.add_argument("--work", type=Path, default=Path(".demo"), help="folder for everything the demo makes")
    parser.add_argument("--keep", action="store_true", help="leave the servers running until Ctrl-C, to look around")
    options = parser.parse_args(arguments)
    # A plain kill must run the same clean-up as Ctrl-C, or servers outlive the demo.
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(highlight=False)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {escape(text)}", soft_wrap=True)

    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    for folder in (work, work / "runs", work / "models"):
        folder.mkdir(parents=True)
    with contextlib.ExitStack() as servers:
        stage, rows = _set_the_stage(options, work, say, servers)
        say(f"held-out loss of the base model, {sum(r.split == 'heldout' for r in rows)} rows, plain transformers")
        before = _held_out_loss(stage.tokenizer, work, "before")
        engine = importlib.import_module(ENGINES[options.engine])
        outcome: Outcome = engine.run_pipeline(stage)
        say("held-out loss of the exported model")
        after = _held_out_loss(outcome.model, work, "after")
        facts = _facts(options, stage, outcome, rows, compare(before, after), time.monotonic() - began)
        draw_losses(facts)
        print_summary(facts, console)
        problem = shortfall(facts.held_out)
        if problem:
            console.print(f"[bold red]{problem}[/bold red]")
        if options.keep:
            console.print(f"Servers keep running: {outcome.look_at}. Ctrl-C ends them.")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        return 1 if problem else 0


def _set_the_stage(
    options: argparse.Namespace, work: Path, say: Callable[[str], None], servers: contextlib.ExitStack
) -> tuple[Stage, list[ExampleRow]]:
    recipe = RECIPES[options.model]
    say(f"model folder of {recipe.model_name} (converted once, then cached)")
    folder = Path(model_folder(recipe.model_folder))
    snowflake = SnowflakeServer(work / "snowflake")
    servers.callback(snowflake.stop)
    snowflake.start()
    say(f"Snowflake-compatible server on https://{snowflake.host}:{snowflake.port}")
    rows = standard_library_rows()
    with snowflake.connect(DATABASE, SCHEMA) as connection:
        loaded = load_rows(connection, rows)
    say(f"{loaded} rows of Python's own documentation in TRAINING_EXAMPLES")
    held_out = [row for row in rows if row.split == "heldout"]
    write_jsonl(held_out, work / "heldout.jsonl")
    service = LocalService(work / "service")
    servers.callback(service.stop)
    service.start()
    say(f"local service on {service.base_url}")
    stage = Stage(
        work=work,
        recipe=recipe,
        service=service,
        snowflake=snowflake,
        tokenizer=folder,
        sample_prompts=[row.prompt for row in held_out[:SAMPLES]],
        sample_references=[row.completion for row in held_out[:SAMPLES]],
        say=say,
        servers=servers,
    )
    return stage, rows


def _held_out_loss(model: Path, work: Path, name: str) -> Evaluation:
    """In a process of its own, so that nothing of the service or the client can touch the number."""
    out = work / f"heldout-{name}.json"
    command = [sys.executable, "-m", "demo.heldout", "--model", str(model), "--rows", str(work / "heldout.jsonl")]
    subprocess.run([*command, "--out", str(out), "--threads", "2"], check=True, env=clean_environment())
    return Evaluation.read(out)


def _facts(
    options: argparse.Namespace,
    stage: Stage,
    outcome: Outcome,
    rows: list[ExampleRow],
    held_out: Comparison,
    seconds: float,
) -> Facts:
    wanted = [row for row in rows if row.split == "heldout"][:SAMPLES]
    return Facts(
        engine=options.engine,
        model=stage.recipe.model_name,
        rows=sum(row.split == "train" for row in rows),
        losses=[StepLoss(row["step"], row["loss"]) for row in read_metrics(str(outcome.run_root))],
        held_out=held_out,
        samples=[
            Sample(row.prompt, row.completion, before, after)
            for row, before, after in zip(wanted, outcome.before, outcome.after, strict=True)
        ],
        entry=outcome.entry,
        gpu_seconds=sum(_gpu_seconds(stage, job_id) for job_id in outcome.job_ids),
        worker_slot_s=outcome.worker_slot_s,
        seconds=seconds,
        plot=Path(_shown(stage.work / "loss.png")),
        look_at=[
            ("run", _shown(outcome.run_root)),
            ("model", _shown(outcome.model)),
            ("service log", _shown(stage.service.folder / "execution.jsonl")),
            ("engine", outcome.look_at),
        ],
    )


def _shown(path: Path) -> str:
    """A path as a person would type it from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _gpu_seconds(stage: Stage, job_id: str) -> float:
    """What the service itself counted for a job."""
    from cortex_training import CortexTrainingClient

    with CortexTrainingClient.from_pat(stage.service.base_url, stage.service.token, DATABASE, SCHEMA) as client:
        return float(str(dict(client.get_job(job_id))["gpu_seconds"]))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
