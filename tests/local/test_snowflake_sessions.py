"""Session tokens that expire, over plain http and without a token of the service's own: no model is loaded here."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import snowflake.connector

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient
from cortex_training.local.connection_profile import connections_toml
from cortex_training.local.sessions import Session, Sessions, SessionState
from cortex_training.local.settings import ServiceSettings
from tests.conftest import RunningService, start_service
from tests.local.connector import connect, connection_arguments

LIFETIME_S = 1.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("short_sessions")
    service = start_service(folder, snowflake=True, session_seconds=LIFETIME_S)
    yield service
    service.stop()


@pytest.fixture
def logins(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the client logged in, in monotonic seconds; its profile, whatever the name, is the service's."""
    moments: list[float] = []
    real = snowflake.connector.connect

    def connect_to_the_service(connection_name: str) -> Any:
        connection = real(**connection_arguments(service))
        moments.append(time.monotonic())
        return connection

    monkeypatch.setattr(snowflake.connector, "connect", connect_to_the_service)
    return moments


def test_threads_log_in_once_for_each_token_that_expires(service: RunningService, logins: list[float]) -> None:
    failures: list[BaseException] = []

    def work(client: CortexTrainingClient) -> None:
        try:
            while len(logins) < 4:
                client.get_capacity()
        except BaseException as error:
            failures.append(error)

    with CortexTrainingClient.from_connection_name("any") as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    # Each token has lived to its end: nobody logged in beside another who did.
    apart = [later - earlier for earlier, later in itertools.pairwise(logins)]
    assert len(logins) == 4
    assert min(apart) > 0.8 * LIFETIME_S, apart


async def test_the_async_client_logs_in_again_too(service: RunningService, logins: list[float]) -> None:
    async with AsyncCortexTrainingClient.from_connection_name("any") as client:
        while len(logins) < 2:
            assert (await client.get_capacity())["has_reservation"]


def test_the_connector_renews_its_own_session(service: RunningService) -> None:
    with connect(service) as connection:
        cursor = connection.cursor()
        cursor.execute("create or replace temporary table MINE as select 7 as N")
        first = connection.rest.token
        time.sleep(1.5 * LIFETIME_S)
        reply = requests.get(
            f"{service.url}/capacity", headers={"authorization": f'Snowflake Token="{first}"'}, timeout=60
        )
        assert (reply.status_code, reply.json()["code"]) == (401, "390112")
        # The session is still the same one: its temporary table is there.
        assert cursor.execute("select N from MINE").fetchone() == (7,)
        assert connection.rest.token != first
        reply = requests.get(
            f"{service.url}/capacity", headers={"authorization": f'Snowflake Token="{first}"'}, timeout=60
        )
        assert (reply.status_code, reply.json()["code"]) == (401, "390111")


def test_other_callers_need_no_session(service: RunningService) -> None:
    assert requests.get(f"{service.url}/capacity", timeout=60).status_code == 200
    assert requests.get(f"{service.url}/capacity", headers={"authorization": "Bearer any"}, timeout=60).ok


def test_the_database_of_a_client_is_created_when_it_is_missing(service: RunningService) -> None:
    reply = requests.post(
        f"{service.base_url}/api/v2/statements",
        json={"statement": "CREATE DATABASE IF NOT EXISTS FRESH", "timeout": 60},
        timeout=60,
    )
    assert reply.status_code == 200
    with connect(service, database="FRESH") as connection:
        assert connection.cursor().execute("select current_database()").fetchone() == ("FRESH",)


def test_what_serve_prints_is_a_profile_that_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cortex_training.local", "serve", "--snowflake", "--tls", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if line.endswith("Ctrl-C ends it.\n"):
                break
        section = re.search(r"^ +\[local\]\n(?: +\w+ = .+\n)+", printed, re.MULTILINE)
        trust = re.search(r"export REQUESTS_CA_BUNDLE=(.+)", printed)
        assert section, printed
        assert trust, printed
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REQUESTS_CA_BUNDLE", trust[1])
            with snowflake.connector.connect(**tomllib.loads(section[0])["local"]) as connection:
                assert connection.cursor().execute("select current_schema()").fetchone() == ("PUBLIC",)
    finally:
        process.terminate()
        process.wait(20)


def test_a_token_is_not_printed(tmp_path: Path) -> None:
    settings = ServiceSettings(tmp_path, token="s3cret", snowflake=True)
    profile = tomllib.loads(connections_toml("http://127.0.0.1:8484", settings))["local"]
    assert "s3cret" not in str(profile)
    assert (profile["host"], profile["port"], profile["protocol"]) == ("127.0.0.1", 8484, "http")


# --- The store of sessions by itself


def test_a_renewed_session_has_one_token_and_ended_sessions_are_let_go() -> None:
    ended: list[Session] = []
    sessions = Sessions(3600.0, ended.append)
    session = sessions.open("ANN", connection="c")
    first = session.token
    assert sessions.state(first) == SessionState.OPEN
    assert sessions.renew(first) is None  # a session token is no master token
    renewed = sessions.renew(session.master_token)
    assert renewed == (first, session)
    assert (sessions.state(first), sessions.state(session.token)) == (SessionState.UNKNOWN, SessionState.OPEN)
    assert sessions.find(session.token) is session
    sessions.close(session.token)
    sessions.close(session.token)
    assert ended == [session]
    assert sessions.renew(session.master_token) is None
    assert sessions.find(session.token) is None
    assert session.token not in repr(session)
    assert session.master_token not in repr(session)


def test_a_session_is_forgotten_when_its_master_token_has_expired() -> None:
    ended: list[Session] = []
    sessions = Sessions(-1.0, ended.append)
    old = sessions.open("ANN", connection=None)
    assert sessions.state(old.token) == SessionState.UNKNOWN
    assert sessions.renew(old.master_token) is None
    sessions.open("BOB", connection=None)
    assert old in ended
