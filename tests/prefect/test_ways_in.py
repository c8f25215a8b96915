"""The three ways in that a credentials block can hold: a token, a connection profile, a Snowflake Credentials block."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from prefect_snowflake import SnowflakeCredentials
from pydantic import SecretStr, ValidationError

from cortex_training.auth import SnowflakeProfileError
from cortex_training.errors import ConfigurationError
from demo.prefect_server import PrefectServer
from prefect_cortex_training import CortexTrainingCredentials
from prefect_cortex_training.credentials import connected, parts_of_host
from tests.conftest import RunningService, start_service
from tests.local.connector import connection_arguments

SECRET = "a-password-that-must-never-be-seen"


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A local service that the Snowflake connector logs in to. Its sessions live a second, so they are renewed here."""
    service = start_service(tmp_path_factory.mktemp("account"), snowflake=True, session_seconds=1.0)
    yield service
    service.stop()


@pytest.fixture
def snowflake_block(on_server: PrefectServer) -> str:
    SnowflakeCredentials(account="local", user="ann", password=SecretStr(SECRET)).save("an-account", overwrite=True)
    return "an-account"


async def test_a_snowflake_credentials_block_opens_both_clients_and_renews_its_session(
    account: RunningService, snowflake_block: str
) -> None:
    block = CortexTrainingCredentials(
        host=account.base_url, database=account.database, schema_="PUBLIC", snowflake_credentials=snowflake_block
    )
    await block.asave("through-snowflake", overwrite=True)
    with block.get_client() as client:
        assert client.list_jobs() == []
        shown = repr(client)
    async with connected("through-snowflake") as client_of_a_task:
        assert await client_of_a_task.list_jobs() == []
        await asyncio.sleep(1.2)
        assert await client_of_a_task.list_jobs() == []
        shown += repr(client_of_a_task)
    assert "an-account" in shown
    assert SECRET not in shown + block.model_dump_json()


def test_a_connection_profile_opens_a_client(
    account: RunningService, monkeypatch: pytest.MonkeyPatch, on_server: PrefectServer
) -> None:
    import snowflake.connector

    real, named = snowflake.connector.connect, []

    def connect(connection_name: str) -> Any:
        named.append(connection_name)
        return real(**connection_arguments(account))

    monkeypatch.setattr(snowflake.connector, "connect", connect)
    CortexTrainingCredentials(connection_name="training").save("through-a-profile", overwrite=True)
    block = CortexTrainingCredentials.load("through-a-profile")
    with block.get_client() as client:
        assert client.list_jobs() == []
        assert (client.base_url, client.database, client.schema) == (account.base_url, account.database, "PUBLIC")
    assert named == ["training"]


async def test_an_account_that_refuses_is_told_without_its_password(
    account: RunningService, on_server: PrefectServer
) -> None:
    await SnowflakeCredentials(account="local", user="ann", password=SecretStr(SECRET)).asave("refused", overwrite=True)
    block = CortexTrainingCredentials(host=account.base_url, database="DB", snowflake_credentials="refused")

    def refuse(self: Any, **options: Any) -> Any:
        raise RuntimeError("250001: Incorrect username or password was specified.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnowflakeCredentials, "get_client", refuse)
        with pytest.raises(SnowflakeProfileError, match="the Snowflake Credentials block 'refused'") as caught:
            await block.aget_client()
    assert "Incorrect username or password" in str(caught.value)
    assert SECRET not in str(caught.value)


async def test_an_unknown_snowflake_block_is_named_with_the_fix(on_server: PrefectServer) -> None:
    block = CortexTrainingCredentials(host="h", database="DB", snowflake_credentials="nobody-saved-this")
    with pytest.raises(ConfigurationError, match="nobody-saved-this") as caught:
        await block.aget_client()
    assert "prefect block register -m prefect_snowflake" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "h", "database": "DB"}, "got none"),
        ({"host": "h", "database": "DB", "pat": "p", "connection_name": "c"}, "got pat and connection_name"),
        ({"database": "DB", "pat": "p"}, "pat needs host"),
        ({"host": "h", "pat": "p"}, "pat needs database"),
        ({"host": "h", "snowflake_credentials": "b"}, "snowflake_credentials needs database"),
    ],
)
def test_a_block_holds_one_way_in(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CortexTrainingCredentials(**given)


@pytest.mark.parametrize(
    ("host", "parts"),
    [
        ("org-acct.snowflakecomputing.com", {"host": "org-acct.snowflakecomputing.com"}),
        ("http://127.0.0.1:8080", {"protocol": "http", "host": "127.0.0.1", "port": 8080}),
        ("https://org.example", {"protocol": "https", "host": "org.example"}),
    ],
)
def test_a_host_is_what_the_connector_wants(host: str, parts: dict[str, Any]) -> None:
    assert parts_of_host(host) == parts
