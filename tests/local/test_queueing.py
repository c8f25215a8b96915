"""The order of a sub-job's requests, and how long it remembers them, which nobody outside knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cortex_training.local.queueing import ShuffledExecutor, new_worker
from tests.conftest import RunningService, start_service
from tests.local.api import Caller, chunks_of, masked_frame, sampling, token_batch, training


def order_of(worker: ShuffledExecutor) -> list[int]:
    """In which order ten calls are made that wait for the same moment."""
    begun, go, order = threading.Event(), threading.Event(), []
    first = worker.submit(lambda: begun.set() or go.wait(10))
    # Else the thread's first turn may go to one of those that are to wait.
    assert begun.wait(10)
    waiting = [worker.submit(order.append, number) for number in range(10)]
    assert waiting[3].cancel()
    go.set()
    first.result(10)
    for number, future in enumerate(waiting):
        if number != 3:
            future.result(10)
    worker.shutdown()
    return order


def test_waiting_calls_are_made_once_each_in_another_order_that_repeats() -> None:
    order = order_of(ShuffledExecutor("a-test"))
    assert sorted(order) == [0, 1, 2, 4, 5, 6, 7, 8, 9] != order
    assert order_of(ShuffledExecutor("a-test")) == order


def test_a_call_that_raises_leaves_the_thread_to_the_next() -> None:
    worker = ShuffledExecutor("a-test")
    with pytest.raises(ZeroDivisionError):
        worker.submit(divmod, 1, 0).result(10)
    assert worker.submit(divmod, 7, 2).result(10) == (3, 1)
    worker.shutdown()


@pytest.mark.parametrize("order", ["arrival", "shuffled"])
def test_what_waits_is_cancelled_when_the_thread_ends(order: str) -> None:
    worker = new_worker(order, "a-test")
    begun, go = threading.Event(), threading.Event()
    running = worker.submit(lambda: begun.set() or go.wait(10))
    assert begun.wait(10)
    waiting = [worker.submit(go.is_set) for _ in range(3)]
    worker.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert running.result(10) is True
    assert all(future.cancelled() for future in waiting)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service that keeps no order, and no group that was executed."""
    assume = ["request-order=shuffled", "chunk-groups=evict_completed"]
    service = start_service(tmp_path_factory.mktemp("forgetful"), assume=assume)
    yield service
    service.stop()


def test_requests_that_wait_are_executed_once_each_in_another_order(forgetful: RunningService) -> None:
    job = Caller(forgetful.url).running(sampling(config={"max_seq_len": 4096}, model_name="Qwen/Qwen3-8B"))
    endless = {"prompts": [[5]] * 64, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    first = job.call("POST", "/generate", json=endless)
    one_token = {"prompts": [[5]], "sampling_params": {"max_tokens": 1}}
    waiting = [job.call("POST", "/generate", json=one_token) for _ in range(8)]
    sent = [reply.json()["request_id"] for reply in waiting]
    job.operation("cancel-request", {"request_id": first.json()["request_id"]})
    assert job.poll(first)["status"] == "cancelled"
    for reply in waiting:
        assert len(job.done(reply)["results"]) == 1
    executed = [entry["request_id"] for entry in forgetful.execution_log(job.job_id)]
    assert sorted(executed) == sorted(sent)
    assert executed != sent


def test_a_group_that_was_executed_is_not_known_any_more(forgetful: RunningService) -> None:
    job = Caller(forgetful.url).running(training())
    parts = chunks_of(masked_frame(token_batch()), group_id="g-1", max_bytes=9 * 1024)
    assert len(parts) > 1
    for _ in range(2):
        replies = [job.post_frame(part) for part in parts]
        job.done(replies[-1])
    assert [entry["chunk_group"] for entry in forgetful.execution_log(job.job_id)] == ["g-1", "g-1"]
    refused = job.post_frame(parts[-1])
    assert refused.status_code == 409
    assert "chunk_group_restart_required" in refused.text
