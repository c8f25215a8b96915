"""Which service a command talks to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from cortex_training.cli import build_parser
from cortex_training.cli.connection import Connection, login_path, read_config, resolve
from cortex_training.cli.failures import NoConnection
from cortex_training.errors import ConfigurationError

DIRECT = {"CORTEX_TRAINING_HOST": "env-host", "CORTEX_TRAINING_PAT": "env-pat", "CORTEX_TRAINING_DATABASE": "ENV"}


def options(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args([*flags, "get", "j"])


@pytest.fixture
def nothing(tmp_path: Path) -> dict[str, str]:
    """An environment of nothing: no login, no profiles."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "SNOWFLAKE_HOME": str(tmp_path / "snowflake")}


@pytest.fixture(autouse=True)
def no_profiles_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def config_file(folder: Path, content: Any, name: str = "connection.json") -> str:
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


def remember(environment: dict[str, str], content: Any) -> None:
    path = login_path(environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_flags_alone(nothing: dict[str, str]) -> None:
    found = resolve(options("--base-url", "http://h:1", "--database", "DB"), nothing)
    assert found == Connection({"base_url": "http://h:1", "database": "DB"})
    found = resolve(
        options("--host", "h", "--pat", "t", "--database", "DB", "--schema", "S", "--no-verify-ssl"), nothing
    )
    assert found == Connection({"host": "h", "pat": "t", "database": "DB", "schema": "S", "verify_ssl": False})


def test_the_environment_alone_and_its_snowflake_names(nothing: dict[str, str]) -> None:
    assert resolve(options(), {**nothing, **DIRECT}).fields == {"host": "env-host", "pat": "env-pat", "database": "ENV"}
    names = {"SNOWFLAKE_HOST": "sh", "SNOWFLAKE_PAT": "sp", "SNOWFLAKE_DATABASE": "SD", "SNOWFLAKE_SCHEMA": "SS"}
    found = resolve(options(), {**nothing, **names}).fields
    assert found == {"host": "sh", "pat": "sp", "database": "SD", "schema": "SS"}
    both = resolve(options(), {**nothing, **names, "CORTEX_TRAINING_HOST": "ch"}).fields
    assert both["host"] == "ch"


def test_each_field_comes_from_flag_then_file_then_environment(nothing: dict[str, str], tmp_path: Path) -> None:
    config = config_file(tmp_path, {"host": "file-host", "pat": "file-pat", "database": "FILE", "poll_timeout": 5})
    environment = {**nothing, **DIRECT, "CORTEX_TRAINING_SCHEMA": "ENVS"}
    found = resolve(options("--config", config, "--database", "FLAG"), environment).fields
    assert found == {"host": "file-host", "pat": "file-pat", "database": "FLAG", "schema": "ENVS", "poll_timeout": 5}


def test_a_token_of_the_environment_never_goes_to_an_address_from_elsewhere(nothing: dict[str, str]) -> None:
    found = resolve(options("--base-url", "http://h:1"), {**nothing, **DIRECT}).fields
    assert "pat" not in found
    assert found == {"base_url": "http://h:1", "database": "ENV"}
    both = {**nothing, **DIRECT, "CORTEX_TRAINING_BASE_URL": "http://h:2"}
    assert "pat" not in resolve(options(), both).fields


def test_the_file_of_the_environment_is_used_without_direct_flags(nothing: dict[str, str], tmp_path: Path) -> None:
    config = config_file(tmp_path, {"connection": {"url": "http://f:1", "db": "FILE"}})
    environment = {**nothing, "CORTEX_TRAINING_CONFIG": config}
    assert resolve(options(), environment).fields == {"base_url": "http://f:1", "database": "FILE"}
    assert (
        resolve(options("--base-url", "http://h:1", "--database", "D"), environment).fields["base_url"] == "http://h:1"
    )


def test_the_remembered_login_is_used_when_nothing_else_is_complete(nothing: dict[str, str], tmp_path: Path) -> None:
    config = config_file(tmp_path, {"host": "h", "pat": "p", "database": "LOGIN"})
    remember(nothing, {"config_path": config})
    assert resolve(options(), nothing).fields["database"] == "LOGIN"
    assert resolve(options(), {**nothing, **DIRECT}).fields["host"] == "env-host"
    incomplete = {"CORTEX_TRAINING_HOST": "env-host", "CORTEX_TRAINING_PAT": "env-pat"}
    assert resolve(options(), {**nothing, **incomplete}).fields["host"] == "h"


def test_a_damaged_or_vanished_login_is_ignored(nothing: dict[str, str], tmp_path: Path) -> None:
    for content in ("{broken", "[]", {"config_path": str(tmp_path / "gone.json")}, {"config_path": 5}):
        remember(nothing, content)
        with pytest.raises(NoConnection):
            resolve(options(), nothing)


def test_a_profile_by_flag_environment_or_login(nothing: dict[str, str]) -> None:
    assert resolve(options("-c", "p", "--database", "DB"), nothing) == Connection({"database": "DB"}, profile="p")
    assert resolve(options(), {**nothing, "CORTEX_TRAINING_CONNECTION": "e"}).profile == "e"
    remember(nothing, {"connection": "remembered"})
    assert resolve(options(), nothing).profile == "remembered"


@pytest.mark.parametrize("flag", [["--host", "h"], ["--base-url", "http://h"], ["--pat", "t"], ["--config", "f"]])
def test_a_profile_excludes_another_address(nothing: dict[str, str], flag: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=flag[0]):
        resolve(options("--connection", "p", *flag), nothing)


def test_the_default_profile_is_the_last_resort(nothing: dict[str, str]) -> None:
    folder = Path(nothing["SNOWFLAKE_HOME"])
    folder.mkdir()
    (folder / "connections.toml").write_text("[default]\n")
    found = resolve(options("--database", "DB"), nothing)
    assert found.is_default_profile
    assert found.fields == {"database": "DB"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no connection"),
        (["--host", "h", "--database", "D"], "needs a token"),
        (["--host", "h", "--pat", "t"], "no database"),
        (["--base-url", "h", "--database", "D"], "no scheme"),
    ],
)
def test_what_is_missing_is_said_with_exit_code_2(run: Any, flags: list[str], message: str) -> None:
    done = run(*flags, "get", "j")
    assert done.code == 2
    assert message in done.err


