"""A run that an earlier release began goes on under this one: its plan, its root and its journal are read as they are.

A file ``training_root_v<n>.json`` holds the plan and every file of a root as that version left them, stopped after step
3 of 6. It is never edited.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex_training.publication import PosixStore, PublicationLog, SaveManifest
from cortex_training.training import TrainingPlan, status
from cortex_training.training.journal import JournalWriter, read_journal
from cortex_training.training.metrics import read_metrics
from cortex_training.training.root import claim_identity
from cortex_training.training.state import replay

STORED = sorted(Path(__file__).parent.glob("training_root_v*.json"))


@pytest.fixture(params=STORED, ids=lambda path: path.stem)
def stored(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(request.param.read_text())
    return document


@pytest.fixture
def root(stored: dict[str, Any], tmp_path: Path) -> str:
    for name, text in stored["files"].items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path / "run")


def test_the_plan_is_taken(stored: dict[str, Any]) -> None:
    plan = TrainingPlan.from_dict(stored["plan"])
    plan.validate()
    written = plan.to_dict()
    assert {name: written[name] for name in stored["plan"]} == stored["plan"]


def test_the_state_is_read(root: str) -> None:
    found = status(root)
    current = found.state.current
    assert current is not None
    assert (current.confirmed_step, current.offset, current.given_up, current.complete) == (3, 0, None, False)
    assert (found.state.replacements, found.state.rollbacks, found.state.lr_factor) == (0, 0, 1.0)
    assert [save.step for save in current.saves()] == [2]
    assert found.what_happened == "confirmed step 3, goes on with the next driver"
    assert [row["step"] for row in read_metrics(root)] == [1, 2, 3]


def test_the_identity_still_fits_the_plan(stored: dict[str, Any], root: str) -> None:
    known = json.loads(stored["files"]["run.json"])["identity"]
    plan = TrainingPlan.from_dict(stored["plan"])
    mine = plan.identity(dataset_sha256=known["dataset_sha256"], frame_version=known["frame_version"])
    claim_identity(PosixStore(root), mine)


def test_the_publication_is_found(root: str) -> None:
    store = PosixStore(root)
    latest = PublicationLog(store).latest()
    assert latest is not None
    assert latest.step == 2
    assert SaveManifest.read(store, latest.save).global_steps == 2


def test_a_driver_takes_over_behind_the_old_records(root: str) -> None:
    store = PosixStore(root)
    before = read_journal(store)
    epoch = PublicationLog(store).claim_epoch()
    writer = JournalWriter.take_over(store, epoch.number, epoch.token, {})
    writer.append("released", {})
    after = read_journal(store)
    assert after[: len(before)] == before
    assert replay(after).epoch == 2
