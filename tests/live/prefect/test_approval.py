"""A model is promoted when a person has said so, and no process waits for the person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.flow_runs import resume_flow_run

from cortex_training.publication import PosixStore, PublicationLog, SaveManifest

from .conftest import Live, flow_processes, sub_jobs, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


def test_what_was_approved_is_promoted_and_nothing_else(live: Live, cortex: Any, tmp_path: Path) -> None:
    candidates, production = tmp_path / "candidates", tmp_path / "production"
    candidates.mkdir()
    production.mkdir()
    made = live.run("makes-a-candidate/live", sub_jobs=sub_jobs(), root=str(candidates))
    live.wait_for_state(made, "Completed")
    candidate = PublicationLog(candidates).latest()
    assert candidate is not None

    folders = {"candidates": str(candidates), "production": str(production), "cortex": "cortex", "min_step": 0}
    refused, approved = (live.run("promote-after-approval/live", **folders) for _ in range(2))
    for run in (refused, approved):
        live.wait_for_state(run, "Suspended")
        wait_until(lambda run=run: not flow_processes(run), "the end of the flow's process")
    assert PublicationLog(production).entries() == []

    resume_flow_run(refused, run_input={"approved": False, "reason": "worse than before"})
    live.wait_for_state(refused, "Completed")
    assert PublicationLog(production).entries() == []
    resume_flow_run(approved, run_input={"approved": True})
    live.wait_for_state(approved, "Completed")

    (entry,) = PublicationLog(production).entries()
    promoted = SaveManifest.read(PosixStore(production), entry.save)
    assert promoted.files == SaveManifest.read(PosixStore(candidates), candidate.save).files
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(approved).run_count == 1
