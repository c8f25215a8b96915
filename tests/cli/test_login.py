"""`login` as a person and as a script use it: nothing is remembered that the service did not accept."""

from __future__ import annotations

import io
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cortex_training.cli import profiles
from cortex_training.cli.login import account_address
from cortex_training.errors import ConfigurationError

TOKEN = "a-token-that-must-stay-unseen"
OTHERS = """\
# My profiles.
[work]  # the main one
account = "org-work"
password = "hunter2"

# Kept for later.
[home]
account = "org-home"
"""


@pytest.fixture
def account(service: Any, environment: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A service that takes the token, and nothing else that says how to connect."""
    environment.delenv("CORTEX_TRAINING_BASE_URL")
    environment.delenv("CORTEX_TRAINING_DATABASE")
    (tmp_path / ".snowflake").mkdir()
    service.answers["GET", "/capacity"] = {"max_total_gpus": 8}
    service.answers["GET", "/job-1"] = {"status": "running"}
    return service


def scripted(environment: pytest.MonkeyPatch, run: Any, *flags: str, text: str = f"{TOKEN}\n") -> Any:
    environment.setattr(sys, "stdin", io.StringIO(text))
    return run("login", "--pat-stdin", *flags)


def state_of(folder: Path) -> Any:
    path = folder / "config" / "cortex-training" / "login.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_a_script_gives_the_token_on_standard_input(
    account: Any, environment: pytest.MonkeyPatch, run: Any, tmp_path: Path
) -> None:
    where = tmp_path / ".snowflake" / "connections.toml"
    where.write_text(OTHERS)
    done = scripted(environment, run, "--host", account.url, "--user", "ada", "--database", "DB")
    assert done.code == 0, done.err
    assert done.document == {
        "logged_in": True,
        "connection": "cortex-training",
        "connections_file": str(where),
        "host": "127.0.0.1",
        "profile_created": True,
        "source": "stdin",
        "verified": True,
    }
    assert TOKEN not in done.out + done.err
    assert account.calls[0].headers["Authorization"] == f"Bearer {TOKEN}"
    assert where.read_text().startswith(OTHERS)
    written = tomllib.loads(where.read_text())["cortex-training"]
    assert written == {
        "account": "127.0.0.1",
        "host": "127.0.0.1",
        "port": int(account.url.rsplit(":", 1)[1]),
        "protocol": "http",
        "user": "ada",
        "authenticator": "programmatic_access_token",
        "token": TOKEN,
        "database": "DB",
        "schema": "PUBLIC",
    }
    assert where.stat().st_mode & 0o777 == 0o600
    assert state_of(tmp_path) == {"connection": "cortex-training"}
    assert (tmp_path / "config" / "cortex-training" / "login.json").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in where.parent.iterdir()) == ["connections.toml"]


def test_a_profile_with_a_token_works_without_the_connector(
    account: Any, environment: pytest.MonkeyPatch, run: Any
) -> None:
    scripted(environment, run, "--host", account.url, "--user", "ada", "--database", "DB", "--schema", "S")
    environment.setattr(profiles, "connector_is_installed", lambda: False)
    assert run("get", "job-1").document == {"status": "running"}
    assert run("--connection", "cortex-training", "--database", "OTHER", "get", "job-1").code == 0
    assert [call.headers["Authorization"] for call in account.calls[1:]] == [f"Bearer {TOKEN}"] * 2


def test_a_refused_token_changes_nothing(
    account: Any, environment: pytest.MonkeyPatch, run: Any, tmp_path: Path
) -> None:
    account.answers["GET", "/capacity"] = (401, {"code": "390303", "message": f"invalid {TOKEN}"})
    done = scripted(environment, run, "--host", account.url, "--user", "ada", "--database", "DB")
    assert done.code == 1
    assert "network policy" in done.err
    assert TOKEN not in done.out + done.err
    assert state_of(tmp_path) is None
    assert list((tmp_path / ".snowflake").iterdir()) == []


def test_an_existing_profile_is_replaced_only_when_told(
    account: Any, environment: pytest.MonkeyPatch, run: Any, tmp_path: Path
) -> None:
    where = tmp_path / ".snowflake" / "connections.toml"
    where.write_text(OTHERS)
    flags = ("--host", account.url, "--user", "ada", "--database", "DB", "--connection", "work")
    done = scripted(environment, run, *flags)
    assert (done.code, where.read_text()) == (1, OTHERS)
    assert "--force" in done.err
    assert "hunter2" not in done.err
    done = scripted(environment, run, *flags, "--force")
    assert done.document["profile_created"] is False
    text = where.read_text()
    assert text.startswith("# My profiles.\n[work]\n")
    assert text.endswith('\n\n# Kept for later.\n[home]\naccount = "org-home"\n')
    assert tomllib.loads(text)["work"]["user"] == "ada"
    assert "hunter2" not in text


@pytest.mark.parametrize("flags", [(), ("--host", "h"), ("--host", "h", "--user", "u")])
def test_a_script_is_told_what_is_missing(
    account: Any, environment: pytest.MonkeyPatch, run: Any, flags: tuple[str, ...]
) -> None:
    done = scripted(environment, run, *flags)
    assert done.code == 1
    assert "--database" in done.err
    assert account.calls == []


@pytest.mark.parametrize("text", ["", "\n", "two words\n", "tokén\n"])
def test_what_is_no_token_is_refused_unseen(account: Any, environment: pytest.MonkeyPatch, run: Any, text: str) -> None:
    done = scripted(environment, run, "--host", account.url, "--user", "u", "--database", "D", text=text)
    assert done.code == 1
    assert "pat" in done.err
    assert not text.strip() or text.strip() not in done.err


def test_what_was_remembered_can_be_forgotten(
    account: Any, environment: pytest.MonkeyPatch, run: Any, tmp_path: Path
) -> None:
    scripted(environment, run, "--host", account.url, "--user", "ada", "--database", "DB")
    assert run("login", "--reset").document == {"logged_in": False}
    assert state_of(tmp_path) is None
    assert (tmp_path / ".snowflake" / "connections.toml").exists()
    assert run("login", "--reset").code == 0


def test_the_file_may_be_given_behind_the_command(account: Any, run: Any, tmp_path: Path) -> None:
    config = tmp_path / "connection.json"
    config.write_text(json.dumps({"base_url": account.url, "database": "DB"}))
    assert run("login", "--config", str(config), "--check").document["config_path"] == str(config)
    assert run("login", str(config), "--user", "ada").code == 1


@pytest.mark.parametrize(
    ("typed", "host"),
    [
        ("myorg-acct", "myorg-acct.snowflakecomputing.com"),
        ("MyOrg-My_Acct", "myorg-my-acct.snowflakecomputing.com"),
        ("https://myorg-acct.snowflakecomputing.com/", "myorg-acct.snowflakecomputing.com"),
        ("https://app.snowflake.com/myorg/acct/#/homepage", "myorg-acct.snowflakecomputing.com"),
        ("xy12345.eu-west-1", "xy12345.eu-west-1.snowflakecomputing.com"),
        ("xy12345.us-east-2.aws", "xy12345.us-east-2.aws.snowflakecomputing.com"),
        ("acct.privatelink.snowflakecomputing.com", "acct.privatelink.snowflakecomputing.com"),
        ("snowflake.example.com", "snowflake.example.com"),
        ("http://127.0.0.1:8484", "http://127.0.0.1:8484"),
    ],
)
def test_an_account_is_recognised(typed: str, host: str) -> None:
    assert account_address(typed) == host


@pytest.mark.parametrize("typed", ["", "a b", "https://app.snowflake.com/", "h/path", "user:secret@h", "h?x=1"])
def test_what_names_no_account_is_refused(typed: str) -> None:
    with pytest.raises(ConfigurationError, match="host"):
        account_address(typed)


@pytest.mark.parametrize("name", ["a b", "a.b", '"', "]", ""])
def test_a_profile_name_is_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="connection"):
        profiles.write_profile(tmp_path / "connections.toml", name, {"user": "u"})


def test_a_file_that_cannot_be_added_to_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "connections.toml"
    for text in ('work.user = "u"\n', 'x = """\n[work]\n"""\n[work]\nuser = "u"\n', "[work\n"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="by hand"):
            profiles.write_profile(path, "work", {"user": "other"})
        assert path.read_text() == text


def test_a_person_is_asked_and_the_token_is_not_shown(account: Any, at_terminal: Any, tmp_path: Path) -> None:
    terminal = at_terminal("login")
    terminal.answer("Account host or identifier: ", account.url)
    terminal.answer("User: ", "ada")
    terminal.answer("access token (not shown): ", TOKEN)
    terminal.answer("Database: ", "DB")
    terminal.answer("Schema [PUBLIC]: ", "")
    code, out = terminal.end()
    assert code == 0, terminal.said
    assert json.loads(out)["source"] == "prompts"
    assert TOKEN not in out + terminal.said
    profile = tomllib.loads((tmp_path / ".snowflake" / "connections.toml").read_text())["cortex-training"]
    assert (profile["token"], profile["schema"]) == (TOKEN, "PUBLIC")

    terminal = at_terminal("login")
    terminal.answer("exists (host 127.0.0.1, user ada, database DB, schema PUBLIC). Replace it? [y/N] ", "")
    code, out = terminal.end()
    assert (code, json.loads(out)["profile_created"]) == (0, False)

    terminal = at_terminal("login", "--force", "--host", account.url)
    terminal.answer("User [ada]: ", "")
    terminal.answer("(not shown): ", "another")
    terminal.answer("Database [DB]: ", "")
    terminal.answer("Schema [PUBLIC]: ", "S")
    assert terminal.end()[0] == 0
    profile = tomllib.loads((tmp_path / ".snowflake" / "connections.toml").read_text())["cortex-training"]
    assert (profile["user"], profile["token"], profile["schema"]) == ("ada", "another", "S")
