"""``vault:URL``: credentials in a HashiCorp Vault key-value store (version 2), read after a login on this node.

The location alone decides: no ``VAULT_*`` variable, proxy variable or netrc has a say in where the login goes, how the
server is trusted, or what is sent.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote, urljoin, urlsplit

import requests

from cortex_training.errors import ConfigurationError
from cortex_training.paths import safe_relative
from cortex_training.publication.credentials import NoAnswer, checked_value, read_closed_directory
from cortex_training.publication.errors import CredentialsError
from cortex_training.publication.quiet import quiet_libraries
from cortex_training.publication.urls import parse_proxy

SERVICE_ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"

_KEYS = ("mount", "auth", "role", "approle", "ca", "proxy")
_TIMEOUT_S = 15
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True)
class Vault:
    """A secret of one Vault server, and how to log in there."""

    location: str
    address: str
    path: str
    auth: str
    mount: str = "secret"
    role: str = ""
    approle: str = ""
    ca: str | None = None
    proxy: str | None = None

    @property
    def name(self) -> str:
        return f"vault:{self.location}"

    def fields(self) -> Mapping[str, str]:
        login = self._kubernetes_login() if self.auth == "kubernetes" else self._approle_login()
        if self.ca is not None and not os.path.isfile(self.ca):
            raise CredentialsError(f"credentials: {self.name}: ca={self.ca}: there is no such file")
        with quiet_libraries():
            data = self._read(login)
        found = {}
        for name, value in data.items():
            if not isinstance(value, str):
                raise CredentialsError(f"credentials: {self.name}: field {name!r} is not text")
            found[name] = value
        return found

    def _kubernetes_login(self) -> Mapping[str, str]:
        try:
            with open(SERVICE_ACCOUNT_TOKEN, encoding="utf-8") as file:
                token = file.read().removesuffix("\n")
        except FileNotFoundError:
            raise NoAnswer(f"there is no service-account token at {SERVICE_ACCOUNT_TOKEN}") from None
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or "not UTF-8 text"
            raise CredentialsError(f"credentials: {self.name}: read {SERVICE_ACCOUNT_TOKEN}: {why}") from None
        return {"role": self.role, "jwt": checked_value(self.name, "the service-account token", token)}

    def _approle_login(self) -> Mapping[str, str]:
        found = read_closed_directory(self.name, self.approle)
        wanted = {"role_id", "secret_id"}
        for name in sorted(set(found) ^ wanted):
            state = "unknown file" if name in found else "no file"
            raise CredentialsError(
                f"credentials: {self.name}: {self.approle}: {state} {name}; it holds role_id and secret_id"
            )
        return {name: checked_value(self.name, name, value) for name, value in found.items()}

    def _read(self, login: Mapping[str, str]) -> Mapping[str, Any]:
        hvac = _import_hvac()
        with _PinnedSession(self) as session:
            # Whatever is left None here, hvac takes from the environment.
            client = hvac.Client(
                url=self.address,
                token="",
                cert=(),
                verify=session.verify,
                timeout=_TIMEOUT_S,
                proxies=dict(session.proxies),
                session=session,
                namespace="",
            )
            try:
                step = "log in"
                getattr(client.auth, self.auth).login(**login)
                step = f"read secret {self.mount}/{self.path}"
                reply = client.secrets.kv.v2.read_secret_version(
                    path=self.path, mount_point=self.mount, raise_on_deleted_version=True
                )
                data = reply["data"]["data"]
                if not isinstance(data, Mapping):
                    raise TypeError("the secret is not an object")
            except _OtherServer:
                self._wrong(step, "the server redirects to another one; give that one's address")
            except requests.exceptions.SSLError:
                self._wrong(step, "the server's certificate is not trusted; name its authority with ca=")
            except (requests.ConnectionError, requests.Timeout) as problem:
                # Its text holds no more than the class says, or the request.
                raise NoAnswer(f"{self.address} cannot be reached ({type(problem).__name__})") from None
            except hvac.exceptions.VaultError as problem:
                self._wrong(step, f"Vault answered {type(problem).__name__}")
            except (requests.RequestException, KeyError, TypeError, ValueError) as problem:
                self._wrong(step, f"the answer is not Vault's ({type(problem).__name__})")
            return data

    def _wrong(self, step: str, why: str) -> NoReturn:
        raise CredentialsError(f"credentials: {self.name}: {step}: {why}") from None


class _PinnedSession(requests.Session):
    """Talks to one server, the environment's proxies, authorities and netrc aside."""

    def __init__(self, vault: Vault) -> None:
        super().__init__()
        self.trust_env = False
        self.verify = vault.ca or True
        if vault.proxy:
            self.proxies.update({"http": vault.proxy, "https": vault.proxy})
        self._address = vault.address

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        # A redirect carries the login, and the token in a header of Vault's own, which requests would not strip.
        target = super().get_redirect_target(resp)
        if target and not urljoin(f"{self._address}/", target).startswith(f"{self._address}/"):
            raise _OtherServer
        return target


