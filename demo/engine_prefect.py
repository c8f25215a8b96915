"""The main job on a real Prefect server: the flow that users copy, in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from demo.follow import Steps
from demo.prefect_server import PrefectServer
from demo.processes import stop_group
from demo.recipes import DATABASE, SCHEMA, TABLE
from demo.stage import Outcome, Stage

FLOWS = Path(__file__).resolve().parent.parent / "flows"
_TASK_ENDED = re.compile(r"Task run '(?P<task>[^']+)' - Finished in state (?P<state>\w+)")


def run_pipeline(stage: Stage) -> Outcome:
    """Start a Prefect server, make the two blocks, run the flow. Raises RuntimeError with the log when it fails."""
    server = PrefectServer(stage.work / "prefect")
    stage.servers.callback(server.stop)
    server.start(ui=True)
    stage.say(f"Prefect server on {server.url}")
    order, answer = stage.work / "flow-parameters.json", stage.work / "flow-result.json"
    order.write_text(json.dumps(_order(stage)))
    # The token goes through the child's standard input: neither a parameter nor an argument may hold it.
    child = subprocess.Popen(
        [sys.executable, "-m", "demo.prefect_flow", str(order), str(answer)],
        env=server.environment() | {"PYTHONPATH": f"{FLOWS}:{FLOWS.parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    stage.servers.callback(stop_group, child)
    assert child.stdin is not None
    child.stdin.write(stage.service.token)
    child.stdin.close()
    _follow(stage, child, stage.work / "flow.log")
    result: dict[str, Any] = json.loads(answer.read_text())
    return Outcome(
        run_root=Path(result["training"]["root"]),
        model=Path(result["model"]),
        entry=result["entry"],
        before=_texts(result["samples_before"]),
        after=_texts(result["samples_after"]),
        job_ids=[result["job_id"]],
        look_at=server.url,
    )


def _order(stage: Stage) -> dict[str, Any]:
    recipe = stage.recipe
    snowflake = stage.snowflake.connection_arguments(DATABASE, SCHEMA)
    return {
        "snowflake": {name: snowflake[name] for name in ("account", "user", "password", "database", "schema")},
        "cortex": {"host": stage.service.base_url, "database": DATABASE, "schema": SCHEMA},
        "parameters": {
            "root": str(stage.runs_root / "prefect"),
            "models": str(stage.models_root),
            "tokenizer": str(stage.tokenizer),
            "table": TABLE,
            "model": recipe.model_name,
            "connect_options": {name: snowflake[name] for name in ("host", "port", "insecure_mode")},
            "max_seq_len": recipe.max_seq_len,
            "steps": recipe.steps,
            "micro_batch_size": recipe.micro_batch_size,
            "save_every_steps": recipe.save_every_steps,
            "learning_rate": recipe.learning_rate,
            "warmup_steps": recipe.warmup_steps,
            "lora": recipe.lora,
            "dtype": "float32",
            "prompts": stage.sample_prompts,
            "max_tokens": recipe.max_new_tokens,
            "seed": 1,
        },
    }


def _follow(stage: Stage, child: subprocess.Popen[str], log: Path) -> None:
    reader = threading.Thread(target=_read, args=(stage, child, log), daemon=True)
    reader.start()
    steps = Steps(stage.runs_root, stage.recipe.steps, stage.say)
    while reader.is_alive():
        reader.join(1.0)
        steps.look()
    if child.wait() != 0:
        raise RuntimeError(f"the flow ended with {child.returncode}:\n{log.read_text()[-4000:]}")


def _read(stage: Stage, child: subprocess.Popen[str], log: Path) -> None:
    assert child.stdout is not None
    with log.open("w") as kept:
        for line in child.stdout:
            kept.write(line)
            kept.flush()
            ended = _TASK_ENDED.search(line)
            if ended:
                stage.say(f"{ended['task']}: {ended['state']}")


def _texts(path: str) -> list[str]:
    return [str(result["text"]) for result in json.loads(Path(path).read_text(encoding="utf-8"))]
