"""Credentials: objects that give the headers of a request, and renew them when the service calls them expired.

Anything with `headers()`, `refresh(rejected)` and `can_refresh` is a credential. Nothing here shows a secret: not in a
`repr`, not in an exception.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol
from urllib.parse import urlsplit

from cortex_training.errors import ConfigurationError, CortexTrainingError


class Auth(Protocol):
    """What a client needs of a credential. Methods may block and may be called from any thread."""

    @property
    def can_refresh(self) -> bool:
        """Whether `refresh` may lead to another credential; if not, an expired one is an error at once."""

    def headers(self) -> Mapping[str, str]:
        """The headers of the next request."""

    def refresh(self, rejected: Mapping[str, str]) -> None:
        """Replace the credential that gave the `rejected` headers, unless somebody did so already."""


class NoAuth:
    """For a service that asks for no credential, such as the local one."""

    can_refresh = False

    def headers(self) -> Mapping[str, str]:
        return {}

    def refresh(self, rejected: Mapping[str, str]) -> None:
        return None

    def __repr__(self) -> str:
        return "NoAuth()"


class PatAuth:
    """A programmatic access token."""

    can_refresh = False

    def __init__(self, pat: str) -> None:
        self._pat = _checked_secret("pat", pat)

    def headers(self) -> Mapping[str, str]:
        return _bearer(self._pat, "PROGRAMMATIC_ACCESS_TOKEN")

    def refresh(self, rejected: Mapping[str, str]) -> None:
        return None

    def open_connection(self, base_url: str, user: str, role: str | None, database: str, schema: str) -> Any:
        """A connection of the Snowflake connector with this token; the caller closes it."""
        address = urlsplit(base_url)
        host = address.hostname or ""
        arguments: dict[str, Any] = {"role": role} if role else {}
        if address.port is not None:
            arguments |= {"port": address.port, "protocol": address.scheme}
        return _open_connection(
            f"the Snowflake account at {host}",
            host=host,
            # The host also stands for the account: the name that CURRENT_ACCOUNT_NAME() gives is wrong for locators.
            account=host,
            user=user,
            authenticator="PROGRAMMATIC_ACCESS_TOKEN",
            token=self._pat,
            database=database,
            schema=schema,
            **arguments,
        )

    def __repr__(self) -> str:
        return "PatAuth(***)"


class OAuthAuth:
    """An OAuth access token, or a function that returns the current one and is asked again when it has expired.

    The function may block (it runs in a thread under the async client) and is called by one thread at a time.
    """

    def __init__(self, token: str | Callable[[], str]) -> None:
        self._source = token if callable(token) else None
        self._lock = threading.Lock()
        self._token = _checked_secret("token", token() if callable(token) else token)

    @property
    def can_refresh(self) -> bool:
        return self._source is not None

    def headers(self) -> Mapping[str, str]:
        return _bearer(self._token, "OAUTH")

    def refresh(self, rejected: Mapping[str, str]) -> None:
        with self._lock:
            if self._source is not None and dict(rejected) == dict(self.headers()):
                self._token = _checked_secret("token", self._source())

    def __repr__(self) -> str:
        return "OAuthAuth(***)"

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self._source, "token": self._token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._source, self._token, self._lock = state["source"], state["token"], threading.Lock()


class KeyPairAuth:
    """A user's RSA key: each token is a JWT signed here, replaced before it expires.

    `account` is the account identifier (``myorg-myaccount``, or a locator, whose region is left out as the service
    wants it), `private_key` the PEM text of the key, `passphrase` for an encrypted one. Needs the package
    cryptography, which the Snowflake connector brings.
    """

    can_refresh = True
    _LIFETIME_S = 59 * 60
    """The service accepts at most an hour."""
    _RENEW_BEFORE_S = 5 * 60

    def __init__(self, account: str, user: str, private_key: str | bytes, passphrase: str | None = None) -> None:
        for field, value in (("account", account), ("user", user)):
            if not isinstance(value, str) or not value.strip():
                raise ConfigurationError.of(field, value, "must be a non-empty string")
        name = account.strip().upper()
        self._subject = f"{name.split('.')[0]}.{user.strip().upper()}"
        self._pem = private_key.encode() if isinstance(private_key, str) else private_key
        self._passphrase = passphrase
        self._load_key()

    def _load_key(self) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
            from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
        except ImportError:
            raise ConfigurationError("private_key: key-pair authentication needs: pip install cryptography") from None
        try:
            key = load_pem_private_key(self._pem, self._passphrase.encode() if self._passphrase else None)
        except (ValueError, TypeError):
            # The library's own words may quote the input.
            raise ConfigurationError("private_key: is not a PEM private key, or the passphrase is wrong") from None
        if not isinstance(key, RSAPrivateKey):
            raise ConfigurationError("private_key: must be an RSA key")
        public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        digest = base64.b64encode(hashlib.sha256(public).digest()).decode()
        self._issuer = f"{self._subject}.SHA256:{digest}"
        self._key = key
        self._lock = threading.Lock()
        self._token, self._renew_at = "", 0.0

    def headers(self) -> Mapping[str, str]:
        with self._lock:
            if time.time() >= self._renew_at:
                self._sign()
            return _bearer(self._token, "KEYPAIR_JWT")

    def refresh(self, rejected: Mapping[str, str]) -> None:
        with self._lock:
            if dict(rejected) == _bearer(self._token, "KEYPAIR_JWT"):
                self._sign()

    def _sign(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
        from cryptography.hazmat.primitives.hashes import SHA256

        now = int(time.time())
        claims = {"iss": self._issuer, "sub": self._subject, "iat": now, "exp": now + self._LIFETIME_S}
        signed = f"{_base64url({'alg': 'RS256', 'typ': 'JWT'})}.{_base64url(claims)}"
        signature = self._key.sign(signed.encode(), PKCS1v15(), SHA256())
        self._token = f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
        self._renew_at = now + self._LIFETIME_S - self._RENEW_BEFORE_S

    def __repr__(self) -> str:
        return f"KeyPairAuth({self._subject!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"subject": self._subject, "pem": self._pem, "passphrase": self._passphrase}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._subject, self._pem, self._passphrase = state["subject"], state["pem"], state["passphrase"]
        self._load_key()


def _bearer(token: str, kind: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "X-Snowflake-Authorization-Token-Type": kind}


def _base64url(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).rstrip(b"=").decode()


class SnowflakeProfileError(CortexTrainingError, RuntimeError):
    """A Snowflake connection profile could not be opened, or gives no session to work with."""


class SnowflakeSessionAuth:
    """The session of a Snowflake connection profile, opened by the Snowflake connector and renewed when it expires.

    `connection_name` None means the connector's default profile. `base_url`, `database` and `schema` come from the
    profile. Threads share one session; an expired one is replaced once, whoever notices first.

    Where connections are configured elsewhere than in profiles, `connect` opens one (and a new one whenever the session
    is to be renewed), and `described` is what errors call it.
    """

    can_refresh = True

    def __init__(
        self,
        connection_name: str | None = None,
        *,
        connect: Callable[[], Any] | None = None,
        described: str = "the Snowflake connection",
    ) -> None:
        if connection_name is not None:
            connection_name = connection_name.strip() if isinstance(connection_name, str) else connection_name
            if not isinstance(connection_name, str) or not connection_name:
                raise ConfigurationError.of("connection_name", connection_name, "must name a profile, or be left out")
        self._name = connection_name
        self._connect_otherwise = connect
        self._otherwise_described = described
        self._closed = False
        self._open_session()

    def _open_session(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._connection = self._connect()
        try:
            self._token, self.base_url = self._session_of(self._connection)
            self.database: str | None = self._connection.database
            self.schema: str | None = self._connection.schema
        except BaseException:
            _close_quietly(self._connection)
            raise

    def headers(self) -> Mapping[str, str]:
        # Not under the lock, which is held as long as a renewal takes: an event loop asks this for every request.
        self._check_usable()
        return {"Authorization": f'Snowflake Token="{self._token}"'}

    def refresh(self, rejected: Mapping[str, str]) -> None:
        self._check_usable()
        with self._lock:
            if dict(rejected) != dict(self.headers()):
                return  # another thread replaced it while this one was waiting
            replacement = self._connect()
            try:
                token, base_url = self._session_of(replacement)
            except BaseException:
                _close_quietly(replacement)
                raise
            old, self._connection = self._connection, replacement
            self._token, self.base_url = token, base_url
        _close_quietly(old)

    def open_connection(self) -> Any:
        """A connection of its own from the same profile, for SQL; the caller closes it."""
        return self._connect()

    def close(self) -> None:
        """End the session. Safe to call twice."""
        if self._closed:
            return
        self._check_usable()
        with self._lock:
            self._closed = True
        _close_quietly(self._connection)

    def _check_usable(self) -> None:
        if self._closed:
            raise SnowflakeProfileError(f"the session of {self._described()} is closed; make a new client")
        if os.getpid() != self._pid:
            # After a fork the lock may be held by a thread that does not exist here, and the socket is the parent's.
            self._open_session()

    def _described(self) -> str:
        if self._connect_otherwise is not None:
            return self._otherwise_described
        return "the default Snowflake connection" if self._name is None else f"Snowflake connection {self._name!r}"

    def _connect(self) -> Any:
        if self._connect_otherwise is not None:
            return _opened(self._described(), self._connect_otherwise)
        named = {} if self._name is None else {"connection_name": self._name}
        return _open_connection(self._described(), **named)

    def _session_of(self, connection: Any) -> tuple[str, str]:
        rest = getattr(connection, "rest", None)
        if rest is None:
            raise SnowflakeProfileError(f"{self._described()} did not expose an authenticated REST session")
        token, url = getattr(rest, "token", None), getattr(rest, "server_url", None)
        if not isinstance(token, str) or not token:
            raise SnowflakeProfileError(f"{self._described()} did not expose a session token")
        if not isinstance(url, str) or not url:
            raise SnowflakeProfileError(f"{self._described()} did not expose its REST server URL")
        if not url.startswith(("https://", "http://")):
            raise SnowflakeProfileError(f"{self._described()} gave an invalid REST server URL: {url!r}")
        return token, url.rstrip("/")

    def __repr__(self) -> str:
        return f"SnowflakeSessionAuth({self._described() if self._connect_otherwise else self._name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A session belongs to its process; the profile's name is what can be carried to another one.
        if self._connect_otherwise is not None:
            raise TypeError(f"{self._described()} can't be carried to another process; make a new client there")
        return SnowflakeSessionAuth, (self._name,)


def _checked_secret(field: str, value: object) -> str:
    # The value is a secret, so unlike elsewhere the message does not show it.
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{field}: must be a non-empty string", field=field)
    text = value.strip()
    if any(ord(character) < 33 or ord(character) > 126 for character in text):
        raise ConfigurationError(f"{field}: holds a character that no token has; was it copied whole?", field=field)
    return text


def connector_is_installed() -> bool:
    """Whether `snowflake.connector` can be imported; it is not imported to find out."""
    if "snowflake.connector" in sys.modules:
        return sys.modules["snowflake.connector"] is not None
    try:
        return find_spec("snowflake.connector") is not None
    except (ImportError, ValueError):  # no package of this name, or one that says nothing of where it came from
        return False


def _open_connection(described: str, **arguments: Any) -> Any:
    try:
        import snowflake.connector
    except ImportError:
        raise SnowflakeProfileError(
            f"{described} needs the Snowflake connector: pip install 'cortex-training-client[snowflake]'"
        ) from None
    return _opened(described, lambda: snowflake.connector.connect(**arguments))


def _opened(described: str, connect: Callable[[], Any]) -> Any:
    try:
        return connect()
    except Exception as error:
        hint = ""
        if getattr(error, "errno", None) == 394400 or "programmatic access token is invalid" in str(error).lower():
            hint = " The token may be expired, or its user needs a network policy that admits this address."
        raise SnowflakeProfileError(f"could not open {described}: {_first_line(error)}.{hint}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _close_quietly(connection: Any) -> None:
    # The session was left anyway; a failure to say goodbye changes nothing.
    try:
        connection.close()
    except Exception:
        return
