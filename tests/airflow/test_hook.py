"""Connections: what is accepted, what is refused and how the refusal reads, and that the token stays where it is."""

from __future__ import annotations

import asyncio
import json

import pytest

from airflow_cortex_training.connection import ConnectionSettings, Target
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from cortex_training.errors import ConfigurationError

PAT = "pat-0123456789-very-secret"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("acme.snowflakecomputing.com", "https://acme.snowflakecomputing.com"),
        ("https://acme.example:8443", "https://acme.example:8443"),
        ("https://acme.example/", "https://acme.example"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
    ],
)
def test_host_may_be_a_name_or_a_url(connection, host: str, expected: str) -> None:
    assert CortexTrainingHook(connection(host=host)).settings().base_url == expected


def test_a_port_of_its_own_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "AIRFLOW_CONN_CT", '{"conn_type":"cortex_training","host":"h","port":9,"schema":"S","password":"token-token"}'
    )
    assert CortexTrainingHook("ct", database="D").settings().base_url == "https://h:9"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"host": ""}, "host"),
        ({"host": "ftp://acme.example"}, "host"),
        ({"host": "https://acme.example/api/v2"}, "host"),
        ({"database": None}, "database"),
        ({"schema": ""}, "schema"),
        ({"password": ""}, "password"),
        ({"verify": "perhaps"}, "verify"),
        ({"ca_bundle": 7}, "ca_bundle"),
    ],
)
def test_a_bad_field_is_named_with_its_connection(connection, fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'ct'.*{named}"):
        CortexTrainingHook(connection("ct", **fields)).settings()


def test_an_unknown_connection_is_named_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"'nowhere' does not exist.*AIRFLOW_CONN_NOWHERE"):
        CortexTrainingHook("nowhere").settings()


@pytest.mark.parametrize("conn_type", ["http", "aws", "snowflake", "", None])
def test_a_connection_of_another_type_is_named_with_the_fix(monkeypatch, conn_type: str | None) -> None:
    document = {"conn_type": conn_type, "host": "acme.example", "login": "user", "password": PAT, "schema": "PUBLIC"}
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", json.dumps({**document, "extra": {"database": "TRAINING"}}))
    hook = CortexTrainingHook("other")
    for read in (hook.settings, lambda: asyncio.run(hook.asettings())):
        with pytest.raises(ConfigurationError) as refusal:
            read()
        message = str(refusal.value)
        assert f"connection 'other': type = {conn_type or None!r}" in message
        assert "'cortex_training'" in message
        assert ("snowflake_conn_id" in message) == (conn_type == "snowflake")
        assert PAT not in message
    told, why = hook.test_connection()
    assert not told
    assert "cortex_training" in why


def test_a_connection_may_be_a_uri(monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_CT", f"cortex-training://:{PAT}@acme.example/PUBLIC?database=TRAINING")
    assert CortexTrainingHook("ct").settings().base_url == "https://acme.example"


@pytest.mark.parametrize(
    "host",
    [
        "https://user:hunter2@acme.example",
        "ftp://user:hunter2@acme.example",
        "https://acme.example?token=hunter2",
        "https://acme.example/#hunter2",
        "https://acme.example:hunter2",
    ],
)
def test_a_host_with_a_secret_in_it_is_refused_without_showing_it(connection, host: str) -> None:
    with pytest.raises(ConfigurationError, match="host") as refusal:
        CortexTrainingHook(connection(host=host)).settings()
    assert "hunter2" not in str(refusal.value)


async def test_both_ways_of_reading_agree(connection) -> None:
    hook = CortexTrainingHook(connection(hardware="B200", verify=False, proxy="http://proxy.example:3128"), schema="S")
    assert await hook.asettings() == hook.settings()
    assert hook.settings().schema == "S"
    assert hook.settings().hardware == "B200"
    assert hook.settings().verify is False


def test_the_token_is_in_no_representation(connection) -> None:
    settings = CortexTrainingHook(connection(proxy="http://u:swordfish@proxy.example:3128")).settings()
    assert settings.pat == PAT
    assert PAT not in repr(settings)
    assert "swordfish" not in repr(settings)
    assert PAT not in "".join(settings.endpoint_key[:5])


def test_a_target_survives_trigger_kwargs() -> None:
    target = Target("ct", database="D")
    assert target.to_kwargs() == {"conn_id": "ct", "database": "D"}
    assert Target(**target.to_kwargs()) == target


def test_endpoint_key_differs_where_sessions_must() -> None:
    def settings(**fields: object) -> ConnectionSettings:
        return ConnectionSettings(**{"conn_id": "a", "base_url": "b", "database": "d", "schema": "s", **fields})

    assert settings().endpoint_key == settings(pat="other").endpoint_key
    for field in ({"schema": "t"}, {"verify": False}, {"base_url": "c"}, {"endpoint": "e"}, {"database": "f"}):
        assert settings().endpoint_key != settings(**field).endpoint_key


def test_the_forms_button_asks_the_service(service_connection, connection, monkeypatch) -> None:
    assert CortexTrainingHook(service_connection).test_connection()[0]
    ok, why = CortexTrainingHook(connection("closed", host="http://127.0.0.1:9")).test_connection()
    assert not ok
    assert PAT not in why
    assert CortexTrainingHook("nowhere").test_connection() == (False, str(_refusal("nowhere")))


def test_the_forms_button_does_not_name_the_connection_airflow_made_up_for_it(connection) -> None:
    # Airflow tests under a random id, which nobody could find in the list or in a variable.
    ok, why = CortexTrainingHook(connection("lwrdgl6s", password="")).test_connection()
    assert not ok
    assert why.startswith("password is empty: give a programmatic access token")
    assert "lwrdgl6s" not in why.lower()


def _refusal(conn_id: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as refusal:
        CortexTrainingHook(conn_id).settings()
    return refusal.value


async def test_an_async_client_comes_from_the_same_place(service_connection) -> None:
    async with await CortexTrainingHook(service_connection).get_async_client() as client:
        assert isinstance(await client.list_jobs(), list)
