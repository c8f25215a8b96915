"""Sensors in all their modes: one deadline over tries and legs, the same answer, the same failures, the same skips."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    AirflowTaskTimeout,
    TaskDeferred,
)

from airflow_cortex_training.capacity import Enough, enough
from airflow_cortex_training.sensors import base as sensors_base
from airflow_cortex_training.sensors.base import CortexTrainingSensor
from airflow_cortex_training.sensors.capacity import CortexTrainingCapacitySensor
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor
from airflow_cortex_training.sensors.publication import CortexTrainingCheckpointPublishedSensor
from airflow_cortex_training.sensors.requests import CortexTrainingRequestSensor
from airflow_cortex_training.triggers import publication, waiting
from cortex_training.client import CortexTrainingClient
from cortex_training.payloads import build_forward_backward_payload
from cortex_training.publication import PublicationLog
from tests.airflow.test_operators import PARKED, SAMPLING, TRAINING

MODES = ("poke", "reschedule", "deferrable")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors_base, "INLINE_LOOK_S", 0.05)
    monkeypatch.setattr(publication, "FRESH_S", 0.0)
    monkeypatch.setattr(publication, "_BOUNDS", waiting.Bounds(shortest_s=0.05, longest_s=0.1))
    monkeypatch.setattr("airflow_cortex_training.triggers.capacity._BOUNDS", publication._BOUNDS)


def mode_arguments(mode: str) -> dict[str, Any]:
    if mode == "deferrable":
        return {"deferrable": True, "inline_s": 0.0}
    return {"deferrable": False, "mode": mode, "poke_interval": 0.05}


def through(run: Any, make: Callable[[], CortexTrainingSensor]) -> Any:
    """One try to its end: every rescheduled leg is a new process with a new operator."""
    while True:
        try:
            return run.execute(make())
        except AirflowRescheduleException:
            continue


@pytest.fixture
def client(local_service):
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        yield client


@pytest.fixture
def job_id(client):
    job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING), copy.deepcopy(SAMPLING)]})[
        "job_id"
    ]
    client.wait_for_job(job_id)
    yield job_id
    client.cancel_job(job_id)


@pytest.fixture
def parked(client):
    """A job that stays pending."""
    job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(PARKED)]})["job_id"]
    yield job_id
    client.cancel_job(job_id)


def published(root: Path | str, **arguments: Any) -> CortexTrainingCheckpointPublishedSensor:
    return CortexTrainingCheckpointPublishedSensor(task_id="published", root=str(root), **arguments)


def publish(root: Path, step: int) -> str:
    save = root / "exec" / "a-e1" / f"s{step}"
    save.mkdir(parents=True, exist_ok=True)
    return PublicationLog(str(root)).publish(f"exec/a-e1/s{step}", 1, step)[0].name


@pytest.mark.parametrize("mode", MODES)
class TestDeadline:
    """A root without publications never has what is waited for, and costs nothing to look at."""

    def test_a_timeout_fails_for_good(self, task_run, tmp_path, no_grace, mode) -> None:
        with pytest.raises(AirflowSensorTimeout, match=r"not within 0 s|not within 1 s"):
            through(task_run(), lambda: published(tmp_path, timeout=0.3, **mode_arguments(mode)))

    @pytest.mark.parametrize("soft", [{"soft_fail": True}, {"never_fail": True}])
    def test_a_timeout_is_a_skip_when_asked_for(self, task_run, tmp_path, no_grace, mode, soft) -> None:
        with pytest.raises(AirflowSkipException):
            through(task_run(), lambda: published(tmp_path, timeout=0.2, **soft, **mode_arguments(mode)))

    def test_a_retry_does_not_move_it_and_a_clear_does(self, task_run, tmp_path, no_grace, mode) -> None:
        run = task_run()
        run.store.set("cortex_training", {"v": 1, "generation": [2, 0], "started": time.time() - 3600})
        run.retry()
        with pytest.raises(AirflowSensorTimeout):
            through(run, lambda: published(tmp_path, timeout=60, **mode_arguments(mode)))
        run.clear()
        publish(tmp_path, 1)
        assert through(run, lambda: published(tmp_path, timeout=60, **mode_arguments(mode)))["step"] == 1
        assert run.store.get("cortex_training")["started"] > time.time() - 60

    def test_a_last_look_is_taken_after_it(self, task_run, tmp_path, no_grace, mode) -> None:
        publish(tmp_path, 4)
        run = task_run()
        run.store.set("cortex_training", {"v": 1, "generation": [2, 0], "started": time.time() - 3600})
        assert through(run, lambda: published(tmp_path, timeout=60, **mode_arguments(mode)))["step"] == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_bucket_is_not_waited_for_where_its_package_is_missing(task_run, monkeypatch, no_grace, mode) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    monkeypatch.setenv("AIRFLOW_CONN_BUCKET", json.dumps({"conn_type": "aws", "login": "id", "password": "secret"}))
    with pytest.raises(AirflowFailException, match="needs boto3; pip install"):
        through(
            task_run(),
            lambda: published("s3://b/p", credentials="airflow:bucket", timeout=20, **mode_arguments(mode)),
        )


def test_pauses_end_at_the_deadline(task_run, tmp_path) -> None:
    with pytest.raises(AirflowRescheduleException) as pause:
        task_run().execute(published(tmp_path, deferrable=False, mode="reschedule", poke_interval=600, timeout=30))
    assert pause.value.reschedule_date.timestamp() < time.time() + 31


def test_backoff_is_the_engines_own(task_run, tmp_path) -> None:
    sensor = published(
        tmp_path, deferrable=False, mode="reschedule", poke_interval=4, timeout=900, exponential_backoff=True
    )
    with pytest.raises(AirflowRescheduleException) as pause:
        task_run().execute(sensor)
    assert 1 <= pause.value.reschedule_date.timestamp() - time.time() <= 8


def test_execution_timeout_is_one_trys_limit_over_a_deferral(task_run, tmp_path, no_grace) -> None:
    sensor = published(tmp_path, deferrable=True, inline_s=0.0, timeout=600, execution_timeout=timedelta(seconds=0.3))
    with pytest.raises(AirflowTaskTimeout, match="execution_timeout"):
        task_run().execute(sensor)


def test_the_trigger_ends_before_airflows_own_timeout(task_run, tmp_path) -> None:
    with pytest.raises(TaskDeferred) as deferred:
        published(tmp_path, deferrable=True, inline_s=0.0, timeout=60).execute(task_run().context())
    assert deferred.value.timeout >= timedelta(seconds=900)
    assert deferred.value.trigger.deadline <= time.time() + 60


@pytest.mark.parametrize("mode", MODES)
class TestCheckpointPublished:
    def test_gives_the_latest_that_counts(self, task_run, tmp_path, no_grace, mode) -> None:
        first = publish(tmp_path, 5)
        arguments = mode_arguments(mode)
        found = through(task_run(), lambda: published(tmp_path, **arguments))
        assert found == {
            "entry": first,
            "location": f"{tmp_path}/exec/a-e1/s5",
            "save": "exec/a-e1/s5",
            "epoch": 1,
            "step": 5,
        }
        with pytest.raises(AirflowSensorTimeout):
            through(task_run(), lambda: published(tmp_path, after=first, timeout=0.2, **arguments))
        with pytest.raises(AirflowSensorTimeout):
            through(task_run(), lambda: published(tmp_path, min_step=6, timeout=0.2, **arguments))
        publish(tmp_path, 9)
        assert through(task_run(), lambda: published(tmp_path, after=first, min_step=6, **arguments))["step"] == 9

    def test_a_root_that_nobody_made_yet_is_waited_for(self, task_run, tmp_path, no_grace, mode) -> None:
        with pytest.raises(AirflowSensorTimeout):
            through(task_run(), lambda: published(tmp_path / "later", timeout=0.2, **mode_arguments(mode)))

    def test_a_log_that_is_not_one_fails_for_good(self, task_run, tmp_path, no_grace, mode) -> None:
        (tmp_path / "pub").mkdir()
        (tmp_path / "pub" / "notes.txt").touch()
        with pytest.raises(Exception, match="not a publication"):
            through(task_run(), lambda: published(tmp_path, timeout=60, **mode_arguments(mode)))

    @pytest.mark.parametrize("arguments", [{"after": "yesterday"}, {"root": ""}])
    def test_bad_arguments_are_named(self, task_run, tmp_path, mode, arguments) -> None:
        given = {"root": str(tmp_path), **arguments}
        with pytest.raises(AirflowFailException, match=r"task published: (after|root)"):
            task_run().execute(
                CortexTrainingCheckpointPublishedSensor(task_id="published", **given, **mode_arguments(mode))
            )


@pytest.mark.parametrize("mode", MODES)
class TestWaitForRunning:
    def test_a_running_job_is_found(self, task_run, service_connection, job_id, no_grace, mode) -> None:
        make = lambda: CortexTrainingWaitForRunningSensor(  # noqa: E731
            task_id="wait", conn_id=service_connection, job_id=job_id, **mode_arguments(mode)
        )
        assert through(task_run(), make) == job_id

    def test_a_pending_job_times_out(self, task_run, service_connection, parked, no_grace, mode) -> None:
        make = lambda: CortexTrainingWaitForRunningSensor(  # noqa: E731
            task_id="wait", conn_id=service_connection, job_id=parked, timeout=0.3, **mode_arguments(mode)
        )
        with pytest.raises(AirflowSensorTimeout, match=f"job {parked} running"):
            through(task_run(), make)

    @pytest.mark.parametrize(("soft", "kind"), [(False, AirflowFailException), (True, AirflowSkipException)])
    def test_an_ended_job_is_final(
        self, task_run, service_connection, client, parked, no_grace, mode, soft, kind
    ) -> None:
        client.cancel_job(parked)
        make = lambda: CortexTrainingWaitForRunningSensor(  # noqa: E731
            task_id="wait", conn_id=service_connection, job_id=parked, soft_fail=soft, **mode_arguments(mode)
        )
        with pytest.raises(kind):
            through(task_run(), make)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", MODES)
def test_a_service_that_is_not_there_is_waited_for_until_the_timeout(
    task_run, unreachable_connection, no_grace, mode
) -> None:
    """Not for as long as a client tries one look by itself."""
    with pytest.raises(AirflowSensorTimeout):
        through(
            task_run("wait"),
            lambda: CortexTrainingWaitForRunningSensor(
                task_id="wait", conn_id=unreachable_connection, job_id="j", timeout=1.0, **mode_arguments(mode)
            ),
        )


def no_such_token() -> bytes:
    """A frame that the service takes and the model can't."""
    return build_forward_backward_payload({"input_ids": [[10**6, 1, 2]], "labels": [[10**6, 1, 2]]})


