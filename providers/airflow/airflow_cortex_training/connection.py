"""An Airflow connection of type ``cortex_training``, read and checked in one place for every leg of a task.

Workers build a synchronous client from it, triggers an asynchronous one, and the poll hub keys its sessions by it.
Nothing here talks to Airflow or to the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from airflow_cortex_training.snowflake_login import SnowflakeLogin
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from cortex_training.auth import Auth

CONN_TYPE = "cortex_training"
DEFAULT_ENDPOINT = "cortex-training"
_FORM = "Admin > Connections"
_TELEMETRY_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Target:
    """Where a task's calls go: a connection, and what the operator sets instead of the connection's own values.

    It travels in trigger kwargs, so that a wait in the triggerer asks the same endpoint as the worker did.
    """

    conn_id: str
    database: str | None = None
    schema: str | None = None
    endpoint: str | None = None

    def to_kwargs(self) -> dict[str, str]:
        """Without the fields nobody set; `Target(**kwargs)` gives the target back."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class ConnectionSettings:
    """A checked connection. `base_url` has scheme, host and port, no path; no secret shows in a repr.

    Its credential is `pat`, or the `login` of a Snowflake connection.
    """

    conn_id: str
    base_url: str
    database: str
    schema: str
    endpoint: str = DEFAULT_ENDPOINT
    pat: str = field(default="", repr=False)
    login: SnowflakeLogin | None = None
    hardware: str | None = None
    verify: bool = True
    ca_bundle: str | None = None
    proxy: str | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls,
        target: Target,
        *,
        host: str | None,
        port: int | None,
        schema: str | None,
        password: str | None,
        extra: Mapping[str, Any],
        login: SnowflakeLogin | None = None,
    ) -> ConnectionSettings:
        """Check the fields of a connection; what it leaves open is taken from `login`, where one is reused.

        Raises `ConfigurationError` naming connection, field and fix.
        """
        conn_id = target.conn_id
        database = target.database or _text(conn_id, extra, "database") or (login.database if login else None)
        return cls(
            conn_id=conn_id,
            base_url=login.base_url if login and not host else _base_url(conn_id, host, port),
            database=_required(conn_id, "database", database),
            schema=_required(conn_id, "schema", target.schema or schema or (login.schema if login else None)),
            endpoint=target.endpoint or _text(conn_id, extra, "endpoint") or DEFAULT_ENDPOINT,
            pat=_pat(conn_id, password, login),
            login=login,
            hardware=_text(conn_id, extra, "hardware"),
            verify=_boolean(conn_id, "verify", extra.get("verify")),
            ca_bundle=_text(conn_id, extra, "ca_bundle"),
            proxy=_text(conn_id, extra, "proxy"),
        )

    @property
    def endpoint_key(self) -> tuple[str, ...]:
        """What makes two waits share one session in the triggerer."""
        trust = f"{self.verify}:{self.ca_bundle or ''}:{self.proxy or ''}"
        login = self.login.conn_id if self.login else ""
        return (self.conn_id, self.base_url, self.database, self.schema, self.endpoint, trust, login)

    @property
    def secrets(self) -> list[str]:
        """What must be masked in logs. Airflow masks a password by itself, and fields of an extra only by their
        names: "proxy" is not one of those."""
        found = [self.pat, self.proxy or "", *(self.login.secrets if self.login else ())]
        return [secret for secret in found if secret]

    def auth(self) -> Auth:
        """The credential of a client. Blocks while a reused OAuth login fetches its first token."""
        from cortex_training.auth import PatAuth

        return self.login.auth() if self.login else PatAuth(self.pat)

    def client_arguments(self) -> dict[str, Any]:
        """Keyword arguments of both clients. Blocks as `auth` does; holds the credential: pass it on, never log it."""
        return {
            "base_url": self.base_url,
            "auth": self.auth(),
            "database": self.database,
            "schema": self.schema,
            "endpoint": self.endpoint,
            "verify_ssl": self.verify,
            "ca_bundle": self.ca_bundle,
            "proxy": self.proxy,
            "telemetry_timeout": _TELEMETRY_TIMEOUT_S,
        }


def in_the_form(message: str, conn_id: str) -> str:
    """What was said of a connection, for a person who has its form open: Airflow tests that under a random id."""
    return message.removeprefix(f"connection {conn_id!r}: ").replace(_places(conn_id), "")


def require_type(conn_id: str, conn_type: str | None) -> None:
    """Raises `ConfigurationError` for a connection of another type than this provider's: its fields mean other things,
    and a complaint about one of them would send its reader astray."""
    if conn_type == CONN_TYPE:
        return
    fix = (
        f"a connection of type {CONN_TYPE!r} is needed: choose that type in {_FORM} or in AIRFLOW_CONN_"
        f"{conn_id.upper()}, or name another connection in conn_id"
    )
    if conn_type == "snowflake":
        fix += f"; one that has snowflake_conn_id={conn_id!r} in its extra reuses this login"
    raise _wrong(conn_id, "type", conn_type, fix)


def snowflake_conn_id(conn_id: str, extra: Mapping[str, Any]) -> str | None:
    """The Snowflake connection whose login is reused, if one is."""
    return _text(conn_id, extra, "snowflake_conn_id")


def _pat(conn_id: str, password: str | None, login: SnowflakeLogin | None) -> str:
    if login is None:
        return _required(
            conn_id, "password", password, what="a programmatic access token, or snowflake_conn_id in the extra,"
        )
    if password and password.strip():
        raise ConfigurationError(
            f"connection {conn_id!r}: it has a token and reuses the login of {login.conn_id!r}: leave one of the two "
            "out",
            field="snowflake_conn_id",
        )
    return ""


def _base_url(conn_id: str, host: str | None, port: int | None) -> str:
    text = _required(conn_id, "host", host, what="an account host name or a full URL")
    parts = urlsplit(text if "://" in text else f"https://{text}")
    shown = f"{parts.scheme}://{parts.hostname or ''}"  # A query or a user's part may hold a secret.
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _wrong(conn_id, "host", shown, "give a host name, or a URL like https://host:port")
    if parts.username or parts.password:
        # Not shown: whatever stands before the @ may be a secret.
        raise _wrong(
            conn_id, "host", "…@…", "leave user and password out of it; the token goes into the password field"
        )
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise _wrong(
            conn_id, "host", shown, "give scheme, host and port only; the path is built from database and schema"
        )
    try:
        own_port = parts.port
    except ValueError:
        raise _wrong(conn_id, "host", shown, "its port is not a number") from None
    location = parts.netloc if own_port or not port else f"{parts.netloc}:{port}"
    return urlunsplit((parts.scheme, location, "", "", ""))


def _text(conn_id: str, extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise _wrong(conn_id, name, value, "give text")
    return value.strip() or None


def _boolean(conn_id: str, name: str, value: object) -> bool:
    if value is None or value == "":
        return True
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise _wrong(conn_id, name, value, "give true or false")


def _required(conn_id: str, name: str, value: str | None, *, what: str = "a value") -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"connection {conn_id!r}: {name} is empty: give {what}{_places(conn_id)}", field=name)
    return value.strip()


def _places(conn_id: str) -> str:
    return f" in {_FORM} or in AIRFLOW_CONN_{conn_id.upper()}"


def _wrong(conn_id: str, name: str, value: object, fix: str) -> ConfigurationError:
    return ConfigurationError.of(f"connection {conn_id!r}: {name}", value, fix)
