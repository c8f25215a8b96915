"""What names a stored result, and what happens when it is looked for again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from cortex_training.errors import (
    ConfigurationError,
    DeadlineExceeded,
    OutcomeUnknown,
    RateLimitedError,
    RequestFailed,
    ServiceError,
    TransportError,
)
from demo.prefect_server import PrefectServer
from prefect_cortex_training import tasks
from prefect_cortex_training.durable import durable_key, is_transient, task_pair

CALLS: list[str] = []


async def _effect(what: str, *, seq: int = 1, timeout_s: float = 60.0) -> str:
    CALLS.append(what)
    return what


effect, aeffect = task_pair("effect", retries=0)(_effect)
other, _ = task_pair("other", retries=0)(_effect)


def key(verb: str = "step", **arguments: Any) -> str:
    return durable_key("a-run", verb, {"job_id": "j", "seq": 1, **arguments}, {"learning_rate": None})


def test_the_key_holds_run_verb_and_what_to_do() -> None:
    assert key() == key()
    assert len({key(), key(seq=2), key(job_id="k"), key("save"), key(learning_rate=1e-4)}) == 5
    assert durable_key("b-run", "step", {"job_id": "j", "seq": 1}, {}) != key()


def test_the_key_stays_when_a_release_adds_an_option_or_a_user_waits_longer() -> None:
    assert key(learning_rate=None) == key()
    assert key(timeout_s=5.0) == key(timeout_s=500.0) == key()


def test_the_key_is_pinned() -> None:
    """A change here makes every flow run that is under way repeat what it did; raise KEY_VERSION knowingly instead."""
    assert key() == "ff16e96b22cafa61a9da4eb5b432dd0d436c2a224ce7877d78375a8198fe5f2e"


# Functions around the tasks `train_here` and `wait_for_capacity_here`.
AROUND = ("create_job", "train", "for_capacity")


@pytest.mark.parametrize("name", [name for name in tasks.__all__ if not name.endswith(AROUND)])
def test_no_task_depends_on_its_source(name: str) -> None:
    task = getattr(tasks, name)
    assert type(task.cache_policy).__name__ == "CacheKeyFnPolicy"
    assert task.persist_result is True
    assert task.result_serializer == "json"


def test_step_is_never_retried_by_itself() -> None:
    assert tasks.step.retries == 0
    assert tasks.astep.retries == 0


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (TransportError("no answer"), True),
        (RateLimitedError(status=429), True),
        (ServiceError(status=503), True),
        (OutcomeUnknown(operation="save", job_id="j", reason="lost", hint="look"), False),
        (RequestFailed(job_id="j", request_id="r", state="failed"), False),
        (DeadlineExceeded("over"), False),
        (ConfigurationError("bad"), False),
    ],
)
def test_only_what_may_go_away_is_retried(error: Exception, again: bool) -> None:
    run = TaskRun.model_construct()
    assert is_transient(tasks.save, run, Failed(data=error)) is again


def test_equal_calls_are_one_and_numbered_calls_are_two(on_server: PrefectServer) -> None:
    @flow
    def numbered() -> None:
        for seq in (1, 1, 2):
            effect("x", seq=seq)
        other("x", seq=1)

    CALLS.clear()
    numbered()
    assert CALLS == ["x", "x", "x"]


async def test_both_forms_share_one_result(on_server: PrefectServer) -> None:
    @flow
    async def both() -> None:
        await aeffect("y")
        effect("y")

    CALLS.clear()
    await both()
    assert CALLS == ["y"]


def test_results_are_json_and_no_pickle(on_server: PrefectServer, results_folder: Path) -> None:
    @flow
    def once() -> None:
        effect("z")

    once()
    stored = [path.read_bytes() for path in results_folder.rglob("*") if path.is_file()]
    assert any(b'"z"' in content or b'\\"z\\"' in content for content in stored)
    assert not [content for content in stored if b'"type":"pickle"' in content.replace(b" ", b"")]


def test_an_argument_that_is_not_plain_data_is_refused_by_name(on_server: PrefectServer) -> None:
    @flow
    def wrong() -> None:
        effect(object())  # type: ignore[arg-type]

    CALLS.clear()
    with pytest.raises(ConfigurationError, match="effect: argument what"):
        wrong()
    assert CALLS == []
