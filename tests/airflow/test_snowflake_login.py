"""The login of a Snowflake connection, reused: what reaches the service in the header, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from airflow_cortex_training.connection import Target
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.triggers import hub as hub_module
from airflow_cortex_training.triggers.hub import open_hub
from cortex_training.errors import ConfigurationError, TransportError

_PRIVATE = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def pem(passphrase: str = "") -> str:
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    return _PRIVATE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption).decode()


class Account(ThreadingHTTPServer):
    """An account: one service that notes the headers it gets, and a token endpoint."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.seen: list[tuple[str, str]] = []
        self.forms: list[dict[str, list[str]]] = []
        self.basic: list[str] = []
        self.tokens = iter(f"access-token-{n}" for n in range(1, 100))
        self.accepts: str | None = None
        self.endpoint_status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Account

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.forms.append(parse_qs(body))
        self.server.basic.append(self.headers.get("Authorization", ""))
        if self.server.endpoint_status != 200:
            return self._say(self.server.endpoint_status, {"error": "invalid_grant"})
        return self._say(200, {"access_token": next(self.server.tokens), "expires_in": 600})

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.server.seen.append((token, self.headers.get("X-Snowflake-Authorization-Token-Type", "")))
        if self.server.accepts is not None and token != self.server.accepts:
            return self._say(401, {"code": "390112", "message": "Your session has expired."})
        return self._say(200, {"jobs": []})

    def _say(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture
def account() -> Iterator[Account]:
    server = Account()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def snowflake(monkeypatch: pytest.MonkeyPatch, connection):
    """Defines a Snowflake connection, and one of Cortex Training that reuses its login."""

    def define(host: str = "", *, login: str = "ANNA", password: str = "", **extra: Any) -> CortexTrainingHook:
        document = {
            "conn_type": "snowflake",
            "login": login,
            "password": password,
            "schema": "FROM_SNOWFLAKE",
            "extra": {"account": "org-acc", "database": "SNOW_DB", **extra},
        }
        monkeypatch.setenv("AIRFLOW_CONN_SNOW", json.dumps(document))
        return CortexTrainingHook(
            connection("ct", host=host, password="", database=None, schema="", snowflake_conn_id="snow")
        )

    return define


LOGINS = {
    "pat": ({"password": "the-pat-itself", "authenticator": "programmatic_access_token"}, "PROGRAMMATIC_ACCESS_TOKEN"),
    "oauth token": ({"authenticator": "oauth", "token": "static-oauth-token"}, "OAUTH"),
    "oauth refresh": ({"password": "client-secret", "refresh_token": "refresh-token-value"}, "OAUTH"),
    "oauth client": (
        {"password": "client-secret", "authenticator": "oauth", "grant_type": "client_credentials"},
        "OAUTH",
    ),
    "key": ({"private_key_content": pem()}, "KEYPAIR_JWT"),
    "encrypted key": ({"private_key_content": pem("passphrase!"), "password": "passphrase!"}, "KEYPAIR_JWT"),
    "base64 key": ({"private_key_content": base64.b64encode(pem().encode()).decode()}, "KEYPAIR_JWT"),
    "long names": (
        {"password": "the-pat-itself", "authenticator": "programmatic_access_token", "extra__snowflake__role": "R"},
        "PROGRAMMATIC_ACCESS_TOKEN",
    ),
}


@pytest.mark.parametrize("kind", LOGINS)
def test_both_clients_send_the_login(account, snowflake, kind: str, caplog, capfd) -> None:
    caplog.set_level(logging.DEBUG)
    fields, token_type = LOGINS[kind]
    endpoint = {"token_endpoint": f"{account.url}/oauth/token-request"} if "oauth" in kind else {}
    hook = snowflake(account.url, **fields, **endpoint)
    with hook.get_conn() as client:
        client.list_jobs()

    async def ask() -> None:
        async with await hook.get_async_client() as client:
            await client.list_jobs()
        async with open_hub(Target("ct")) as hub:
            await hub.job("j")

    asyncio.run(ask())
    assert {seen[1] for seen in account.seen} == {token_type}
    assert all(token for token, _ in account.seen)
    shown = repr(hook.settings()) + caplog.text + "".join(capfd.readouterr()) + repr(hook.get_conn())
    for secret in (*(str(value) for name, value in fields.items() if name != "authenticator"), *_tokens(account)):
        if len(secret) > 8 and secret != "client_credentials":
            assert secret not in shown


def _tokens(account: Account) -> set[str]:
    return {token for token, _ in account.seen}


def test_an_expired_oauth_token_is_replaced(account, snowflake) -> None:
    account.accepts = "access-token-2"
    hook = snowflake(
        account.url, password="client-secret", refresh_token="refresh-token-value", token_endpoint=f"{account.url}/t"
    )
    with hook.get_conn() as client:
        assert client.list_jobs() == []
    assert [token for token, _ in account.seen] == ["access-token-1", "access-token-2"]
    assert account.forms[0]["refresh_token"] == ["refresh-token-value"]
    assert account.basic[0] == "Basic " + base64.b64encode(b"ANNA:client-secret").decode()


def test_what_the_connection_leaves_open_comes_from_snowflake(snowflake) -> None:
    hook = snowflake(password="the-pat-itself", authenticator="programmatic_access_token", region="eu-central-1")
    settings = hook.settings()
    assert (settings.base_url, settings.database, settings.schema) == (
        "https://org-acc.eu-central-1.snowflakecomputing.com",
        "SNOW_DB",
        "FROM_SNOWFLAKE",
    )
    assert asyncio.run(hook.asettings()) == settings


def test_account_names_with_underscores_make_host_names(snowflake) -> None:
    hook = snowflake(password="the-pat-itself", authenticator="programmatic_access_token", account="my_org-my_acc")
    assert hook.settings().base_url == "https://my-org-my-acc.snowflakecomputing.com"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"password": "a-plain-password"}, "authenticator.*programmatic access token, OAuth or a key pair"),
        ({"authenticator": "externalbrowser"}, "authenticator"),
        ({"authenticator": "programmatic_access_token"}, "password is empty"),
        ({"authenticator": "oauth"}, "refresh_token is empty"),
        ({"authenticator": "oauth", "azure_conn_id": "az"}, "azure_conn_id"),
        ({"authenticator": "oauth", "grant_type": "password"}, "grant_type"),
        ({"private_key_file": "/does/not/exist.pem"}, "private_key_file"),
        ({"private_key_content": "?not a key?"}, "private_key_content"),
        ({"private_key_content": pem(), "private_key_file": "/x"}, "leave one out"),
        ({"private_key_content": pem(), "login": ""}, "login is empty"),
        ({"authenticator": "programmatic_access_token", "password": "p" * 9, "account": "a/../b"}, "account"),
        ({"authenticator": "programmatic_access_token", "password": "p" * 9, "port": "x"}, "port"),
    ],
)
def test_what_cannot_be_reused_is_named(snowflake, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'snow'.*{named}") as refusal:
        snowflake("", **fields).settings()
    for secret in ("a-plain-password", "?not a key?", "BEGIN PRIVATE"):
        assert secret not in str(refusal.value)


def test_a_token_beside_a_login_is_refused(monkeypatch, connection, snowflake) -> None:
    snowflake(password="the-pat-itself", authenticator="programmatic_access_token")
    with pytest.raises(ConfigurationError, match="leave one of the two out"):
        CortexTrainingHook(connection("ct", snowflake_conn_id="snow")).settings()


def test_another_kind_of_connection_is_refused(connection) -> None:
    connection("other")
    with pytest.raises(ConfigurationError, match=r"'other'.*type snowflake"):
        CortexTrainingHook(connection("ct", password="", snowflake_conn_id="other")).settings()
    with pytest.raises(ConfigurationError, match="'gone' does not exist"):
        CortexTrainingHook(connection("ct", password="", snowflake_conn_id="gone")).settings()


@pytest.mark.parametrize(("status", "kind"), [(400, ConfigurationError), (503, TransportError)])
def test_a_token_endpoint_that_refuses_is_told_from_one_that_is_down(account, snowflake, status: int, kind) -> None:
    account.endpoint_status = status
    hook = snowflake(
        account.url, password="client-secret", refresh_token="refresh-token-value", token_endpoint=f"{account.url}/t"
    )
    with pytest.raises(kind, match="token endpoint") as refusal:
        hook.get_conn()
    assert "client-secret" not in str(refusal.value)
    assert "refresh-token-value" not in str(refusal.value)
    ok, why = hook.test_connection()
    assert not ok
    assert "client-secret" not in why


async def test_a_token_endpoint_that_is_down_does_not_end_a_wait(account, snowflake, monkeypatch) -> None:
    monkeypatch.setattr(hub_module, "LINGER_S", 0.0)
    snowflake(
        account.url, password="client-secret", refresh_token="refresh-token-value", token_endpoint=f"{account.url}/t"
    )
    account.endpoint_status = 503
    async with open_hub(Target("ct")) as hub:
        with pytest.raises(TransportError):
            await hub.job("j")
        account.endpoint_status = 200
        await hub.job("j")


def test_secrets_are_given_to_airflows_masker(snowflake, monkeypatch) -> None:
    masked: list[str] = []
    monkeypatch.setattr("airflow_cortex_training.hooks.cortex_training.mask_secret", masked.append)
    snowflake(password="passphrase!", private_key_content=pem("passphrase!"), refresh_token="").settings()
    assert "passphrase!" in masked
    assert any("BEGIN ENCRYPTED" in secret for secret in masked)