@pytest.mark.parametrize("mode", MODES)
class TestRequest:
    def request(self, conn_id: str, job_id: str, request_id: str, mode: str, **arguments: Any) -> Any:
        return CortexTrainingRequestSensor(
            task_id="request",
            conn_id=conn_id,
            job_id=job_id,
            request_id=request_id,
            **{**mode_arguments(mode), **arguments},
        )

    def test_a_done_request(self, task_run, service_connection, client, job_id, no_grace, mode) -> None:
        request_id = client.save(job_id, None, "resumable")
        found = through(task_run(), lambda: self.request(service_connection, job_id, request_id, mode))
        assert found == {"job_id": job_id, "request_id": request_id, "state": "done"}

    def test_a_failed_request_is_final_and_named(
        self, task_run, service_connection, client, job_id, no_grace, mode
    ) -> None:
        request_id = client.forward_backward(job_id, no_such_token())
        with pytest.raises(AirflowFailException, match=rf"{request_id} of job {job_id} ended 'failed'"):
            through(task_run(), lambda: self.request(service_connection, job_id, request_id, mode))

    def test_an_unknown_request_is_believed_after_a_while(
        self, task_run, service_connection, job_id, no_grace, mode, monkeypatch
    ) -> None:
        monkeypatch.setattr(waiting, "LOST_AFTER_S", 0.3)
        with pytest.raises(AirflowFailException):
            through(task_run(), lambda: self.request(service_connection, job_id, "never-sent", mode, timeout=60))

    def test_an_ended_job_is_the_answer(self, task_run, service_connection, client, no_grace, mode) -> None:
        body = {"sub_job_configs": [copy.deepcopy(SAMPLING)]}
        job_id = client.create_job_from_body(body)["job_id"]
        client.wait_for_job(job_id)
        request_id = client.generate(job_id, ["a"], {"max_tokens": 1})
        client.poll_request(job_id, request_id)
        client.cancel_job(job_id)
        with pytest.raises(AirflowFailException, match=rf"{request_id}.*{job_id}.*cancel"):
            through(task_run(), lambda: self.request(service_connection, job_id, request_id, mode, timeout=60))


