"""The publication log as tasks: what was resolved stays resolved, what is pruned is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from cortex_training.errors import ConfigurationError
from cortex_training.publication import PosixStore, PublicationLog, SaveManifest
from demo.prefect_server import PrefectServer
from prefect_cortex_training import prune, publish, resolve


def make_save(root: Path, name: str, step: int) -> str:
    save = f"exec/a/{name}"
    (root / save).mkdir(parents=True)
    SaveManifest("j", name, "weights-only", step, created_at="2026-01-01T00:00:00Z").write(PosixStore(root), save)
    return save


def test_publish_resolve_and_prune(on_server: PrefectServer, tmp_path: Path) -> None:
    saves = [make_save(tmp_path, f"cp_{step}", step) for step in (1, 2, 3)]
    root = str(tmp_path)

    @flow(result_serializer="json")
    def a_flow() -> Any:
        before = resolve(root)
        for step, save in enumerate(saves, 1):
            publish(root, save, epoch=1, step=step)
        return [before, resolve(root, seq=2), resolve(root, seq=2), resolve(root, min_step=4), prune(root, keep=1)]

    before, latest, same, too_new, pruned = a_flow()
    assert before is too_new is None
    assert latest == same
    assert (latest["step"], latest["checkpoint_id"], latest["save"]) == (3, "cp_3", saves[2])
    assert latest["location"] == f"{root}/{saves[2]}"
    assert pruned == {"removed": 2, "kept": 1}
    assert [entry.step for entry in PublicationLog(root).entries()] == [3]
    assert not (tmp_path / saves[0]).exists()


def test_what_was_resolved_stays_resolved_also_when_its_stored_result_is_lost(
    on_server: PrefectServer, tmp_path: Path, results_folder: Path
) -> None:
    """Somebody is asked about a model; what was published while the flow run waited is not what was approved."""
    root = str(tmp_path / "models")

    @flow(result_serializer="json")
    def a_flow() -> Any:
        publish(root, make_save(Path(root), "cp_1", 1), epoch=1, step=1)
        asked_about = resolve(root)
        PublicationLog(root).publish(make_save(Path(root), "cp_2", 2), 1, 2)
        shutil.rmtree(results_folder)
        return [asked_about, resolve(root), resolve(root, seq=2)]

    asked_about, promoted, latest = a_flow()
    assert promoted == asked_about
    assert latest["checkpoint_id"] == "cp_2"


def test_outside_of_a_flow_it_resolves_anew(on_server: PrefectServer, tmp_path: Path) -> None:
    PublicationLog(tmp_path).publish(make_save(tmp_path, "cp_1", 1), 1, 1)
    assert resolve(str(tmp_path))["checkpoint_id"] == "cp_1"


def test_a_bucket_needs_credentials(on_server: PrefectServer) -> None:
    @flow
    def a_flow() -> Any:
        return resolve("s3://bucket/prefix")

    with pytest.raises(ConfigurationError, match="needs credentials"):
        a_flow()