def test_a_bare_host_as_base_url_with_a_token_is_a_host(nothing: dict[str, str]) -> None:
    found = resolve(options("--base-url", "acct.snowflakecomputing.com", "--pat", "t", "--database", "D"), nothing)
    assert found.fields == {"host": "acct.snowflakecomputing.com", "pat": "t", "database": "D"}
    assert found.client().base_url == "https://acct.snowflakecomputing.com"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"hots": "h"}, "unknown key 'hots'"),
        ({"host": 5}, "host must be text"),
        ({"poll_timeout": True}, "poll_timeout must be a number"),
        ({"no_verify_ssl": "yes"}, "no_verify_ssl must be true or false"),
        ({"connection": 5}, "'connection'"),
        ({"connection": {}, "host": "h"}, "'connection'"),
    ],
)
def test_a_wrong_configuration_file_is_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_config(config_file(tmp_path, content))


def test_no_verify_ssl_wins_over_verify_ssl(nothing: dict[str, str], tmp_path: Path) -> None:
    content = {"base_url": "http://h", "database": "D", "verify_ssl": True, "no_verify_ssl": True}
    found = resolve(options("--config", config_file(tmp_path, content)), nothing)
    assert found.fields["verify_ssl"] is False


def test_the_token_is_not_in_an_error(run: Any) -> None:
    done = run(
        "--host", "127.0.0.1:9", "--pat", "secret-token-value", "--database", "D", "--proxy", "nonsense", "get", "j"
    )
    assert done.code == 1
    assert "secret-token-value" not in done.err


def test_the_client_is_made_as_configured(nothing: dict[str, str]) -> None:
    flags = ["--host", "http://127.0.0.1:9", "--pat", "t", "--database", "D", "--poll-timeout", "7", "--endpoint", "e"]
    client = resolve(options(*flags), nothing).client()
    assert (client.base_url, client.schema, client.endpoint) == ("http://127.0.0.1:9", "PUBLIC", "e")
    asynchronous = resolve(options(*flags), nothing).async_client()
    assert asynchronous.base_url == client.base_url
