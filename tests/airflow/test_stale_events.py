"""An event of another wait resumes a task: it is no word about what this try waits for, which is waited for again."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_cortex_training.operators.checkpoints import CortexTrainingSaveOperator
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor
from airflow_cortex_training.sensors.publication import CortexTrainingCheckpointPublishedSensor
from cortex_training.client import CortexTrainingClient
from tests.airflow.conftest import TaskRun, fire, stored
from tests.airflow.test_operators import PARKED, TRAINING
from tests.airflow.test_train import plan, train

OTHER = "11111111-2222-4333-8444-555555555555"
WORDS = {
    "ended": {"state": "cancelled", "error": "user_cancelled"},
    "settled": {"state": "failed"},
    "timeout": {},
    "denied": {"error": "401"},
    "lost": {"error": "404"},
    "refused": {"error": "it streams"},
}


@pytest.fixture(scope="module")
def job_id(local_service):
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING)]})["job_id"]
        client.wait_for_job(job_id)
        yield job_id
        client.cancel_job(job_id)


def deferral(leg: Any, *arguments: Any) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferred:
        leg(*arguments)
    return deferred.value


def resume(run: TaskRun, operator: Any, deferred: TaskDeferred, event: dict[str, Any]) -> Any:
    return operator.resume_execution(deferred.method_name, {**(deferred.kwargs or {}), "event": event}, run.context())


class TestRequest:
    @pytest.mark.parametrize(("status", "of_other_job"), [*((status, True) for status in WORDS), ("settled", False)])
    def test_is_waited_for_again(
        self, task_run, service_connection, local_service, job_id, no_grace, status, of_other_job
    ) -> None:
        run = task_run("save")
        operator = CortexTrainingSaveOperator(
            task_id="save", conn_id=service_connection, job_id=job_id, deferrable=True, inline_s=0.0
        )
        first = deferral(operator.execute, run.context())
        stale = {"v": 1, "status": status, "job_id": OTHER if of_other_job else job_id, "request_id": OTHER}
        saves = executed(local_service, job_id)
        again = deferral(resume, run, operator, first, {**stale, **WORDS[status]})
        for name in ("job_id", "request_id", "operation", "started", "generation"):
            assert getattr(again.trigger, name) == getattr(first.trigger, name)
        assert again.trigger.deadline == pytest.approx(first.trigger.deadline)
        result = resume(run, operator, again, asyncio.run(fire(stored(again.trigger))))
        assert result["checkpoint_id"]
        assert executed(local_service, job_id) <= saves + 1


FOREIGN = [
    {"v": 1, "status": status, "job_id": OTHER, "request_id": OTHER, "root": "/another/run", **words}
    for status, words in WORDS.items()
]


class TestJobs:
    @pytest.fixture
    def parked(self, service_connection, local_service):
        with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
            job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(PARKED)]})["job_id"]
            yield job_id
            client.cancel_job(job_id)

    @pytest.mark.parametrize("event", FOREIGN, ids=list(WORDS))
    def test_the_creation_waits_on(self, task_run, service_connection, local_service, event) -> None:
        run = task_run("create")
        operator = CortexTrainingCreateJobOperator(
            task_id="create",
            conn_id=service_connection,
            sub_jobs=[copy.deepcopy(PARKED)],
            wait_for_completion=True,
            deferrable=True,
            inline_s=0.0,
        )
        first = deferral(operator.execute, run.context())
        again = deferral(resume, run, operator, first, event)
        assert again.trigger.job_id == first.trigger.job_id
        assert again.trigger.deadline == pytest.approx(first.trigger.deadline)
        with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
            assert client.get_job(first.trigger.job_id)["status"] == "pending"

    @pytest.mark.parametrize("event", FOREIGN, ids=list(WORDS))
    def test_a_sensor_looks_again(self, task_run, service_connection, parked, event) -> None:
        run = task_run("wait")
        sensor = CortexTrainingWaitForRunningSensor(
            task_id="wait", conn_id=service_connection, job_id=parked, deferrable=True, inline_s=0.0
        )
        first = deferral(sensor.execute, run.context())
        again = deferral(resume, run, sensor, first, event)
        assert (again.trigger.job_id, again.trigger.deadline) == (parked, first.trigger.deadline)

    @pytest.mark.parametrize("event", FOREIGN, ids=list(WORDS))
    def test_the_end_of_jobs_is_waited_for_again(self, task_run, service_connection, event) -> None:
        operator = CortexTrainingCancelJobOperator(task_id="cancel", conn_id=service_connection, job_id="a")
        first = deferral(operator._defer, ["a", "b"], ["a"], 60.0)
        again = deferral(resume, task_run("cancel"), operator, first, event)
        assert again.trigger.job_ids == ["a", "b"]
        assert again.trigger.cancelled == ["a"]
        assert again.trigger.deadline == pytest.approx(first.trigger.deadline)


@pytest.mark.parametrize("event", FOREIGN, ids=list(WORDS))
def test_a_publication_is_looked_for_again(task_run, tmp_path, event) -> None:
    run = task_run("wait")
    sensor = CortexTrainingCheckpointPublishedSensor(task_id="wait", root=str(tmp_path), deferrable=True, inline_s=0.0)
    first = deferral(sensor.execute, run.context())
    again = deferral(resume, run, sensor, first, event)
    assert (again.trigger.root, again.trigger.deadline) == (str(tmp_path), first.trigger.deadline)


@pytest.mark.parametrize(
    "event",
    [
        *FOREIGN,
        *({"v": 1, "status": status, "attempt": "of-another-try"} for status in ("failed", "timeout", "trained")),
    ],
)
def test_a_training_is_driven_on(task_run, service_connection, manifest, tmp_path, event) -> None:
    run = task_run("train")
    operator = train(service_connection, plan(str(tmp_path / "run"), manifest))
    first = deferral(operator.execute, run.context())
    again = deferral(resume, run, operator, first, {"root": first.trigger.root, **event})
    assert (again.trigger.root, again.trigger.attempt) == (first.trigger.root, first.trigger.attempt)


def executed(service: Any, job_id: str) -> int:
    return sum(1 for entry in service.execution_log(job_id) if entry["op"] == "save")