@pytest.mark.parametrize("mode", MODES)
class TestCapacity:
    def capacity(self, conn_id: str, mode: str, **arguments: Any) -> CortexTrainingCapacitySensor:
        return CortexTrainingCapacitySensor(
            task_id="capacity", conn_id=conn_id, **{**mode_arguments(mode), "timeout": 0.3, **arguments}
        )

    def test_free_gpus_are_found(self, task_run, service_connection, client, no_grace, mode) -> None:
        free = client.get_capacity("B200")["available_gpus"]
        found = through(task_run(), lambda: self.capacity(service_connection, mode, gpus=1, hardware="B200"))
        assert found == {"hardware": "B200", "available_gpus": free}

    def test_more_than_there_ever_are_fails_for_good(
        self, task_run, service_connection, client, no_grace, mode
    ) -> None:
        most = client.get_capacity("H200")["max_total_gpus"]
        with pytest.raises(AirflowFailException, match="at most"):
            through(task_run(), lambda: self.capacity(service_connection, mode, gpus=most + 1, hardware="H200"))

    @pytest.mark.parametrize(("arguments", "named"), [({"gpus": 0}, "gpus"), ({"gpus": 1, "hardware": "A1"}, "hard")])
    def test_bad_arguments_are_named(self, task_run, service_connection, mode, arguments, named) -> None:
        with pytest.raises(AirflowFailException, match=f"task capacity: {named}"):
            task_run().execute(self.capacity(service_connection, mode, **arguments))

    def test_taken_gpus_are_waited_for(
        self, task_run, start_local_service, connection, no_grace, mode, monkeypatch
    ) -> None:
        service = start_local_service(gpus=2, simulate="0")
        conn_id = connection("small", host=service.base_url, database=service.database, schema=service.schema)
        with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
            job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING)], "hardware": "H200"})[
                "job_id"
            ]
            client.wait_for_job(job_id)
            arguments = {"gpus": 2, "hardware": "H200"}
            with pytest.raises(AirflowSensorTimeout, match="2 free GPUs of H200"):
                through(task_run(), lambda: self.capacity(conn_id, mode, **arguments))
            client.cancel_job(job_id)
            found = through(task_run(), lambda: self.capacity(conn_id, mode, timeout=60, **arguments))
            assert found["available_gpus"] == 2


