"""What every engine of the demo is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from demo.local_service import LocalService
from demo.recipes import Recipe
from demo.snowflake_server import SnowflakeServer


@dataclass(frozen=True)
class Stage:
    """Servers that run, folders that exist, and one line of text at a time to the person who watches.

    An engine's own servers are put on `servers`, so that they end with the demo, not before.
    """

    work: Path
    recipe: Recipe
    service: LocalService
    snowflake: SnowflakeServer
    tokenizer: Path
    sample_prompts: list[str]
    sample_references: list[str]
    say: Callable[[str], None]
    servers: ExitStack

    @property
    def runs_root(self) -> Path:
        """Holds one folder per training run."""
        return self.work / "runs"

    @property
    def models_root(self) -> Path:
        """The publication log of the fine-tuned models."""
        return self.work / "models"


@dataclass(frozen=True)
class Outcome:
    """What an engine made. `model` is the folder of the exported weights."""

    run_root: Path
    model: Path
    entry: str
    before: list[str]
    after: list[str]
    job_ids: list[str]
    worker_slot_s: float | None = None
    look_at: str = ""
