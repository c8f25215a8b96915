"""Requests on disk: what a restarted service still answers, and what it never shows."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from cortex_training.local.request_store import RequestStore
from cortex_training.local.requests import Execution, Request
from cortex_training.states import RequestState


def begun(store: RequestStore, operation: str = "step", **fields: Any) -> Request:
    execution = Execution(operation, "job", "job:training:0", **fields)
    request = Request(execution, execution.execution_id)
    store.add(request)
    return request


def ended(store: RequestStore, operation: str, at: float, result: Any = None, **fields: Any) -> Request:
    request = begun(store, operation, **fields)
    one = request.execution
    one.result, one.ended_at = result, at
    one.move_to(RequestState.DONE)
    store.finish(one, {"loss": at})
    return request


def page(store: RequestStore, request: Request, cursor: str | None = None) -> dict[str, Any]:
    found = store.find("job", request.request_id)
    assert found is not None
    return found.page(cursor, None)


@pytest.mark.parametrize("result", [None, {"global_steps": 1}, {"text": "x" * 100_000}])
def test_a_page_is_the_same_after_a_restart(tmp_path: Path, result: Any) -> None:
    store = RequestStore(tmp_path)
    request = ended(store, "step", 1.0, result)
    before = request.page(None, None)
    assert before["result"] == result
    store.close()
    assert page(RequestStore(tmp_path), request) == before


def test_result_chunks_are_read_page_by_page(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    request = ended(store, "generate", 1.0, None, result_chunks=[bytes([at]) * 10 for at in range(20)])
    first = request.page(None, None)
    assert (len(first["events"]), first["next_cursor"]) == (16, "16")
    store.close()
    again = RequestStore(tmp_path)
    assert page(again, request) == first
    rest = page(again, request, "16")
    assert (len(rest["events"]), rest["next_cursor"]) == (4, "")


def test_large_results_are_not_kept_in_memory(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    execution = ended(store, "generate", 1.0, {"text": "x" * 100_000}, result_chunks=[b"y" * 100_000]).execution
    assert "x" * 1000 not in repr(execution.result)
    assert not isinstance(execution.result_chunks, list)
    assert list(execution.result_chunks) == [b"y" * 100_000]


def test_what_a_killed_service_had_not_ended_has_failed(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    waiting, done = begun(store), ended(store, "step", 1.0, {"global_steps": 1})
    store.close()
    again = RequestStore(tmp_path)
    left = page(again, waiting)
    assert (left["status"], left["result"]) == ("failed", None)
    assert left["error"] == "the service was restarted while this was pending"
    assert page(again, done)["status"] == "done"


def test_several_requests_stand_for_one_execution(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    first = ended(store, "forward-backward", 1.0, {"avg_loss": 6.0}, chunk_group_id="g")
    second = Request(first.execution)
    store.add(second)
    store.close()
    again = RequestStore(tmp_path)
    assert page(again, first)["result"] == page(again, second)["result"] == {"avg_loss": 6.0}
    assert again.find("another job", first.request_id) is None
    assert again.losses("job") == [1.0]
    # Both are one execution.
    assert [one["request_id"] for one in again.newest("job", 9)] == [first.request_id]


def test_events_that_were_not_taken_are_still_there(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    request = begun(store, "generate-stream", streaming=True)
    execution = request.execution
    execution.events.extend({"type": "result", "index": at} for at in range(3))
    execution.move_to(RequestState.DONE)
    store.finish(execution, {})
    assert request.page(None, "1")["events"] == [{"type": "result", "index": 0}]
    store.keep_events(execution)
    store.close()
    left = page(RequestStore(tmp_path), request)
    assert (left["status"], [event["index"] for event in left["events"]]) == ("done", [1, 2])


def test_what_was_lost_with_the_memory_is_not_shown_as_done(tmp_path: Path) -> None:
    store = RequestStore(tmp_path)
    kept = [ended(store, name, 1.0, {}) for name in ("forward-backward", "step")]
    lost = [ended(store, name, 3.0, {}) for name in ("forward-backward", "step", "load")]
    others = [ended(store, "save", 3.0, {}), ended(store, "generate", 3.0, {})]
    store.lose("job", ["job:training:0"], 2.0, "lost")
    assert {page(store, one)["status"] for one in [*kept, *others]} == {"done"}
    assert {(page(store, one)["status"], page(store, one)["error"]) for one in lost} == {("failed", "lost")}


def test_an_end_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A result whose second chunk can't be written leaves nothing of the first, nor an end."""
    store = RequestStore(tmp_path)
    request = begun(store, "generate")
    request.execution.result_chunks = [b"a", object()]  # type: ignore[list-item]
    request.execution.move_to(RequestState.DONE)
    with pytest.raises((sqlite3.Error, TypeError)):
        store.finish(request.execution, {})
    store.close()
    again = RequestStore(tmp_path)
    assert page(again, request)["status"] == "failed"
    assert again.chunks(request.execution.execution_id, 0, 9) == []


def test_a_newer_folder_is_refused(tmp_path: Path) -> None:
    RequestStore(tmp_path).close()
    with sqlite3.connect(tmp_path / "requests.sqlite") as rows:
        rows.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="newer version"):
        RequestStore(tmp_path)
