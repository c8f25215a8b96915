"""Every task in both forms: equal calls are one, numbered calls are two, and a killed process repeats nothing."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import Task, flow

import prefect_cortex_training as ct
from cortex_training.errors import OutcomeUnknown
from prefect_cortex_training import tasks

from .scripted_service import ScriptedService
from .test_rerun import frames, service

__all__ = ["frames", "service"]

VERBS = (
    "create_job",
    "wait_until_running",
    "forward_backward",
    "step",
    "train_here",
    "save",
    "load",
    "export",
    "publish",
    "prune",
    "weight_sync",
    "generate",
    "cancel_job",
    "wait_for_capacity_here",
    "build_dataset",
    "resolve",
    "submit_save",
    "submit_weight_sync",
    "submit_generate",
)

SENDS: dict[str, tuple[str, tuple[Any, ...], Callable[[int], dict[str, Any]]]] = {
    # task: the service's verb, arguments, and what numbers an operation
    "create_job": ("create", ("block", [{"job_type": "training"}]), lambda n: {"name": f"job-{n}"}),
    "forward_backward": (
        "forward_backward",
        ("block", "j", "manifest.json"),
        lambda n: {"step": n, "micro_batch_size": 2},
    ),
    "step": ("step", ("block", "j"), lambda n: {"seq": n, "expected_global_step": n}),
    "save": ("save", ("block", "j"), lambda n: {"seq": n}),
    "load": ("load", ("block", "j", "cp_0"), lambda n: {"seq": n}),
    "weight_sync": ("weight_sync", ("block", "j"), lambda n: {"seq": n}),
    "generate": ("generate", ("block", "j", ["a prompt"]), lambda n: {"seq": n, "out": f"out-{n}.json"}),
    "submit_save": ("save", ("block", "j"), lambda n: {"seq": n}),
    "submit_weight_sync": ("weight_sync", ("block", "j"), lambda n: {"seq": n}),
    "submit_generate": ("generate", ("block", "j", ["a prompt"]), lambda n: {"seq": n}),
}

AT_MOST_ONCE = ("step", "load")


class _Killed(BaseException):
    """The process is gone: nothing of it runs any more, no retry and no handler of its own."""


def test_the_table_knows_every_task_and_each_has_both_forms() -> None:
    made = {name for name in tasks.__all__ if isinstance(getattr(tasks, name), Task)}
    awaited = {"wait_until_running": "await_until_running", "wait_for_capacity_here": "await_for_capacity_here"}
    assert made == {form for verb in VERBS for form in (verb, awaited.get(verb, f"a{verb}"))}
    for verb in VERBS:
        blocking, awaiting = getattr(ct, verb), getattr(ct, awaited.get(verb, f"a{verb}"))
        assert not blocking.isasync
        assert awaiting.isasync
        assert inspect.signature(blocking.fn) == inspect.signature(awaiting.fn)
        assert blocking.name == awaiting.name
        assert blocking.retries == awaiting.retries


class Caller:
    """Calls one task in one form, each time as a process of its own that may have lost the results before it."""

    def __init__(self, task: str, form: str, results: Path) -> None:
        self._task = getattr(ct, task if form == "blocking" else f"a{task}").with_options(retries=0)
        _, self._arguments, self.number = SENDS[task]
        self._results = results

    def in_one_flow_run(self, *calls: int | str) -> list[Any]:
        """Make these calls, numbered; ``"lost"`` loses the results before the next one. Returns what each gave, or
        raised.
        """
        given: list[Any] = []

        def note(made: Callable[[], Any]) -> None:
            try:
                given.append(made())
            except (Exception, _Killed) as error:
                given.append(error)

        @flow(result_serializer="json")
        def blocks() -> None:
            for call in calls:
                if isinstance(call, str):
                    shutil.rmtree(self._results, ignore_errors=True)
                else:
                    note(lambda n=call: self._task(*self._arguments, **self.number(n)))  # type: ignore[misc]

        @flow(result_serializer="json")
        async def awaits() -> None:
            for call in calls:
                if isinstance(call, str):
                    shutil.rmtree(self._results, ignore_errors=True)
                    continue
                try:
                    given.append(await self._task(*self._arguments, **self.number(call)))
                except (Exception, _Killed) as error:
                    given.append(error)

        if self._task.isasync:
            import asyncio

            asyncio.run(awaits())
        else:
            blocks()
        return given


@pytest.fixture(params=["blocking", "awaiting"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(SENDS))
def caller(
    request: pytest.FixtureRequest,
    form: str,
    service: ScriptedService,
    frames: None,
    results_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Caller:
    monkeypatch.chdir(tmp_path)
    caller = Caller(request.param, form, results_folder)
    caller.task, caller.verb = request.param, SENDS[request.param][0]  # type: ignore[attr-defined]
    return caller


def test_equal_calls_send_once_and_numbered_calls_send_each(caller: Any, service: ScriptedService) -> None:
    first, again, after_loss, second = caller.in_one_flow_run(1, 1, "lost", 1, 2)
    assert first == again
    assert not isinstance(first, BaseException), first
    assert second != first
    assert after_loss == first
    assert len(service.named(caller.verb)) == 2


def test_a_kill_between_sending_and_noting_the_answer_repeats_no_effect(caller: Any, service: ScriptedService) -> None:
    def kill(*_: Any) -> None:
        service.after.clear()
        raise _Killed

    service.after[caller.verb] = kill
    killed, rerun = caller.in_one_flow_run(1, "lost", 1)
    assert isinstance(killed, BaseException)
    sent = service.named(caller.verb)
    if caller.task in AT_MOST_ONCE:
        assert len(sent) == 1
        assert isinstance(rerun, OutcomeUnknown) == (caller.task == "load")
    elif caller.task == "create_job":
        assert len(sent) == 1
        assert list(service.jobs) == [rerun]
    elif caller.task == "forward_backward":
        assert len({call[2] for call in sent}) == 1
    else:
        # Repeating these is harmless, and nobody can know whether the first arrived.
        assert len(sent) == 2
        assert not isinstance(rerun, BaseException)


def test_a_kill_while_waiting_leads_back_to_the_same_request(caller: Any, service: ScriptedService) -> None:
    if caller.task == "create_job" or caller.task.startswith("submit_"):
        pytest.skip("it does not wait")

    def kill(*_: Any) -> None:
        service.before.clear()
        raise _Killed

    service.before["poll"] = kill
    killed, rerun = caller.in_one_flow_run(1, "lost", 1)
    assert isinstance(killed, BaseException)
    assert not isinstance(rerun, BaseException), rerun
    sent = service.named(caller.verb)
    assert len({call[2] for call in sent} if caller.task == "forward_backward" else sent) == 1
