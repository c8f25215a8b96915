"""Triggers that were deferred by an earlier release still run: what Airflow stored then is read now.

A file ``airflow_triggers_v<n>.json`` holds class path and kwargs as that version wrote them. It is never edited.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

# Airflow makes its home at the first import; a test must not make one in somebody's real home.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-home-"))

from airflow.triggers.base import BaseTrigger

STORED = [
    pytest.param(entry, id=f"{path.stem}:{entry['classpath'].rpartition('.')[2]}")
    for path in sorted(Path(__file__).parent.glob("airflow_triggers_v*.json"))
    for entry in json.loads(path.read_text())
]


def _made(entry: dict[str, Any]) -> Any:
    module, _, name = entry["classpath"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**entry["kwargs"])


@pytest.mark.parametrize("entry", STORED)
def test_is_understood(entry: dict[str, Any]) -> None:
    trigger = _made(entry)
    assert trigger.unknown == {}
    for name, value in entry["kwargs"].items():
        assert getattr(trigger, name) == value


@pytest.mark.parametrize("entry", STORED)
def test_is_what_is_written_today_or_less(entry: dict[str, Any]) -> None:
    classpath, kwargs = _made(entry).serialize()
    assert classpath == entry["classpath"]
    assert {name: kwargs[name] for name in entry["kwargs"]} == entry["kwargs"]


def test_there_is_one_of_each_trigger() -> None:
    package = importlib.import_module("airflow_cortex_training.triggers").__path__[0]
    kinds = set()
    for path in Path(package).glob("*.py"):
        module = importlib.import_module(f"airflow_cortex_training.triggers.{path.stem}")
        kinds |= {
            f"{kind.__module__}.{kind.__name__}"
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, BaseTrigger) and kind.__module__ == module.__name__
        }
    assert {entry.values[0]["classpath"] for entry in STORED} == kinds


@pytest.mark.parametrize("entry", [entry for entry in STORED if entry.values[0]["kwargs"]["v"] == 1])
def test_an_upgrade_changes_nothing_that_was_agreed(entry: dict[str, Any]) -> None:
    """What a field that came later is for a trigger that was stored before it: the behaviour of then."""
    trigger = _made(entry)
    then = {"CortexTrainingJobTrigger": False, "CortexTrainingTrainTrigger": True}
    if type(trigger).__name__ in then:
        assert trigger.cancel_on_kill is then[type(trigger).__name__]
