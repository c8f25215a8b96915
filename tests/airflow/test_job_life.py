"""A job from create to cancel: waiting for it in every way, giving it up, and who cancels it, exactly once."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralError, TaskDeferralTimeout, TaskDeferred

from airflow_cortex_training.failures import failure_message
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.sampling import CortexTrainingWeightSyncOperator
from airflow_cortex_training.operators.training import CortexTrainingStepOperator
from airflow_cortex_training.sensors.requests import CortexTrainingRequestSensor
from airflow_cortex_training.triggers import kill
from airflow_cortex_training.triggers.jobs import CortexTrainingJobTrigger
from cortex_training.client import CortexTrainingClient
from cortex_training.errors import DeadlineExceeded, RequestFailed
from tests.airflow.conftest import stored
from tests.airflow.test_operators import PARKED, SAMPLING, TRAINING
from tests.airflow.test_sensors import no_such_token
from tests.conftest import RunningService, start_service

ENDED = ("cancelling", "cancelled", "terminated")
TI = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1)

WAYS = {
    "on the worker": {"deferrable": False},
    "deferred": {"deferrable": True, "inline_s": 0.1},
    "inline": {"deferrable": True, "inline_s": 60.0},
}


@pytest.fixture
def client(local_service):
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        yield client


def create(conn_id: str, sub_job: dict[str, Any], **arguments: Any) -> CortexTrainingCreateJobOperator:
    return CortexTrainingCreateJobOperator(
        task_id="create", conn_id=conn_id, sub_jobs=[copy.deepcopy(sub_job)], wait_for_completion=True, **arguments
    )


@pytest.mark.parametrize("way", WAYS)
class TestCreateAndWait:
    def test_succeeds_when_the_job_runs(self, task_run, service_connection, client, no_grace, way) -> None:
        run = task_run("create")
        job_id = run.execute(create(service_connection, SAMPLING, **WAYS[way]))
        assert client.get_job(job_id)["status"] == "running"
        assert run.xcoms["job_id"] == job_id
        client.cancel_job(job_id)

    def test_a_job_that_never_runs_is_left_to_the_retry_and_cancelled_at_last(
        self, task_run, service_connection, client, no_grace, way
    ) -> None:
        run = task_run("create", retries=1)
        arguments = {**WAYS[way], "inline_s": 0.2, "timeout_s": 0.5}
        with pytest.raises(DeadlineExceeded, match="did not run within"):
            run.execute(create(service_connection, PARKED, **arguments))
        job_id = run.store.get("cortex_training")["job_id"]
        assert client.get_job(job_id)["status"] == "pending"
        run.retry()
        with pytest.raises(DeadlineExceeded, match=job_id):
            run.execute(create(service_connection, PARKED, **arguments))
        assert client.get_job(job_id)["status"] in ENDED

    def test_a_job_that_ended_is_replaced_by_the_retry(
        self, task_run, service_connection, client, no_grace, way, monkeypatch
    ) -> None:
        run = task_run("create")
        operator = create(service_connection, PARKED, timeout_s=60, **{**WAYS[way], "inline_s": 0.3})
        original = operator._create

        def create_and_lose(client_: Any, *rest: Any) -> str:
            job_id = original(client_, *rest)
            client.cancel_job(job_id)
            return job_id

        monkeypatch.setattr(operator, "_create", create_and_lose)
        with pytest.raises(Exception, match="cancel"):
            run.execute(operator)
        first = run.store.get("cortex_training")["job_id"]
        run.retry()
        second = run.execute(create(service_connection, SAMPLING, **WAYS[way]))
        assert second != first
        client.cancel_job(second)


def deferred(run: Any, operator: Any) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(run.context())
    return caught.value


class TestLimitsOfADeferral:
    def limited(self, conn_id: str, **arguments: Any) -> CortexTrainingCreateJobOperator:
        return create(conn_id, PARKED, deferrable=True, inline_s=0.1, **arguments)

    def test_execution_timeout_is_the_triggers_deadline(self, task_run, service_connection, client, no_grace) -> None:
        run = task_run("create", retries=0)
        with pytest.raises(DeadlineExceeded, match="within 1 s"):
            run.execute(self.limited(service_connection, execution_timeout=timedelta(seconds=1)))
        assert client.get_job(run.store.get("cortex_training")["job_id"])["status"] in ENDED

    @pytest.mark.parametrize(
        ("reason", "kind", "last", "cancels"),
        [
            ("Trigger timeout", TaskDeferralTimeout, False, True),
            ("Trigger timeout", TaskDeferralTimeout, True, True),
            ("Trigger failure", TaskDeferralError, False, False),
            ("Trigger failure", TaskDeferralError, True, True),
        ],
    )
    def test_a_deferral_without_an_event_leaks_nothing(
        self, task_run, service_connection, client, reason, kind, last, cancels
    ) -> None:
        run = task_run("create", retries=0 if last else 2)
        job_id = deferred(run, self.limited(service_connection)).kwargs["job_id"]
        with pytest.raises(kind):
            # What Airflow resumes a task with when its own limit passed, or its trigger raised.
            self.limited(service_connection).resume_execution("__fail__", {"error": reason}, run.context())
        assert (client.get_job(job_id)["status"] in ENDED) is cancels
        client.cancel_job(job_id)

    def test_a_worker_that_is_killed_cancels_its_job(self, task_run, service_connection, client) -> None:
        for cancels in (True, False):
            run = task_run("create")
            operator = self.limited(service_connection, cancel_on_kill=cancels)
            job_id = deferred(run, operator).kwargs["job_id"]
            operator.on_kill()
            assert (client.get_job(job_id)["status"] in ENDED) is cancels
            client.cancel_job(job_id)


class TestTriggerKill:
    """What Airflow tells a trigger and what is true may differ; the state and the token of the task decide."""

    @pytest.fixture
    def waiting(self, task_run, service_connection, client):
        """A deferred create: its task instance, and its trigger as a triggerer has it."""
        run = task_run("create")
        operator = create(service_connection, PARKED, deferrable=True, inline_s=0.1)
        trigger = stored(deferred(run, operator).trigger)
        trigger.task_instance = TI
        yield run, trigger
        client.cancel_job(trigger.job_id)

    def told(self, monkeypatch: pytest.MonkeyPatch, state: str, token: Any) -> None:
        monkeypatch.setattr(kill, "_state", lambda ti: (state, True))
        monkeypatch.setattr(kill, "_token", lambda ti: token)

    def cancels(self, client: CortexTrainingClient, trigger: Any) -> int:
        """How many cancels `on_kill`, called as often as Airflow does, sends; and whether the job ended."""
        sent = []
        original = CortexTrainingJobTrigger._cancel

        async def counted(self: Any) -> None:
            before = client.get_job(self.job_id)["status"]
            await original(self)
            if before not in ENDED and client.get_job(self.job_id)["status"] in ENDED:
                sent.append(self.job_id)

        CortexTrainingJobTrigger._cancel = counted  # type: ignore[method-assign]
        try:
            asyncio.run(trigger.on_kill())
        finally:
            CortexTrainingJobTrigger._cancel = original  # type: ignore[method-assign]
        return len(sent)

    def test_a_task_that_was_marked_failed(self, waiting, client, monkeypatch) -> None:
        run, trigger = waiting
        self.told(monkeypatch, "failed", run.xcoms["cortex_training_token"])
        assert self.cancels(client, trigger) == 1
        # Both triggerers hear of it: the second cancel finds a job that has ended.
        assert self.cancels(client, stored_again(trigger)) == 0

    def test_the_other_triggerer_finished_first(self, waiting, client, monkeypatch) -> None:
        run, trigger = waiting
        self.told(monkeypatch, "success", run.xcoms["cortex_training_token"])
        assert self.cancels(client, trigger) == 0

    def test_a_retry_adopted_the_job_and_waits_for_it_again(self, waiting, client, monkeypatch, service_connection):
        run, trigger = waiting
        run.retry()
        again = deferred(run, create(service_connection, PARKED, deferrable=True, inline_s=0.1))
        assert again.kwargs["job_id"] == trigger.job_id
        self.told(monkeypatch, "deferred", run.xcoms["cortex_training_token"])
        assert self.cancels(client, trigger) == 0
        assert client.get_job(trigger.job_id)["status"] == "pending"

    def test_a_clear_replaced_the_job_before_the_kill_came(
        self, waiting, client, monkeypatch, service_connection
    ) -> None:
        run, trigger = waiting
        run.clear()
        other = deferred(run, create(service_connection, PARKED, deferrable=True, inline_s=0.1)).kwargs["job_id"]
        assert other != trigger.job_id
        assert client.get_job(trigger.job_id)["status"] in ENDED
        self.told(monkeypatch, "deferred", run.xcoms["cortex_training_token"])
        assert self.cancels(client, trigger) == 0
        assert client.get_job(other)["status"] == "pending"
        client.cancel_job(other)

    def test_the_kill_came_before_the_clear_replaced_the_job(
        self, waiting, client, monkeypatch, service_connection
    ) -> None:
        run, trigger = waiting
        run.clear()
        self.told(monkeypatch, "scheduled", None)
        assert self.cancels(client, trigger) == 0
        other = deferred(run, create(service_connection, PARKED, deferrable=True, inline_s=0.1)).kwargs["job_id"]
        assert client.get_job(trigger.job_id)["status"] in ENDED
        assert client.get_job(other)["status"] == "pending"
        client.cancel_job(other)

    def test_who_opted_out_keeps_the_job(self, task_run, client, monkeypatch, service_connection) -> None:
        run = task_run("create")
        operator = create(service_connection, PARKED, deferrable=True, inline_s=0.1, cancel_on_kill=False)
        trigger = stored(deferred(run, operator).trigger)
        trigger.task_instance = TI
        self.told(monkeypatch, "failed", run.xcoms["cortex_training_token"])
        assert self.cancels(client, trigger) == 0
        client.cancel_job(trigger.job_id)


def stored_again(trigger: Any) -> Any:
    again = stored(trigger)
    again.task_instance = TI
    return again


class TestCancelAndWait:
    """Cancelling takes its time where something is under way; who waits for the GPUs waits for that."""

    @pytest.fixture(scope="class")
    def slow(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
        service = start_service(tmp_path_factory.mktemp("slow"), simulate="0", faults=[])
        yield service
        service.stop()

    @pytest.fixture
    def conn_id(self, connection, slow) -> str:
        return connection("slow", host=slow.base_url, database=slow.database, schema=slow.schema)

    @pytest.fixture
    def job(self, slow) -> Iterator[str]:
        with CortexTrainingClient(slow.base_url, slow.database, slow.schema) as client:
            job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(SAMPLING)]})["job_id"]
            client.wait_for_job(job_id)
            slow.control.add("slow-cancel", on="cancel-job", seconds=1.0, job_id=job_id)
            yield job_id

    def cancel(self, conn_id: str, way: str, **arguments: Any) -> CortexTrainingCancelJobOperator:
        return CortexTrainingCancelJobOperator(
            task_id="cancel", conn_id=conn_id, wait_for_completion=True, **{**WAYS[way], **arguments}
        )

    def state(self, slow: RunningService, job_id: str) -> str:
        with CortexTrainingClient(slow.base_url, slow.database, slow.schema) as client:
            return str(client.get_job(job_id)["status"])

    @pytest.mark.parametrize("way", WAYS)
    def test_it_ends_with_the_job(self, task_run, conn_id, slow, job, no_grace, way) -> None:
        run = task_run("cancel")
        assert run.execute(self.cancel(conn_id, way, job_id=[job, "never-created"])) == [job]
        assert self.state(slow, job) in ("cancelled", "terminated")
        assert len(run.deferrals) == (way == "deferred")

    @pytest.mark.parametrize("way", ["on the worker", "deferred"])
    def test_a_job_that_does_not_end_is_named(self, task_run, conn_id, slow, job, no_grace, way) -> None:
        with pytest.raises(DeadlineExceeded, match=f"{job} did not end within 0 s"):
            task_run("cancel").execute(self.cancel(conn_id, way, job_id=job, timeout_s=0.4))
        assert self.state(slow, job) == "cancelling"

    def test_what_can_not_be_waited_for_fails_for_good(self, task_run, conn_id, job) -> None:
        cancel = self.cancel(conn_id, "deferred", job_id=job)
        with pytest.raises(AirflowFailException, match=f"{job}: no such key"):
            cancel.execute_complete(
                task_run("cancel").context(), {"status": "denied", "alive": [job], "error": "no such key"}
            )


@pytest.fixture
def job_id(client):
    job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING), copy.deepcopy(SAMPLING)]})[
        "job_id"
    ]
    client.wait_for_job(job_id)
    yield job_id
    client.cancel_job(job_id)


class TestWaitingElsewhere:
    def test_a_request_is_sent_by_one_task_and_waited_for_by_another(
        self, task_run, service_connection, local_service, job_id
    ) -> None:
        def sync() -> CortexTrainingWeightSyncOperator:
            return CortexTrainingWeightSyncOperator(
                task_id="sync", conn_id=service_connection, job_id=job_id, wait_for_completion=False
            )

        run = task_run("sync")
        sent = run.execute(sync())
        assert set(sent) == {"job_id", "request_id"}
        run.retry()
        assert run.execute(sync()) == sent
        waited = task_run("request").execute(
            CortexTrainingRequestSensor(task_id="request", conn_id=service_connection, deferrable=False, **sent)
        )
        assert waited["state"] == "done"
        assert sum(1 for entry in local_service.execution_log(job_id) if entry["op"] == "weight-sync") == 1

    def test_a_step_that_nobody_waits_for_has_nothing_to_compare(self, task_run, service_connection, job_id) -> None:
        step = CortexTrainingStepOperator(
            task_id="step",
            conn_id=service_connection,
            job_id=job_id,
            wait_for_completion=False,
            expected_global_step=1,
        )
        with pytest.raises(AirflowFailException, match="leave one of them out"):
            task_run("step").execute(step)


class TestMessages:
    def test_an_ended_job_fails_its_requests_for_good_and_is_named(
        self, task_run, service_connection, client, tmp_path
    ) -> None:
        job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING)]})["job_id"]
        client.wait_for_job(job_id)
        client.cancel_job(job_id)
        step = CortexTrainingStepOperator(task_id="step", conn_id=service_connection, job_id=job_id, deferrable=False)
        with pytest.raises(Exception, match=job_id):
            task_run("step").execute(step)

    def test_a_failure_names_job_and_request(self, task_run, service_connection, job_id, tmp_path) -> None:
        from airflow_cortex_training.operators.training import CortexTrainingForwardBackwardOperator

        frame = tmp_path / "frame"
        frame.write_bytes(no_such_token())
        run = task_run("fb")
        operator = CortexTrainingForwardBackwardOperator(
            task_id="fb", conn_id=service_connection, job_id=job_id, frame_path=str(frame), deferrable=False
        )
        with pytest.raises(RequestFailed) as failure:
            run.execute(operator)
        request_id = run.store.get("cortex_training")["request_id"]
        message = failure_message({**run.context(), "exception": failure.value})
        assert message.startswith("dag.fb failed on try 1 of 3 in manual__2026-01-01: ")
        assert job_id in message
        assert request_id in message

    def test_a_refusal_names_the_services_request_id(self, task_run, service_connection, client) -> None:
        run = task_run("step")
        with pytest.raises(AirflowFailException) as failure:
            run.execute(CortexTrainingStepOperator(task_id="step", conn_id=service_connection, job_id="never-created"))
        message = failure_message({**run.context(), "exception": failure.value})
        assert "snowflake request id" in message
        assert "never-created" in message

    @pytest.mark.parametrize("error", [None, ValueError(""), ValueError("x" * 5000)])
    def test_a_message_is_made_of_anything(self, task_run, error) -> None:
        run = task_run("any")
        run.store.set("cortex_training", {"v": 1, "generation": [2, 0], "job_id": "j-1", "request_id": "r-1"})
        message = failure_message({**run.context(), "exception": error})
        assert len(message) <= 1000
        assert message.startswith("dag.any failed on try 1")


def test_links_are_there_while_a_task_is_deferred_and_after(task_run, service_connection, client, no_grace) -> None:
    run = task_run("create")
    first = create(service_connection, PARKED, deferrable=True, inline_s=0.1)
    pause = deferred(run, first)
    (link,) = first.operator_extra_links
    stored_xcoms: dict[str, Any] = {}
    ti = SimpleNamespace(
        task_id="create", map_index=-1, xcom_pull=lambda task_ids, key, map_indexes: stored_xcoms.get(key)
    )
    url = link.get_link(first, ti_key=ti)
    assert url.startswith(client.base_url)
    assert url.endswith(pause.kwargs["job_id"])
    stored_xcoms[link.xcom_key] = url
    # A leg that fails before it can say anything does not wipe the link.
    assert link.get_link(create(service_connection, PARKED), ti_key=ti) == url
    client.cancel_job(pause.kwargs["job_id"])
    assert json.dumps(url)
