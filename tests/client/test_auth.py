"""Sessions of Snowflake profiles: opened once, renewed once, never shown."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from typing import Any

import pytest

from cortex_training.auth import NoAuth, PatAuth, SnowflakeProfileError, SnowflakeSessionAuth
from cortex_training.errors import AuthError, ConfigurationError


class FakeConnection:
    def __init__(self, connector: FakeConnector, token: str) -> None:
        self._connector = connector
        self.rest: Any = types.SimpleNamespace(token=token, server_url=connector.server_url)
        self.database: str | None = connector.database
        self.schema: str | None = connector.schema
        self.closed = False

    def close(self) -> None:
        self.closed = True
        if self._connector.fail_on_close:
            raise RuntimeError("cannot close")


class FakeConnector:
    """Stands in for `snowflake.connector`, which needs an account."""

    def __init__(self) -> None:
        self.server_url = "https://account.snowflakecomputing.com/"
        self.database: str | None = "DB"
        self.schema: str | None = "PUBLIC"
        self.calls: list[dict[str, Any]] = []
        self.connections: list[FakeConnection] = []
        self.error: Exception | None = None
        self.fail_on_close = False

    def connect(self, **arguments: Any) -> FakeConnection:
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error
        connection = FakeConnection(self, f"session-token-{len(self.connections)}")
        self.connections.append(connection)
        return connection


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> FakeConnector:
    fake = FakeConnector()
    package, module = types.ModuleType("snowflake"), types.ModuleType("snowflake.connector")
    module.connect = fake.connect  # type: ignore[attr-defined]
    package.connector = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "snowflake", package)
    monkeypatch.setitem(sys.modules, "snowflake.connector", module)
    return fake


def test_the_default_profile_and_a_named_one(connector: FakeConnector) -> None:
    SnowflakeSessionAuth()
    SnowflakeSessionAuth("  training ")
    assert connector.calls == [{}, {"connection_name": "training"}]
    for name in ("", "  ", 5):
        with pytest.raises(ConfigurationError, match="connection_name"):
            SnowflakeSessionAuth(name)  # type: ignore[arg-type]


def test_the_session_gives_headers_address_and_names(connector: FakeConnector) -> None:
    auth = SnowflakeSessionAuth("p")
    assert auth.headers() == {"Authorization": 'Snowflake Token="session-token-0"'}
    assert (auth.base_url, auth.database, auth.schema) == ("https://account.snowflakecomputing.com", "DB", "PUBLIC")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c, "rest", None), "did not expose an authenticated REST session"),
        (lambda c: setattr(c.rest, "token", None), "did not expose a session token"),
        (lambda c: setattr(c.rest, "token", ""), "did not expose a session token"),
        (lambda c: setattr(c.rest, "server_url", None), "did not expose its REST server URL"),
        (lambda c: setattr(c.rest, "server_url", "account"), "invalid REST server URL"),
    ],
)
def test_a_connection_without_a_usable_session_is_refused_and_closed(
    connector: FakeConnector, change: Any, message: str
) -> None:
    original = connector.connect

    def broken(**arguments: Any) -> FakeConnection:
        connection = original(**arguments)
        change(connection)
        return connection

    sys.modules["snowflake.connector"].connect = broken  # type: ignore[attr-defined]
    with pytest.raises(SnowflakeProfileError, match=message):
        SnowflakeSessionAuth("p")
    assert connector.connections[0].closed


def test_a_profile_that_cannot_be_opened_says_why(connector: FakeConnector) -> None:
    connector.error = RuntimeError("Programmatic access token is invalid.\nsecond line")
    with pytest.raises(SnowflakeProfileError, match=r"could not open Snowflake connection 'p': .* network policy"):
        SnowflakeSessionAuth("p")


def test_a_missing_connector_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "snowflake.connector", None)
    with pytest.raises(SnowflakeProfileError, match=r"cortex-training-client\[snowflake\]"):
        SnowflakeSessionAuth("p")


def test_a_renewal_replaces_the_session_and_closes_the_old_one(connector: FakeConnector) -> None:
    connector.fail_on_close = True
    auth = SnowflakeSessionAuth("p")
    auth.refresh(auth.headers())
    assert auth.headers() == {"Authorization": 'Snowflake Token="session-token-1"'}
    assert connector.connections[0].closed
    assert not connector.connections[1].closed


def test_many_threads_renew_once(connector: FakeConnector) -> None:
    auth = SnowflakeSessionAuth("p")
    rejected = auth.headers()
    barrier = threading.Barrier(8)

    def renew() -> None:
        barrier.wait()
        auth.refresh(rejected)

    threads = [threading.Thread(target=renew) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(connector.connections) == 2


def test_closing_twice_is_fine_and_use_afterwards_is_an_error(connector: FakeConnector) -> None:
    auth = SnowflakeSessionAuth("p")
    auth.close()
    auth.close()
    with pytest.raises(SnowflakeProfileError, match="closed"):
        auth.headers()


def test_nothing_shows_a_secret(connector: FakeConnector) -> None:
    auth = SnowflakeSessionAuth("p")
    assert repr(auth) == "SnowflakeSessionAuth('p')"
    assert repr(PatAuth("secret-token-value")) == "PatAuth(***)"
    assert repr(NoAuth()) == "NoAuth()"
    for bad in ("", "two words", "smart”quote", "line\nbreak", None):
        with pytest.raises(ConfigurationError, match="pat") as caught:
            PatAuth(bad)  # type: ignore[arg-type]
        assert "smart" not in str(caught.value)
        assert "words" not in str(caught.value)


def test_a_session_travels_as_the_name_of_its_profile(connector: FakeConnector) -> None:
    auth = pickle.loads(pickle.dumps(SnowflakeSessionAuth("p")))
    assert connector.calls == [{"connection_name": "p"}] * 2
    assert auth.headers() == {"Authorization": 'Snowflake Token="session-token-1"'}


def test_an_expired_session_is_renewed_and_the_step_executed_once(
    connector: FakeConnector, clients: Any, weather: Any, scripted: Any
) -> None:
    connector.server_url = weather.url
    client = clients.from_connection_name("p")
    weather.sequence(scripted.Reply(401, {"code": "390112"}), scripted.Reply(body={"request_id": "r"}))
    assert client.step("j") == "r"
    assert [seen.headers["authorization"] for seen in weather.seen] == [
        'Snowflake Token="session-token-0"',
        'Snowflake Token="session-token-1"',
    ]
    weather.sequence(scripted.Reply(401, {"code": "390100"}))
    with pytest.raises(AuthError):
        client.step("j")
    assert len(weather.seen) == 3


def test_database_and_schema_come_from_the_profile_unless_given(
    connector: FakeConnector, clients: Any, weather: Any
) -> None:
    connector.server_url = weather.url
    connector.schema = None
    client = clients.from_connection_name("p")
    assert (client.database, client.schema) == ("DB", "PUBLIC")
    client = clients.from_connection_name("p", database="OTHER", schema="S")
    assert (client.database, client.schema) == ("OTHER", "S")


def test_a_profile_without_a_database_is_refused_and_its_session_ended(connector: FakeConnector, clients: Any) -> None:
    connector.database = None
    with pytest.raises(ConfigurationError, match="database"):
        clients.from_connection_name("p")
    assert connector.connections[0].closed


def test_closing_a_client_ends_the_session_it_opened(connector: FakeConnector, clients: Any) -> None:
    client = clients.from_connection_name("p")
    client.close()
    assert connector.connections[0].closed
