"""An Airflow connection of type ``cortex_training``, read and checked in one place for every leg of a task.

Workers build a synchronous client from it, triggers an asynchronous one, and the poll hub keys its sessions by it.
Nothing here talks to Airflow or to the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cortex_training.errors import ConfigurationError

DEFAULT_ENDPOINT = "cortex-training"
_FORM = "Admin > Connections"


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
    """A checked connection. `base_url` has scheme, host and port, no path; `pat` and `proxy` never show in a repr."""

    conn_id: str
    base_url: str
    database: str
    schema: str
    endpoint: str = DEFAULT_ENDPOINT
    pat: str = field(default="", repr=False)
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
    ) -> ConnectionSettings:
        """Check the fields of a connection. Raises `ConfigurationError` naming connection, field and fix."""
        conn_id = target.conn_id
        return cls(
            conn_id=conn_id,
            base_url=_base_url(conn_id, host, port),
            database=_required(conn_id, "database", target.database or _text(conn_id, extra, "database")),
            schema=_required(conn_id, "schema", target.schema or schema),
            endpoint=target.endpoint or _text(conn_id, extra, "endpoint") or DEFAULT_ENDPOINT,
            pat=_required(conn_id, "password", password, what="a programmatic access token"),
            hardware=_text(conn_id, extra, "hardware"),
            verify=_boolean(conn_id, "verify", extra.get("verify")),
            ca_bundle=_text(conn_id, extra, "ca_bundle"),
            proxy=_text(conn_id, extra, "proxy"),
        )

    @property
    def endpoint_key(self) -> tuple[str, ...]:
        """What makes two waits share one session in the triggerer."""
        trust = f"{self.verify}:{self.ca_bundle or ''}:{self.proxy or ''}"
        return (self.conn_id, self.base_url, self.database, self.schema, self.endpoint, trust)

    def client_arguments(self) -> dict[str, Any]:
        """Keyword arguments of both clients' ``from_pat``. Holds the token: pass it on, never log it."""
        return {
            "host": self.base_url,
            "pat": self.pat,
            "database": self.database,
            "schema": self.schema,
            "endpoint": self.endpoint,
            "verify_ssl": self.verify,
            "ca_bundle": self.ca_bundle,
            "proxy": self.proxy,
        }


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
        raise ConfigurationError(
            f"connection {conn_id!r}: {name} is empty: give {what} in {_FORM} or in AIRFLOW_CONN_{conn_id.upper()}",
            field=name,
        )
    return value.strip()


def _wrong(conn_id: str, name: str, value: object, fix: str) -> ConfigurationError:
    return ConfigurationError.of(f"connection {conn_id!r}: {name}", value, fix)
