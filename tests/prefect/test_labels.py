"""What a flow run writes down, on a real server."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from cortex_training.errors import ConfigurationError
from demo.prefect_server import PrefectServer
from prefect_cortex_training.labels import (
    RunLabels,
    finished_key,
    job_key,
    jobs_in,
    root_labels,
    roots_in,
)


@flow
async def write_and_read(steps: list[dict[str, Any]]) -> str:
    labels = RunLabels.of_current_run("a test")
    for step in steps:
        await labels.write(step)
    return str(flow_run.id)


async def test_labels_are_added_and_replaced_and_can_be_read_from_elsewhere(on_server: PrefectServer) -> None:
    run_id = await write_and_read([{"a": "1", "b": 2}, {"b": 3, "c": True}])
    assert await RunLabels(run_id).read() == {"a": "1", "b": 3, "c": True}
    async with get_client() as client:
        stored = (await client.read_flow_run(UUID(run_id))).labels
    assert stored["cortex_training.b"] == 3
    assert "prefect.flow.id" in stored


async def test_the_first_value_is_remembered(on_server: PrefectServer) -> None:
    labels = RunLabels(await write_and_read([]))
    assert await labels.remember("job", "first") == "first"
    assert await labels.remember("job", "second") == "first"


async def test_claims_that_two_processes_made_at_once_have_one_winner(on_server: PrefectServer) -> None:
    run_id = await write_and_read([{"epoch.abc.theirs": 6, "epoch.abcd.another": 1}])
    await RunLabels(run_id).write({"epoch.abc.ours": 7})
    assert await RunLabels(run_id).remember("epoch.abc", 9) == 6


async def test_labels_written_at_the_same_moment_are_all_stored(on_server: PrefectServer) -> None:
    run_id = await write_and_read([])
    await asyncio.gather(*(RunLabels(run_id).write({f"key-{n}": n}) for n in range(12)))
    assert await RunLabels(run_id).read() == {f"key-{n}": n for n in range(12)}


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the server has been asked while nobody listened there; it is back the third time."""
    asked: list[int] = []

    def client() -> Any:
        asked.append(len(asked))
        if len(asked) < 3:
            raise httpx.ConnectError("All connection attempts failed")
        return get_client()

    monkeypatch.setattr("prefect_cortex_training.labels.get_client", client)
    monkeypatch.setattr("prefect_cortex_training.patience._TRY_AGAIN_S", 0.01)
    return asked


async def test_a_server_that_restarts_is_waited_for(on_server: PrefectServer, away: list[int]) -> None:
    labels = RunLabels(await write_and_read([{"a": "1"}]))
    assert len(away) == 3
    away.clear()
    assert await labels.read() == {"a": "1"}
    assert len(away) == 3


async def test_a_server_that_stays_away_is_named(away: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_cortex_training.patience.SERVER_AWAY_S", 0.0)
    with pytest.raises(httpx.ConnectError):
        await RunLabels("00000000-0000-4000-8000-000000000000").read()
    assert len(away) == 1


def test_outside_a_flow_run_the_reason_is_named() -> None:
    with pytest.raises(ConfigurationError, match="create_job was called outside a flow run"):
        RunLabels.of_current_run("create_job")


def test_jobs_and_roots_are_read_with_their_owners() -> None:
    labels = {
        job_key("training", 0, "j0"): "",
        job_key("training", 10, "j10"): "block",
        job_key("training", 2, "j2"): "block",
        job_key("training", 2, "chosen.by.the.service"): "block",
        job_key("eval", 0, "e0"): "",
        finished_key("j2"): True,
        **root_labels("/runs/a", "block"),
        "step.j0.1.abc": "intent",
    }
    jobs = jobs_in(labels)
    assert [(job.name, job.generation, job.job_id) for job in jobs] == [
        ("eval", 0, "e0"),
        ("training", 0, "j0"),
        ("training", 2, "chosen.by.the.service"),
        ("training", 2, "j2"),
        ("training", 10, "j10"),
    ]
    assert [job.credentials for job in jobs] == [None, None, "block", "block", "block"]
    assert [job.job_id for job in jobs if job.finished] == ["j2"]
    assert [(root.root, root.credentials) for root in roots_in(labels)] == [("/runs/a", "block")]


def test_a_label_that_somebody_else_wrote_hides_no_job():
    labels = {"job.train.0.abc": "block", "job.mine": "x", "job.a.b.c": "x", "job.": "x", "jobs": "x"}
    assert [job.job_id for job in jobs_in(labels)] == ["abc"]