class _OtherServer(requests.RequestException):
    """Vault sent us to another server."""


def parse_vault_location(location: str) -> Vault:
    """Read ``https://host:port/path?key=value&…``. Raises CredentialsError naming what is refused."""

    def refuse(why: str) -> NoReturn:
        raise CredentialsError(f"credentials: vault:{_without_secrets(location)}: {why}")

    try:
        parts = urlsplit(location)
        host, _ = parts.hostname, parts.port
    except ValueError:
        refuse("not a URL")
    if parts.scheme not in ("https", "http") or not host or "@" in parts.netloc:
        refuse("give https://host:port/path, without a user name")
    if parts.scheme == "http" and not _is_loopback(host):
        refuse("plain http is for this machine alone; use https")
    if "#" in location or any(character.isspace() for character in location):
        refuse("it holds a fragment or white space")
    if _BAD_ESCAPE.search(parts.path) or _BAD_ESCAPE.search(parts.query) or ";" in parts.query:
        refuse("bad % escape, or a ';', in it")
    path = unquote(parts.path.removeprefix("/"))
    keys: dict[str, str] = {}
    for pair in parts.query.split("&") if parts.query else []:
        key, _, value = pair.partition("=")
        value = unquote(value.replace("+", " "))
        if key not in _KEYS:
            refuse(f"unknown key {key!r}; keys are {', '.join(_KEYS)}")
        if not value:
            refuse(f"key {key} has no value")
        if key in keys:
            refuse(f"key {key} is given twice")
        keys[key] = value
    auth = keys.get("auth")
    if auth not in ("kubernetes", "approle"):
        refuse("auth= must be kubernetes or approle")
    wanted, unwanted = ("role", "approle") if auth == "kubernetes" else ("approle", "role")
    if wanted not in keys or unwanted in keys:
        refuse(f"auth={auth} takes {wanted}=, and not {unwanted}=")
    try:
        safe_relative(path)
        safe_relative(keys.get("mount", "secret"))
        if "proxy" in keys:
            parse_proxy(keys["proxy"])
    except ConfigurationError as problem:
        refuse(str(problem))
    except ValueError as problem:
        refuse(f"the secret's path or its mount: {problem}")
    address = f"{parts.scheme}://{parts.netloc}"
    return Vault(location=location, address=address, path=path, **keys)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_secrets(location: str) -> str:
    """A refused location as it may be shown: without user name, password, and the query, where a proxy's would be."""
    return re.sub(r"//[^/?#]*@", "//…@", re.sub(r"[?#].*", "?…", location, flags=re.DOTALL))


def _import_hvac() -> Any:
    try:
        import hvac
        import hvac.exceptions
    except ImportError:
        raise CredentialsError(
            "credentials: vault sources need hvac; pip install 'cortex-training-client[vault]'"
        ) from None
    return hvac
