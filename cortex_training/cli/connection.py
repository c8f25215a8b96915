"""Which service a command talks to: flags, a configuration file, the environment, the file that `login` remembered.

Each field comes from the first of these that has it. The *source* of the connection is one of them, though: an address
from one place is never combined with a token from another.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex_training.cli import profiles
from cortex_training.cli.documents import read_object
from cortex_training.cli.failures import NoConnection
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.client import CortexTrainingClient

_ALIASES = {"url": "base_url", "db": "database"}
_TEXT = ("base_url", "host", "pat", "database", "schema", "endpoint", "ca_bundle", "proxy")
_NUMBERS = ("poll_interval", "poll_timeout")
_FLAGS = ("no_verify_ssl", "verify_ssl")
_SWITCHES = (*_FLAGS, "create_database")
_ADDRESS = ("base_url", "host", "pat")
_ENVIRONMENT = {
    "base_url": ("CORTEX_TRAINING_BASE_URL",),
    "host": ("CORTEX_TRAINING_HOST", "SNOWFLAKE_HOST"),
    "pat": ("CORTEX_TRAINING_PAT", "SNOWFLAKE_PAT"),
    "database": ("CORTEX_TRAINING_DATABASE", "SNOWFLAKE_DATABASE"),
    "schema": ("CORTEX_TRAINING_SCHEMA", "SNOWFLAKE_SCHEMA"),
    "endpoint": ("CORTEX_TRAINING_ENDPOINT",),
}


def add_global_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that every command shares; they stand before the command."""
    where = parser.add_argument_group("connection")
    where.add_argument("--config", metavar="FILE", help="JSON file with the fields of a connection")
    where.add_argument("--connection", "-c", metavar="NAME", help="Snowflake connection profile")
    where.add_argument("--base-url", metavar="URL", help="address of a service that asks for no token")
    where.add_argument("--host", metavar="HOST", help="account host, or URL with scheme and port")
    where.add_argument("--pat", metavar="TOKEN", help="programmatic access token (better: CORTEX_TRAINING_PAT)")
    where.add_argument("--database", metavar="NAME")
    where.add_argument("--schema", metavar="NAME", help="default: PUBLIC")
    where.add_argument("--endpoint", metavar="NAME", help="default: cortex-training")
    where.add_argument("--no-verify-ssl", action="store_true", default=None, help="do not verify TLS certificates")
    where.add_argument("--ca-bundle", metavar="FILE", help="certificate authorities to verify with")
    where.add_argument("--proxy", metavar="URL", help="proxy; default: from the environment")
    where.add_argument(
        "--create-database",
        action="store_true",
        default=None,
        help="create the database and schema if they are missing",
    )
    where.add_argument("--poll-interval", type=float, metavar="SECONDS", help="shortest time between two polls")
    where.add_argument("--poll-timeout", type=float, metavar="SECONDS", help="longest wait (default: 1800)")
    parser.add_argument("--compact", action="store_true", help="print JSON on one line")
    parser.add_argument("--job", "--job-id", dest="job", metavar="JOB_ID", help="the job a command is about")


@dataclass(frozen=True)
class Connection:
    """What a client is made of: a profile, or an address with or without a token."""

    fields: Mapping[str, Any] = field(repr=False)
    profile: str | None = None
    is_default_profile: bool = False

    def client(self) -> CortexTrainingClient:
        from cortex_training.client import CortexTrainingClient

        client: CortexTrainingClient = self.made_as(CortexTrainingClient)
        return client

    def async_client(self) -> AsyncCortexTrainingClient:
        from cortex_training.aio import AsyncCortexTrainingClient

        client: AsyncCortexTrainingClient = self.made_as(AsyncCortexTrainingClient)
        return client

    def made_as(self, kind: Any) -> Any:
        """A client of this kind."""
        fields = dict(self.fields)
        address = {name: fields.pop(name, None) for name in _ADDRESS}
        if self.profile is not None or self.is_default_profile:
            token = profiles.token_profile(self.profile, os.environ)
            if token is not None:
                return direct({**token, **fields}).made_as(kind)
            return kind.from_connection_name(self.profile, **fields)
        fields.setdefault("schema", "PUBLIC")
        if address["pat"] is not None:
            return kind.from_pat(address["base_url"] or address["host"], address["pat"], **fields)
        return kind(address["base_url"], **fields)


def connect(options: argparse.Namespace) -> CortexTrainingClient:
    """The client for a parsed command line. Raises `NoConnection` and `ConfigurationError`."""
    return resolve(options, os.environ).client()


def connect_async(options: argparse.Namespace) -> AsyncCortexTrainingClient:
    """As `connect`, for the async client."""
    return resolve(options, os.environ).async_client()


def resolve(options: argparse.Namespace, environment: Mapping[str, str]) -> Connection:
    """Choose the source of the connection and fill in what it leaves open."""
    flags = {name: getattr(options, name, None) for name in (*_TEXT, *_NUMBERS, "no_verify_ssl", "create_database")}
    flags = {name: value for name, value in flags.items() if value is not None}
    ambient = _from_environment(environment)
    login = _LoginState.read(environment)
    profile = getattr(options, "connection", None)
    if profile is not None:
        clash = [f"--{name.replace('_', '-')}" for name in ("base_url", "host", "pat") if name in flags]
        clash += ["--config"] if getattr(options, "config", None) else []
        if clash:
            raise ConfigurationError(f"--connection names a whole profile; leave out {', '.join(clash)}")
        return _profile(profile, flags, {})
    config_name = getattr(options, "config", None)
    if config_name:
        return _direct(flags, read_config(config_name), ambient)
    if "base_url" in flags or "host" in flags:
        return _direct(flags, {}, ambient)
    if environment.get("CORTEX_TRAINING_CONNECTION"):
        return _profile(environment["CORTEX_TRAINING_CONNECTION"], flags, ambient)
    if environment.get("CORTEX_TRAINING_CONFIG"):
        return _direct(flags, read_config(environment["CORTEX_TRAINING_CONFIG"]), ambient)
    has_address = "base_url" in ambient or ("host" in ambient and ("pat" in ambient or "pat" in flags))
    if has_address and ("database" in ambient or "database" in flags):
        return _direct(flags, {}, ambient)
    if login.config is not None:
        return _direct(flags, read_config(login.config), ambient)
    if login.connection is not None:
        return _profile(login.connection, flags, ambient)
    if has_address or "host" in ambient:
        return _direct(flags, {}, ambient)
    return _default_profile(flags, ambient, environment)


