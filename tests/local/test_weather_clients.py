"""What this repository's clients make of bad weather that the service itself makes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient
from cortex_training.errors import (
    ApiError,
    AuthError,
    ConflictError,
    DeadlineExceeded,
    JobFailed,
    OutcomeUnknown,
    ProtocolError,
    RequestFailed,
)
from cortex_training.local.control_client import ServiceControl
from tests.conftest import RunningService
from tests.local.api import masked_frame, sampling, token_batch, training

FRAME = masked_frame(token_batch())


@pytest.fixture
def client(weathered_service: RunningService, control: ServiceControl) -> Iterator[CortexTrainingClient]:
    service = weathered_service
    with CortexTrainingClient(service.base_url, service.database, service.schema, poll_interval=0.01) as client:
        yield client


@pytest.fixture
async def async_client(
    weathered_service: RunningService, control: ServiceControl
) -> AsyncIterator[AsyncCortexTrainingClient]:
    service = weathered_service
    async with AsyncCortexTrainingClient(
        service.base_url, service.database, service.schema, poll_interval=0.01
    ) as client:
        yield client


@pytest.fixture
def job_id(client: CortexTrainingClient) -> Iterator[str]:
    job_id = str(client.create_job_from_body({"sub_job_configs": [training()]})["job_id"])
    client.wait_for_job(job_id, timeout_s=30)
    yield job_id
    with contextlib.suppress(ConflictError):
        client.cancel_job(job_id)


def operations(control: ServiceControl, job_id: str) -> list[str]:
    return [entry["op"] for entry in control.executions(job_id)]


@pytest.mark.parametrize(("when", "executed"), [("before", []), ("executed", ["step"])])
def test_a_step_without_an_answer_is_not_sent_again(
    client: CortexTrainingClient, control: ServiceControl, job_id: str, when: str, executed: list[str]
) -> None:
    control.add("drop", on="step", when=when)
    with pytest.raises(OutcomeUnknown):
        client.step(job_id)
    assert operations(control, job_id) == executed


async def test_nor_by_the_asynchronous_client(
    async_client: AsyncCortexTrainingClient, control: ServiceControl, job_id: str
) -> None:
    rule = control.add("drop", on="step", when="after", times=0)
    with pytest.raises(OutcomeUnknown):
        await async_client.step(job_id)
    assert control.fired(rule) == 1


@pytest.mark.parametrize("when", ["before", "after", "executed"])
def test_a_forward_backward_is_sent_again_and_executed_once(
    client: CortexTrainingClient, control: ServiceControl, job_id: str, when: str
) -> None:
    control.add("drop", on="forward-backward", when=when, times=2)
    request_id = client.forward_backward(job_id, FRAME)
    client.poll_request(job_id, request_id)
    assert operations(control, job_id) == ["forward-backward"]


def test_a_throttled_step_waits_as_told(client: CortexTrainingClient, control: ServiceControl, job_id: str) -> None:
    rule = control.add("answer", on="step", status=429, retry_after=0.2, times=2)
    assert client.poll_request(job_id, client.step(job_id))["global_steps"] == 1
    assert control.rules()[rule]["seen"] == 3


def test_a_restarting_worker_takes_the_step_later(
    client: CortexTrainingClient, control: ServiceControl, job_id: str
) -> None:
    rule = control.add("restart-worker", on="step", seconds=0.3)
    assert client.poll_request(job_id, client.step(job_id))["global_steps"] == 1
    assert control.rules()[rule]["seen"] > 1
    assert operations(control, job_id) == ["step"]


def test_a_redirect_is_not_followed(client: CortexTrainingClient, control: ServiceControl, job_id: str) -> None:
    control.add("redirect", on="step", location="http://127.0.0.1:9/elsewhere")
    with pytest.raises((ApiError, ProtocolError), match="307"):
        client.step(job_id)
    assert operations(control, job_id) == []


def test_polls_survive_what_the_network_does(
    client: CortexTrainingClient, control: ServiceControl, job_id: str
) -> None:
    control.add("drop", on="poll")
    control.add("answer", on="poll", skip=1, status=503)
    control.add("cut", on="poll", skip=2, bytes=15)
    control.add("answer", on="poll", skip=3, status=502, body="<html>bad gateway</html>")
    rule = control.add("patch", on="poll", skip=4, body={"status": "pondering"})
    assert client.poll_request(job_id, client.step(job_id), timeout_s=60)["global_steps"] == 1
    assert control.fired(rule) == 1


@pytest.fixture
def generated(client: CortexTrainingClient, job_id: str) -> Any:
    job = str(client.create_job_from_body({"sub_job_configs": [sampling()]})["job_id"])
    client.wait_for_job(job, timeout_s=30)

    def call() -> Any:
        prompts = [[index % 200 + 5] for index in range(300)]
        return client.poll_request(job, client.generate(job, prompts, {"max_tokens": 16, "seed": 1}), timeout_s=20)

    yield call
    client.cancel_job(job)


def test_chunks_with_a_wrong_hash_are_noticed(control: ServiceControl, generated: Any) -> None:
    rule = control.add("wrong-hash", on="poll", times=0)
    with pytest.raises(ProtocolError):
        generated()
    assert control.fired(rule) >= 1


def test_a_cursor_that_does_not_move_ends_in_an_error(control: ServiceControl, generated: Any) -> None:
    control.add("stuck-cursor", on="poll", times=0)
    with pytest.raises((ProtocolError, DeadlineExceeded)):
        generated()


def test_chunks_that_come_twice_are_taken_once(control: ServiceControl, generated: Any) -> None:
    expected = generated()
    rule = control.add("duplicate-events", on="poll", times=0)
    again = generated()
    assert control.fired(rule) >= 1
    assert len(again["results"]) == len(expected["results"]) == 300


def test_a_hang_ends_at_the_deadline(control: ServiceControl, weathered_service: RunningService, job_id: str) -> None:
    service = weathered_service
    control.add("hang", on="poll", times=0)
    with CortexTrainingClient(
        service.base_url, service.database, service.schema, poll_interval=0.01, request_timeout=(5.0, 0.3)
    ) as client:
        request_id = client.step(job_id)
        with pytest.raises(DeadlineExceeded):
            client.poll_request(job_id, request_id, timeout_s=1.0)


def test_a_token_that_expires_is_an_error_that_says_so(
    control: ServiceControl, weathered_service: RunningService
) -> None:
    service = weathered_service
    with CortexTrainingClient.from_pat(service.base_url, "a-pat", service.database, service.schema) as client:
        client.list_jobs()
        control.act("expire-token")
        with pytest.raises(AuthError, match="expired"):
            client.list_jobs()


def test_a_job_that_fails_is_told_with_its_reason(
    client: CortexTrainingClient, control: ServiceControl, job_id: str
) -> None:
    control.add("fail-job", on="step", when="executed", at_step=2, reason="node lost")
    client.poll_request(job_id, client.step(job_id))
    request_id = client.step(job_id)
    with pytest.raises(JobFailed, match="node lost"):
        client.poll_request(job_id, request_id)


def test_a_request_that_fails_is_told_with_its_error(
    client: CortexTrainingClient, control: ServiceControl, job_id: str
) -> None:
    control.add("fail-request", on="step", error="CUDA out of memory")
    with pytest.raises(RequestFailed, match="CUDA out of memory"):
        client.poll_request(job_id, client.step(job_id))


def test_a_process_is_killed_while_its_steps_reply_is_held_back(
    client: CortexTrainingClient, control: ServiceControl, job_id: str, weathered_service: RunningService
) -> None:
    service = weathered_service
    rule = control.add("hold", on="step", when="executed")
    script = (
        "from cortex_training import CortexTrainingClient\n"
        f"CortexTrainingClient({service.base_url!r}, {service.database!r}, {service.schema!r}).step({job_id!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        control.wait_until_holding(rule)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert operations(control, job_id) == ["step"]
    assert client.poll_request(job_id, client.step(job_id))["global_steps"] == 2
