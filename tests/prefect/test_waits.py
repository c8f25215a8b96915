"""Waiting where nothing can be suspended, and the words in which a suspended run says what it waits for."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prefect import flow, task
from prefect.runtime import flow_run

from cortex_training.errors import (
    ConfigurationError,
    DeadlineExceeded,
    JobFailed,
    NotFoundError,
    RequestFailed,
    TransportError,
)
from cortex_training.training import RunFailed, TrainingPlan
from demo.prefect_server import PrefectServer
from prefect_cortex_training import await_remote
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.handover import DONE, FAILED, Outcome, find_outcome, find_plan, leave_plan, training_id
from prefect_cortex_training.labels import RunLabels, root_labels, roots_in
from prefect_cortex_training.reconcile import Rules
from prefect_cortex_training.waits import CAPACITY, REQUEST, RUNNING, TRAINING, Wait
from tests.publication.conftest import bucket, creds, s3_root, s3_server  # noqa: F401

from .scripted_service import ScriptedService


@pytest.mark.parametrize(
    "wait",
    [
        Wait(RUNNING, "cortex-training", ("a1b2",)),
        Wait(REQUEST, "block", ("job/with:signs", "request #1")),
        Wait(TRAINING, "block", ("0123456789ab", "ba9876543210", "1")),
        Wait(CAPACITY, "block", ("", "4", "1")),
        Wait(CAPACITY, "block", ("H200", "16", "2")),
    ],
)
def test_a_wait_is_read_back_from_its_key(wait: Wait) -> None:
    keys = wait.keys()
    first, second = next(keys), next(keys)
    assert first != second
    assert Wait.parse(first) == Wait.parse(second) == wait


@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "1",
        "a person's answer",
        "cortex_training.2/running/block/job/1",
        "cortex_training.1/running/block/1",
        "cortex_training.1/unheard-of/block/job/1",
    ],
)
def test_keys_of_others_are_no_waits(key: str | None) -> None:
    assert Wait.parse(key) is None


def test_keys_that_are_out_there_stay_readable() -> None:
    """Suspended runs carry them through a deployment of a new release."""
    assert Wait.parse("cortex_training.1/request/cortex/j-1/r-1/3") == Wait(REQUEST, "cortex", ("j-1", "r-1"))


@pytest.fixture
def service(on_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedService:
    scripted = ScriptedService()

    @asynccontextmanager
    async def connected(name: str) -> AsyncIterator[ScriptedService]:
        yield scripted

    monkeypatch.setattr("prefect_cortex_training.waiting.connected", connected)
    monkeypatch.setattr("prefect_cortex_training.waiting._TRY_AGAIN_S", 0.01)
    return scripted


def in_a_flow(body: Callable[[], Any]) -> Any:
    @flow(result_serializer="json")
    def a_flow() -> Any:
        return body()

    return a_flow()


def in_a_task(body: Callable[[], Any]) -> Any:
    return in_a_flow(lambda: task(body)())


def in_a_subflow(body: Callable[[], Any]) -> Any:
    return in_a_flow(lambda: in_a_flow(body))


@pytest.mark.parametrize("place", [in_a_flow, in_a_task, in_a_subflow])
def test_where_nothing_can_be_suspended_it_waits_in_the_process(
    service: ScriptedService, place: Callable[..., Any]
) -> None:
    service.results["r1"] = {"global_steps": 1}
    assert place(lambda: await_remote("block", "j", "r1")) == {"global_steps": 1}


async def test_in_a_flow_that_awaits_it_is_awaited(service: ScriptedService) -> None:
    service.jobs["j"] = {"job_id": "j", "status": "running"}

    @flow
    async def a_flow() -> Any:
        return await await_remote("block", "j")  # type: ignore[misc]

    assert (await a_flow())["status"] == "running"


def test_what_the_service_does_not_know_yet_is_waited_for(service: ScriptedService) -> None:
    looks: list[str] = []

    def appear(request_id: str) -> None:
        looks.append(request_id)
        if len(looks) == 3:
            service.results["r1"] = {"ok": True}

    service.before["poll"] = appear
    assert in_a_flow(lambda: await_remote("block", "j", "r1")) == {"ok": True}
    assert len(looks) == 3


def test_what_it_has_not_known_for_a_minute_is_an_error(service: ScriptedService) -> None:
    def body() -> None:
        labels = RunLabels(flow_run.id)
        run_to_end(labels.write({"waiting_since.r1.earlier": time.time() - 61}))
        await_remote("block", "j", "r1")

    with pytest.raises(NotFoundError):
        in_a_flow(body)


@pytest.mark.parametrize(
    "error",
    [
        RequestFailed(job_id="j", request_id="r1", state="failed", error="boom"),
        JobFailed(job_id="j", state="failed", reason="no capacity was found"),
        TransportError("out of reach"),
    ],
)
def test_what_went_wrong_is_raised_in_the_flow(service: ScriptedService, error: Exception) -> None:
    service.results["r1"] = error
    with pytest.raises(type(error), match=str(error)[:20]):
        in_a_flow(lambda: await_remote("block", "j", "r1"))


@pytest.mark.parametrize("end", ["cancelling", "cancelled", "failed"])
def test_a_job_that_ran_is_not_waited_for_again_once_it_has_ended(service: ScriptedService, end: str) -> None:
    """A training run went on in another one while the flow run was suspended."""

    def twice() -> tuple[str, str]:
        service.jobs["j"] = {"job_id": "j", "status": "running"}
        before = await_remote("block", "j")["status"]
        service.jobs["j"]["status"] = end
        return before, await_remote("block", "j")["status"]

    assert in_a_flow(twice) == ("running", end)
    service.jobs["j"]["status"] = "cancelled"
    with pytest.raises(JobFailed):
        in_a_flow(lambda: await_remote("block", "j"))


def test_the_deadline_counts_from_the_first_wait(service: ScriptedService) -> None:
    def body() -> None:
        run_to_end(RunLabels(flow_run.id).write({"waiting_since.r1.earlier": time.time() - 100}))
        await_remote("block", "j", "r1", timeout_s=50)

    service.results["r1"] = DeadlineExceeded("not yet", timeout_s=1.0)
    with pytest.raises(DeadlineExceeded):
        in_a_flow(body)
    assert len(service.named("poll")) == 1


@pytest.mark.parametrize("changed", [{"timeout_s": 0}, {"poll_s": -1.0}, {"timeout_s": float("inf")}])
def test_times_are_checked(service: ScriptedService, changed: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changed))):
        in_a_flow(lambda: await_remote("block", "j", **changed))


def test_outside_a_flow_run_it_says_where_it_belongs() -> None:
    with pytest.raises(ConfigurationError, match="await_remote was called outside a flow run"):
        await_remote("block", "j")


def plan_in(root: str, **changes: Any) -> TrainingPlan:
    return TrainingPlan(root=root, dataset="d/manifest.json", steps=1, micro_batch_size=1, job_id="j", **changes)


def test_a_plan_is_found_where_it_was_left_and_nowhere_else(tmp_path: Any) -> None:
    plan = plan_in(str(tmp_path / "run"))
    leave_plan(plan, "attempt", "nonce")
    assert find_plan(plan.root, "attempt", ["other", "nonce"]) == plan
    with pytest.raises(ConfigurationError, match="different file systems"):
        find_plan(plan.root, "attempt", ["another"])
    with pytest.raises(ConfigurationError, match="can't be read here"):
        find_plan(str(tmp_path / "elsewhere"), "attempt", ["nonce"])


def test_a_plan_in_a_bucket_is_found_with_its_credentials(
    tmp_path: Any,
    s3_root: str,  # noqa: F811
    creds: str,  # noqa: F811
) -> None:
    plan = plan_in(s3_root, credentials=creds)
    leave_plan(plan, "attempt", "nonce")
    assert find_plan(s3_root, "attempt", ["nonce"], creds) == plan
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/absent"):
        find_plan(s3_root, "attempt", ["nonce"], f"secret:{tmp_path}/absent")
    (root,) = roots_in(root_labels(s3_root, "cortex", creds))
    assert (root.root, root.credentials, root.root_credentials) == (s3_root, "cortex", creds)
    (root,) = roots_in(root_labels("a/folder", "cortex"))
    assert root.root_credentials is None


def test_what_is_done_stays_done_and_a_failure_ends_one_try() -> None:
    failed = Outcome(FAILED, error="RunFailed", message="look at the data")
    done = Outcome(DONE, {"steps": 3})
    training, other = training_id(plan_in("r")), training_id(plan_in("r", seed=1))
    labels: dict[str, Any] = {f"trained.{training}.1": failed.to_label()}
    assert find_outcome(labels, training, 1) == failed
    assert find_outcome(labels, training, 2) is None
    labels[f"trained.{training}.2"] = done.to_label()
    assert find_outcome(labels, training, 3) == done
    assert find_outcome(labels, other, 1) is None
    with pytest.raises(RunFailed, match="look at the data"):
        failed.result_or_raise()
    with pytest.raises(ConfigurationError, match="no such root"):
        Outcome(FAILED, error="ConfigurationError", message="no such root").result_or_raise()


@pytest.mark.parametrize(
    "changed", [{"cancel_on": frozenset({"paused"})}, {"look_back_s": 0}, {"crashed_after_s": -1.0}]
)
def test_rules_are_checked(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changed))):
        Rules(**changed)