def direct(fields: Mapping[str, Any]) -> Connection:
    """A connection by these fields alone. Raises `NoConnection` where one is missing."""
    return _direct({}, fields, {})


def _profile(name: str, flags: Mapping[str, Any], ambient: Mapping[str, Any]) -> Connection:
    return Connection(_options_of({**_without_address(ambient), **_without_address(flags)}), profile=name)


def _default_profile(
    flags: Mapping[str, Any], ambient: Mapping[str, Any], environment: Mapping[str, str]
) -> Connection:
    if not _has_connections_file(environment):
        raise NoConnection(
            "no connection: give --base-url (no token), --host and --pat, --connection NAME, or --config FILE, or set "
            "CORTEX_TRAINING_BASE_URL, or CORTEX_TRAINING_HOST and CORTEX_TRAINING_PAT"
        )
    return Connection(_options_of({**_without_address(ambient), **_without_address(flags)}), is_default_profile=True)


def _has_connections_file(environment: Mapping[str, str]) -> bool:
    names = ("connections.toml", "config.toml")
    return any((folder / name).is_file() for folder in profiles.folders(environment) for name in names)


def _without_address(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _ADDRESS}


def _direct(flags: Mapping[str, Any], config: Mapping[str, Any], ambient: Mapping[str, Any]) -> Connection:
    """An address with its token. The environment adds an address only as a whole, never to somebody else's token."""
    fields = {**config, **flags}
    if "base_url" in flags:
        fields.pop("host", None)
    elif "host" in flags:
        fields.pop("base_url", None)
    rest = dict(ambient)
    if "base_url" in fields or ("base_url" in rest and "host" not in fields):
        rest.pop("host", None)
        rest.pop("pat", None)
    elif "host" in fields:
        rest.pop("base_url", None)
    fields = {**rest, **fields}
    base_url, host, pat = (fields.get(name) for name in _ADDRESS)
    if base_url is not None and host is None and "://" not in base_url:
        if pat is None:
            raise NoConnection(f"base_url {base_url!r} has no scheme: give http:// or https://, or a token")
        host = fields.pop("base_url")
        fields["host"] = host
        base_url = None
    if base_url is None and host is None:
        raise NoConnection("no address: give --base-url, or --host with a token")
    if base_url is None and pat is None:
        raise NoConnection(f"host {host!r} needs a token: set CORTEX_TRAINING_PAT, or give --pat")
    if not fields.get("database"):
        raise NoConnection("no database: give --database, or set CORTEX_TRAINING_DATABASE")
    return Connection(_options_of(fields))


def _options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments; `no_verify_ssl` wins over `verify_ssl`."""
    options = {name: value for name, value in fields.items() if name not in _FLAGS}
    if fields.get("no_verify_ssl") or fields.get("verify_ssl") is False:
        options["verify_ssl"] = False
    return options


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, variables in _ENVIRONMENT.items():
        value = next((environment[variable] for variable in variables if environment.get(variable)), None)
        if value is not None:
            found[name] = value
    return found


def read_config(name: str) -> dict[str, Any]:
    """The fields of a configuration file, perhaps under ``connection``. Raises `ConfigurationError` naming a wrong
    one.
    """
    content = read_object(name)
    if "connection" in content:
        inner = content["connection"]
        if not isinstance(inner, dict) or len(content) > 1:
            raise ConfigurationError(f"{name}: 'connection' must be the only key, and a JSON object")
        content = inner
    fields: dict[str, Any] = {}
    for key, value in content.items():
        known = _ALIASES.get(key, key)
        if known not in (*_TEXT, *_NUMBERS, *_SWITCHES):
            names = ", ".join((*_TEXT, *_NUMBERS, *_SWITCHES))
            raise ConfigurationError(f"{name}: unknown key {key!r}; known are {names}")
        if value is None:
            continue
        wanted: Any = str if known in _TEXT else bool if known in _SWITCHES else (int, float)
        if not isinstance(value, wanted) or (known in _NUMBERS and isinstance(value, bool)):
            noun = "text" if known in _TEXT else "true or false" if known in _SWITCHES else "a number"
            raise ConfigurationError(f"{name}: {key} must be {noun}")
        fields[known] = value
    return fields


@dataclass(frozen=True)
class _LoginState:
    """What `login` remembered: a configuration file, or the name of a profile."""

    config: str | None = None
    connection: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> _LoginState:
        path = login_path(environment)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()  # none, or damaged: whatever else says how to connect is used
        if not isinstance(content, dict):
            return cls()
        config, connection = content.get("config_path"), content.get("connection")
        remembered = config if isinstance(config, str) and Path(config).is_file() else None
        return cls(remembered, connection if isinstance(connection, str) and connection else None)


def login_path(environment: Mapping[str, str]) -> Path:
    """The file that `login` writes."""
    if environment.get("CORTEX_TRAINING_LOGIN_FILE"):
        return Path(environment["CORTEX_TRAINING_LOGIN_FILE"])
    folder = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "cortex-training" / "login.json"
