"""The login of a Snowflake connection that exists already, reused for Cortex Training: PAT, OAuth or key pair.

Only what the Snowflake provider's own fields say is read here; that provider need not be installed. A password is no
login for the REST API, and neither is a browser.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex_training.errors import ConfigurationError, TransportError

if TYPE_CHECKING:
    from cortex_training.auth import Auth

_ACCOUNT = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_TOKEN_TIMEOUT_S = 30.0
_MAX_KEY_BYTES = 64 * 1024
_SECRETS = ("token", "refresh_token", "private_key_content", "oauth_password", "proxy_password")


@dataclass(frozen=True)
class TokenSource:
    """Where OAuth access tokens come from. `__call__` blocks on the token endpoint."""

    url: str
    client_id: str
    client_secret: str = field(repr=False)
    form: tuple[tuple[str, str], ...] = field(repr=False)
    conn_id: str = ""

    def __call__(self) -> str:
        """A new access token.

        Raises `TransportError` when the endpoint can't be reached just now, `ConfigurationError` when it refuses.
        """
        import requests

        what = f"Snowflake connection {self.conn_id!r}: the token endpoint {self.url}"
        try:
            answer = requests.post(
                self.url, data=dict(self.form), auth=(self.client_id, self.client_secret), timeout=_TOKEN_TIMEOUT_S
            )
        except requests.RequestException as error:
            # The exception's text may hold what was sent.
            raise TransportError(f"{what} gave no reply ({type(error).__name__})", sent=False) from None
        if answer.status_code >= 500 or answer.status_code == 429:
            raise TransportError(f"{what} answered {answer.status_code}", sent=False)
        token = _json_field(answer, "access_token")
        if answer.status_code >= 300 or not token:
            raise ConfigurationError(
                f"{what} answered {answer.status_code} {_json_field(answer, 'error')}: check client id, client secret "
                "and refresh token of the connection",
                field="snowflake_conn_id",
            )
        return token


@dataclass(frozen=True)
class SnowflakeLogin:
    """What an Airflow connection of type ``snowflake`` says of account and login. No secret shows in a repr."""

    conn_id: str
    base_url: str
    database: str | None
    schema: str | None
    account: str
    user: str = ""
    pat: str = field(default="", repr=False)
    oauth_token: str = field(default="", repr=False)
    oauth_source: TokenSource | None = field(default=None, repr=False)
    private_key: bytes = field(default=b"", repr=False)
    passphrase: str = field(default="", repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Everything that must be masked in logs."""

    @classmethod
    def read(
        cls,
        conn_id: str,
        *,
        conn_type: str | None,
        login: str | None,
        password: str | None,
        schema: str | None,
        extra: Mapping[str, Any],
    ) -> SnowflakeLogin:
        """Check the fields of a Snowflake connection. Raises `ConfigurationError` naming connection, field and fix."""
        if conn_type != "snowflake":
            raise _wrong(conn_id, "type", conn_type, "snowflake_conn_id must name a connection of type snowflake")
        fields = _Fields(extra)
        account = fields.text("account")
        described = cls(
            conn_id=conn_id,
            base_url=_base_url(conn_id, account, fields),
            database=fields.text("database") or None,
            schema=(schema or "").strip() or None,
            account=account,
            user=(login or "").strip(),
            secrets=tuple(text for text in (password or "", *(fields.text(name) for name in _SECRETS)) if text),
        )
        return described._with_login(login or "", (password or "").strip(), fields)

    def auth(self) -> Auth:
        """A credential for a client. Blocks while a first OAuth token is fetched; raises as `TokenSource` does."""
        from cortex_training.auth import KeyPairAuth, OAuthAuth, PatAuth

        if self.pat:
            return PatAuth(self.pat)
        if self.oauth_token or self.oauth_source:
            return OAuthAuth(self.oauth_source or self.oauth_token)
        return KeyPairAuth(self.account, self.user, self.private_key, self.passphrase or None)

    def _with_login(self, login: str, password: str, fields: _Fields) -> SnowflakeLogin:
        from dataclasses import replace

        authenticator = fields.text("authenticator").lower()
        if authenticator == "programmatic_access_token":
            pat = password or fields.text("token")
            return replace(self, pat=_required(self.conn_id, "password", pat, "put the token into it"))
        if authenticator == "oauth" or fields.text("refresh_token") or fields.text("grant_type"):
            token = fields.text("token")
            if token:
                return replace(self, oauth_token=token)
            return replace(self, oauth_source=self._token_source(login, password, fields))
        key = _private_key(self.conn_id, fields)
        if not key:
            raise _wrong(
                self.conn_id,
                "authenticator",
                authenticator,
                "Cortex Training takes a programmatic access token, OAuth or a key pair; this connection has none",
            )
        _required(self.conn_id, "login", login, "a key pair needs the user's name")
        _required(self.conn_id, "account", self.account, "a key pair needs the account's name")
        return replace(self, private_key=key, passphrase=password)

    def _token_source(self, client_id: str, client_secret: str, fields: _Fields) -> TokenSource:
        grant = fields.text("grant_type") or "refresh_token"
        if fields.text("azure_conn_id") or grant not in ("refresh_token", "client_credentials"):
            shown = "azure_conn_id" if fields.text("azure_conn_id") else grant
            raise _wrong(self.conn_id, "grant_type", shown, "refresh_token and client_credentials can be reused here")
        form = {
            "grant_type": grant,
            "redirect_uri": fields.text("redirect_uri") or "https://localhost.com",
            "scope": fields.text("scope"),
        }
        if grant == "refresh_token":
            token = fields.text("refresh_token")
            form["refresh_token"] = _required(self.conn_id, "refresh_token", token, "OAuth needs it, or a token")
        return TokenSource(
            url=fields.text("token_endpoint") or f"{self.base_url}/oauth/token-request",
            client_id=_required(self.conn_id, "login", client_id, "OAuth needs the client id"),
            client_secret=_required(self.conn_id, "password", client_secret, "OAuth needs the client secret"),
            form=tuple((name, value) for name, value in form.items() if value),
            conn_id=self.conn_id,
        )


