"""What a client is configured with, checked once. Both clients, and their pickles, are made of this."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cortex_training.auth import Auth, NoAuth, SnowflakeSessionAuth
from cortex_training.errors import ConfigurationError
from cortex_training.protocol.context import Policy
from cortex_training.protocol.urls import service_prefix
from cortex_training.proxies import checked_proxy


@dataclass(frozen=True)
class ClientSettings:
    """`poll_interval`, `poll_max_interval` and `poll_backoff_multiplier` are None unless the caller gave them."""

    base_url: str
    database: str
    schema: str
    endpoint: str = "cortex-training"
    poll_interval: float | None = None
    poll_timeout: float = 1800.0
    poll_backoff_multiplier: float | None = None
    poll_max_interval: float | None = None
    pool_maxsize: int = 1024
    max_retries: int | None = None
    retry_budget_s: float = 120.0
    request_timeout: tuple[float, float] = (30.0, 600.0)
    auth: Auth = field(default_factory=NoAuth)
    verify_ssl: bool = True
    ca_bundle: str | None = None
    proxy: str | None = field(default=None, repr=False)
    token_prompts: str = "json"
    telemetry_timeout: float | None = None
    create_database: bool = False

    @property
    def policy(self) -> Policy:
        return Policy(
            prefix=service_prefix(self.database, self.schema, self.endpoint),
            poll_interval=self.poll_interval,
            poll_timeout=self.poll_timeout,
            poll_backoff_multiplier=self.poll_backoff_multiplier,
            poll_max_interval=self.poll_max_interval,
            max_retries=self.max_retries,
            retry_budget_s=self.retry_budget_s,
            request_timeout=self.request_timeout,
            token_prompts=self.token_prompts,
            database_to_create=(self.database, self.schema) if self.create_database else None,
        )


def checked_settings(
    *,
    base_url: str,
    database: str,
    schema: str,
    endpoint: str,
    poll_interval: float | None,
    poll_timeout: float,
    poll_backoff_multiplier: float | None,
    poll_max_interval: float | None,
    pool_maxsize: int,
    max_retries: int | None,
    retry_budget_s: float,
    request_timeout: float | tuple[float, float],
    auth: Auth | None,
    verify_ssl: bool,
    ca_bundle: str | None,
    proxy: str | None,
    token_prompts: str,
    telemetry_timeout: float | None,
    create_database: bool,
) -> ClientSettings:
    """Raises `ConfigurationError` naming the argument, its value and the fix."""
    if poll_interval is not None:
        _positive("poll_interval", poll_interval)
    _positive("poll_timeout", poll_timeout)
    if poll_backoff_multiplier is not None and _number("poll_backoff_multiplier", poll_backoff_multiplier) < 1:
        raise ConfigurationError.of("poll_backoff_multiplier", poll_backoff_multiplier, "must be 1.0 or greater")
    if poll_max_interval is not None:
        _positive("poll_max_interval", poll_max_interval)
        if poll_max_interval < (poll_interval or 0.0):
            raise ConfigurationError.of("poll_max_interval", poll_max_interval, f"must be at least {poll_interval}")
    if _whole("pool_maxsize", pool_maxsize) < 1:
        raise ConfigurationError.of("pool_maxsize", pool_maxsize, "must be 1 or greater")
    if max_retries is not None and _whole("max_retries", max_retries) < 0:
        raise ConfigurationError.of("max_retries", max_retries, "must be 0 or greater")
    if _number("retry_budget_s", retry_budget_s) < 0:
        raise ConfigurationError.of("retry_budget_s", retry_budget_s, "must be 0 or greater")
    if not isinstance(verify_ssl, bool):
        raise ConfigurationError.of("verify_ssl", verify_ssl, "must be True or False; give a CA file as ca_bundle")
    if ca_bundle is not None:
        if not verify_ssl:
            raise ConfigurationError.of("ca_bundle", ca_bundle, "has no effect with verify_ssl=False; give one of them")
        if not os.path.exists(ca_bundle):
            raise ConfigurationError.of("ca_bundle", ca_bundle, "does not exist")
    if token_prompts not in ("json", "tensor"):
        raise ConfigurationError.of("token_prompts", token_prompts, "must be 'json' or 'tensor'")
    if not isinstance(create_database, bool):
        raise ConfigurationError.of("create_database", create_database, "must be True or False")
    if telemetry_timeout is not None:
        _positive("telemetry_timeout", telemetry_timeout)
    settings = ClientSettings(
        base_url=_checked_base_url(base_url),
        database=database,
        schema=schema,
        endpoint=endpoint,
        poll_interval=poll_interval,
        poll_timeout=float(poll_timeout),
        poll_backoff_multiplier=poll_backoff_multiplier,
        poll_max_interval=poll_max_interval,
        pool_maxsize=pool_maxsize,
        max_retries=max_retries,
        retry_budget_s=float(retry_budget_s),
        request_timeout=_connect_and_read(request_timeout),
        auth=auth if auth is not None else NoAuth(),
        verify_ssl=verify_ssl,
        ca_bundle=ca_bundle,
        proxy=checked_proxy(proxy),
        token_prompts=token_prompts,
        telemetry_timeout=telemetry_timeout,
        create_database=create_database,
    )
    _ = settings.policy  # a database, schema or endpoint that is no path segment is refused here, not at the first call
    return settings


def url_of_host(host: str) -> str:
    """``https://host`` for a host name; a full URL with scheme and port stays what it is."""
    if not isinstance(host, str) or not host.strip():
        raise ConfigurationError.of("host", host, "must be a host name, or a URL with scheme and port")
    text = host.strip().rstrip("/")
    return text if "://" in text else f"https://{text}"


def settings_of_profile(auth: SnowflakeSessionAuth, database: str | None, schema: str | None) -> tuple[str, str, str]:
    """Address, database and schema for a profile's session; the session is closed again if there is no database."""
    found = database or auth.database
    if not found:
        auth.close()
        raise ConfigurationError(
            "database: the connection profile must set database, or give database=", field="database"
        )
    return auth.base_url, found, schema or auth.schema or "PUBLIC"


def _checked_base_url(base_url: object) -> str:
    if not isinstance(base_url, str):
        raise ConfigurationError.of("base_url", base_url, "must be a string")
    text = base_url.strip().rstrip("/")
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        # Not shown: where the parts of something that is no URL end, and what a secret in it looks like, is unknown.
        raise ConfigurationError(
            "base_url: must be like https://ACCOUNT.snowflakecomputing.com or https://host:port, and is not a URL",
            field="base_url",
        ) from None
    if "@" in parts.netloc:
        # A password in the address would be sent in place of the token, and would be shown in every error.
        raise ConfigurationError("base_url: must not hold a user or password; give the credential as auth=")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError.of("base_url", text, "must be like https://ACCOUNT.snowflakecomputing.com")
    if parts.query or parts.fragment:
        address = f"{parts.scheme}://{parts.hostname}"
        raise ConfigurationError.of("base_url", address, "must not hold a query or fragment")
    return text


def _connect_and_read(value: object) -> tuple[float, float]:
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ConfigurationError.of("request_timeout", value, "must be one number, or (connect, read) in seconds")
    connect_s, read_s = (_positive("request_timeout", part) for part in pair)
    return connect_s, read_s


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError.of(name, value, "must be a finite number")
    return float(value)


def _positive(name: str, value: object) -> float:
    number = _number(name, value)
    if number <= 0:
        raise ConfigurationError.of(name, value, "must be greater than 0")
    return number


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError.of(name, value, "must be a whole number")
    return value
