"""Snowflake sessions that the weather ends: a client logs in again, and nothing is executed twice."""

from __future__ import annotations

from typing import Any

import pytest
import snowflake.connector

from cortex_training import CortexTrainingClient
from cortex_training.errors import AuthError
from tests.conftest import ServiceFactory
from tests.local.api import training
from tests.local.connector import connect, connection_arguments


def test_a_step_is_made_once_though_its_session_expires(
    start_local_service: ServiceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start_local_service(faults=[], simulate="0", snowflake=True)
    control, logins = service.control, []
    real = snowflake.connector.connect

    def connect_to_the_service(connection_name: str) -> Any:
        logins.append(connection_name)
        return real(**connection_arguments(service))

    monkeypatch.setattr(snowflake.connector, "connect", connect_to_the_service)
    with CortexTrainingClient.from_connection_name("any") as client:
        job_id = str(client.create_job_from_body({"sub_job_configs": [training()]})["job_id"])
        client.wait_for_job(job_id, timeout_s=30)
        rule = control.add("expire-token", on="step")
        assert client.poll_request(job_id, client.step(job_id))["global_steps"] == 1
        assert control.rules()[rule]["seen"] == 2
        assert logins == ["any"] * 2
        control.act("expire-token")
        assert client.poll_request(job_id, client.step(job_id))["global_steps"] == 2
        assert logins == ["any"] * 3
        # A session that was revoked, not one that expired.
        control.add("expire-token", on="step", code="390100")
        control.add("expire-token", on="step", skip=1, code="390100")
        with pytest.raises(AuthError):
            client.step(job_id)
    assert [entry["op"] for entry in control.executions(job_id)] == ["step", "step"]


def test_an_expired_session_is_over_for_sql_too_and_the_connector_renews_it(
    start_local_service: ServiceFactory,
) -> None:
    service = start_local_service(faults=[], simulate="0", snowflake=True)
    with connect(service) as connection:
        first = connection.rest.token
        service.control.act("expire-token")
        assert connection.cursor().execute("select 1").fetchall() == [(1,)]
        assert connection.rest.token != first
        renewed = connection.rest.token
        # One call put off is no session that ended.
        service.control.act("expire-token", requests=1)
        assert connection.cursor().execute("select 2").fetchall() == [(2,)]
        assert connection.rest.token == renewed
