"""Sessions of Snowflake profiles: opened once, renewed once, never shown."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import pickle
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient
from cortex_training.auth import KeyPairAuth, NoAuth, OAuthAuth, PatAuth, SnowflakeProfileError, SnowflakeSessionAuth
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


def test_a_session_that_is_opened_otherwise_is_renewed_the_same_way(connector: FakeConnector) -> None:
    auth = SnowflakeSessionAuth(connect=lambda: connector.connect(role="trainer"), described="a block")
    first = auth.headers()
    auth.refresh(first)
    assert auth.headers() != first
    assert connector.calls == [{"role": "trainer"}] * 2
    assert "a block" in repr(auth)
    with pytest.raises(TypeError, match="a block"):
        pickle.dumps(auth)
    connector.error = RuntimeError("Incorrect username or password\nmore")
    with pytest.raises(SnowflakeProfileError, match=r"could not open a block: Incorrect username or password\."):
        SnowflakeSessionAuth(connect=connector.connect, described="a block")


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


def test_an_oauth_token_is_sent_and_asked_for_again_when_it_expired(clients: Any, weather: Any, scripted: Any) -> None:
    tokens = iter(["first-oauth-token", "second-oauth-token"])
    client = clients(weather.url, auth=OAuthAuth(lambda: next(tokens)))
    weather.sequence(scripted.Reply(401), scripted.Reply(body={"request_id": "r"}))
    assert client.step("j") == "r"
    first, second = (seen.headers for seen in weather.seen)
    assert first["authorization"] == "Bearer first-oauth-token"
    assert second["authorization"] == "Bearer second-oauth-token"
    assert second["x-snowflake-authorization-token-type"] == "OAUTH"
    assert "oauth-token" not in repr(client)


def test_a_fixed_oauth_token_is_not_replayed(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(401))
    with pytest.raises(AuthError):
        clients(weather.url, auth=OAuthAuth("fixed-oauth-token")).step("j")
    assert len(weather.seen) == 1


def rsa_key(passphrase: str | None = None) -> tuple[str, Any]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encryption = (
        serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    return pem.decode(), key.public_key()


def decoded(part: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def test_a_key_pair_signs_the_documented_claims() -> None:
    pem, public = rsa_key("passphrase")
    auth = KeyPairAuth("acct.eu-central-1", "svc_user", pem, "passphrase")
    headers = auth.headers()
    assert headers["X-Snowflake-Authorization-Token-Type"] == "KEYPAIR_JWT"
    token = headers["Authorization"].removeprefix("Bearer ")
    header, claims, signature = token.split(".")
    public.verify(
        base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4)),
        f"{header}.{claims}".encode(),
        padding.PKCS1v15(),
        hashes.SHA256(),
    )
    assert decoded(header) == {"alg": "RS256", "typ": "JWT"}
    found = decoded(claims)
    assert found["sub"] == "ACCT.SVC_USER"
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert found["iss"] == "ACCT.SVC_USER.SHA256:" + base64.b64encode(hashlib.sha256(der).digest()).decode()
    assert 0 < found["exp"] - found["iat"] <= 3600
    assert auth.headers() == headers
    assert repr(auth) == "KeyPairAuth('ACCT.SVC_USER')"


def test_a_key_pair_renews_before_expiry_and_when_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    auth = KeyPairAuth("org-acct", "u", rsa_key()[0])
    start = time.time()
    first = auth.headers()
    monkeypatch.setattr("cortex_training.auth.time.time", lambda: start + 56 * 60)
    second = auth.headers()
    assert first != second
    auth.refresh(first)
    assert auth.headers() == second
    monkeypatch.setattr("cortex_training.auth.time.time", lambda: start + 57 * 60)
    auth.refresh(second)
    assert auth.headers() != second


def test_credentials_travel_with_their_client() -> None:
    for auth in (PatAuth("secret-token-value"), OAuthAuth("fixed-oauth-token"), KeyPairAuth("a", "u", rsa_key()[0])):
        client = CortexTrainingClient("http://h", "D", "S", auth=auth)
        copy = pickle.loads(pickle.dumps(client))
        assert copy._settings.auth.headers().keys() == auth.headers().keys()
        assert repr(copy) == repr(client)


@pytest.mark.parametrize("key", ["no pem", b"", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"])
def test_a_key_that_is_none_is_refused_without_showing_it(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="private_key") as caught:
        KeyPairAuth("a", "u", key)
    assert "AAAA" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="passphrase"):
        KeyPairAuth("a", "u", rsa_key("right")[0], "wrong")
    with pytest.raises(ConfigurationError, match="account"):
        KeyPairAuth("", "u", key)


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


def expiring(weather: Any, scripted: Any, expired: str) -> tuple[list[str], list[str]]:
    """Let the server refuse one credential as expired; the jobs that were refused, and those that were stepped."""
    refused: list[str] = []
    executed: list[str] = []

    def script(seen: Any) -> Any:
        if expired in seen.headers["authorization"]:
            refused.append(seen.path)
            return scripted.Reply(401, {"code": "390112", "message": "the session expired"})
        executed.append(seen.path)
        return scripted.Reply(body={"request_id": "r"})

    weather.script = script
    return refused, executed


def all_at_once(clients: Any, client: Any, jobs: list[str]) -> None:
    """Step each job, all at the same time, on one client."""
    if clients.transport == "requests":
        with ThreadPoolExecutor(len(jobs)) as pool:
            assert list(pool.map(client.step, jobs)) == ["r"] * len(jobs)
        return

    async def steps() -> list[str]:
        return await asyncio.gather(*(client._client.step(job) for job in jobs))

    assert client._loop.run_until_complete(steps()) == ["r"] * len(jobs)


JOBS = [f"j{number}" for number in range(40)]
PATHS = sorted(f"/{job}/step" for job in JOBS)


def test_many_calls_renew_an_expired_session_once_and_each_is_executed_once(
    connector: FakeConnector, clients: Any, weather: Any, scripted: Any
) -> None:
    connector.server_url = weather.url
    client = clients.from_connection_name("p")
    genuine = connector.connect

    def slow(**arguments: Any) -> FakeConnection:
        time.sleep(0.2)  # long enough for every other call to find the session expired too
        return genuine(**arguments)

    sys.modules["snowflake.connector"].connect = slow  # type: ignore[attr-defined]
    refused, executed = expiring(weather, scripted, "session-token-0")
    all_at_once(clients, client, JOBS)
    assert sorted(executed) == PATHS
    assert len(refused) == len(set(refused)) > 1
    assert len(connector.connections) == 2
    assert [connection.closed for connection in connector.connections] == [True, False]


def test_many_calls_ask_for_an_oauth_token_once(clients: Any, weather: Any, scripted: Any) -> None:
    asked: list[int] = []

    def token() -> str:
        asked.append(1)
        time.sleep(0.1)
        return f"oauth-token-{len(asked)}"

    client = clients(weather.url, auth=OAuthAuth(token))
    refused, executed = expiring(weather, scripted, "oauth-token-1")
    all_at_once(clients, client, JOBS)
    assert sorted(executed) == PATHS
    assert len(refused) == len(set(refused)) > 1
    assert len(asked) == 2


def test_many_calls_sign_one_new_token(
    clients: Any, weather: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signing(KeyPairAuth):
        signed = 0

        def _sign(self) -> None:
            self.signed += 1
            super()._sign()

    auth = Signing("org-acct", "ada", rsa_key()[0])
    client = clients(weather.url, auth=auth)
    first = auth.headers()["Authorization"].removeprefix("Bearer ")
    refused, executed = expiring(weather, scripted, first)
    # A minute later: within one second the same claims give the same token.
    later = time.time() + 60
    monkeypatch.setattr("cortex_training.auth.time", types.SimpleNamespace(time=lambda: later))
    all_at_once(clients, client, JOBS)
    assert sorted(executed) == PATHS
    assert len(refused) == len(set(refused)) > 1
    assert auth.signed == 2


async def test_a_renewal_under_way_does_not_hold_up_the_event_loop(
    connector: FakeConnector, weather: Any, scripted: Any
) -> None:
    connector.server_url = weather.url
    async with AsyncCortexTrainingClient.from_connection_name("p", telemetry_timeout=60.0) as client:
        renewing, loop_ran, waited = threading.Event(), threading.Event(), []
        genuine = connector.connect

        def slow(**arguments: Any) -> FakeConnection:
            renewing.set()
            waited.append(loop_ran.wait(10))
            return genuine(**arguments)

        sys.modules["snowflake.connector"].connect = slow  # type: ignore[attr-defined]
        expiring(weather, scripted, "session-token-0")
        first = asyncio.create_task(client.step("j1"))
        await asyncio.to_thread(renewing.wait, 10)
        second = asyncio.create_task(client.step("j2"))
        await asyncio.sleep(0.1)  # the second call asks for its headers meanwhile
        loop_ran.set()
        assert await asyncio.gather(first, second) == ["r", "r"]
    assert waited == [True]


def test_a_session_that_stays_expired_is_an_error_for_everybody(
    connector: FakeConnector, clients: Any, weather: Any, scripted: Any
) -> None:
    connector.server_url = weather.url
    client = clients.from_connection_name("p")
    weather.sequence(scripted.Reply(401, {"code": "390112", "message": "the session expired"}))
    for _ in range(2):
        with pytest.raises(AuthError, match="expired"):
            client.step("j")
    assert len(weather.seen) == 4