@pytest.mark.parametrize(
    ("capacity", "gpus", "verdict"),
    [
        ({}, 8, Enough.UNKNOWN),
        ({"has_reservation": False, "max_total_gpus": 0, "available_gpus": 0}, 8, Enough.UNKNOWN),
        ({"max_total_gpus": -1, "available_gpus": 0}, 8, Enough.YES),
        ({"has_reservation": True, "max_total_gpus": 16, "available_gpus": 8}, 8, Enough.YES),
        ({"has_reservation": True, "max_total_gpus": 16, "available_gpus": 7, "in_use_gpus": 9}, 8, Enough.NOT_NOW),
        ({"has_reservation": True, "max_total_gpus": 4, "available_gpus": 4}, 8, Enough.NEVER),
        ({"has_reservation": True, "max_total_gpus": 0, "in_use_gpus": 3}, 8, Enough.NOT_NOW),
    ],
)
def test_enough_gpus(capacity: dict[str, Any], gpus: int, verdict: Enough) -> None:
    assert enough(capacity, gpus) == verdict


async def test_waits_on_one_root_share_a_listing(tmp_path, monkeypatch) -> None:
    import asyncio

    monkeypatch.setattr(publication, "FRESH_S", 60.0)
    publish(tmp_path, 3)
    opened: list[str] = []
    original = publication.open_log
    monkeypatch.setattr(publication, "open_log", lambda *a: (opened.append(a[0]), original(*a))[1])

    def trigger() -> publication.CortexTrainingPublicationTrigger:
        now = time.time()
        return publication.CortexTrainingPublicationTrigger(
            root=str(tmp_path),
            credentials=None,
            after=None,
            min_step=0,
            started=now,
            not_before=now + 0.2,
            deadline=now + 30,
        )

    async def fire() -> dict[str, Any]:
        (payload,) = [event.payload async for event in trigger().run()]
        return payload

    events = await asyncio.gather(*(fire() for _ in range(40)))
    assert {event["step"] for event in events} == {3}
    assert len(opened) == 1
    assert publication._listings[asyncio.get_running_loop()] == {}