class _Fields:
    """The extra of a Snowflake connection; old ones spell their names with a prefix."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._extra = extra

    def text(self, name: str) -> str:
        value = self._extra.get(name)
        if value in (None, ""):
            value = self._extra.get(f"extra__snowflake__{name}")
        return "" if value is None else str(value).strip()


def _base_url(conn_id: str, account: str, fields: _Fields) -> str:
    host, port = fields.text("host"), fields.text("port")
    if not host:
        _required(conn_id, "account", account, "give the account's name, or its host in the extra")
        region = fields.text("region")
        # Names with an underscore are no host names; the service answers to the spelling with a hyphen.
        host = f"{account}.{region}" if region else account
        host = f"{host.replace('_', '-')}.snowflakecomputing.com"
    if not _ACCOUNT.fullmatch(host):
        raise _wrong(conn_id, "account", account or host, "letters, digits, dots, dashes and underscores only")
    if port and not port.isdigit():
        raise _wrong(conn_id, "port", port, "give a number")
    protocol = fields.text("protocol") or "https"
    if protocol not in ("https", "http"):
        raise _wrong(conn_id, "protocol", protocol, "https or http")
    return f"{protocol}://{host}:{port}" if port else f"{protocol}://{host}"


def _private_key(conn_id: str, fields: _Fields) -> bytes:
    content, path = fields.text("private_key_content"), fields.text("private_key_file")
    if content and path:
        raise ConfigurationError(
            f"Snowflake connection {conn_id!r}: private_key_content and private_key_file are both given; leave one out",
            field="snowflake_conn_id",
        )
    if path:
        try:
            key = Path(path).read_bytes()
        except OSError as error:
            raise _wrong(conn_id, "private_key_file", path, str(error.strerror or error)) from None
        if len(key) > _MAX_KEY_BYTES:
            raise _wrong(conn_id, "private_key_file", path, f"is larger than {_MAX_KEY_BYTES} bytes, so it is no key")
        return key
    if content and "-----BEGIN" not in content:
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error:
            # Not shown: it is a key that was copied badly.
            raise _wrong(conn_id, "private_key_content", "…", "is neither PEM nor base64 of PEM") from None
    return content.encode()


def _json_field(answer: Any, name: str) -> str:
    try:
        value = answer.json().get(name)
    except (ValueError, AttributeError):
        return ""
    return value if isinstance(value, str) else ""


def _required(conn_id: str, name: str, value: str, fix: str) -> str:
    if not value.strip():
        raise ConfigurationError(f"Snowflake connection {conn_id!r}: {name} is empty: {fix}", field="snowflake_conn_id")
    return value.strip()


def _wrong(conn_id: str, name: str, value: object, fix: str) -> ConfigurationError:
    return ConfigurationError.of(f"Snowflake connection {conn_id!r}: {name}", value, fix)
