"""Which HTTP proxy a request takes, from a setting or the environment, checked before it is used.

A proxy's URL may hold a password, so no refusal shows any of it: a typing error may have put the password anywhere.
"""

from __future__ import annotations

import functools
import os
import re
from urllib.parse import urlsplit

from requests.utils import get_environ_proxies, select_proxy

from cortex_training.errors import ConfigurationError

_HOST = re.compile(r"[^\s@/\\%]+")
_VARIABLES = tuple(
    spelling for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for spelling in (name, name.upper())
)


def checked_proxy(proxy: object, field: str = "proxy") -> str | None:
    """The URL of an HTTP proxy; None for none. Raises `ConfigurationError` that names `field`."""
    if proxy is None or proxy == "":
        return None
    try:
        parts = urlsplit(proxy if isinstance(proxy, str) else "")
        well_formed = (
            parts.scheme in ("http", "https")
            and _HOST.fullmatch(parts.hostname or "") is not None
            and parts.port != 0
            and not (parts.path.strip("/") or parts.query or parts.fragment)
        )
    except ValueError:
        well_formed = False
    if not well_formed:
        raise ConfigurationError(
            f"{field}: must be a URL like http://host:port or http://user:password@host:port, with a user and password "
            "percent-encoded; what it is now is not shown, because it may hold a password",
            field=field,
        )
    return str(proxy)


def environment_proxy(url: str) -> str | None:
    """The proxy that HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY give for `url`. Raises `ConfigurationError`."""
    origin = "/".join(url.split("/", 3)[:3])
    return _environment_proxy(origin, tuple(map(os.environ.get, _VARIABLES)))


@functools.lru_cache(maxsize=256)
def _environment_proxy(origin: str, variables: tuple[str | None, ...]) -> str | None:
    """Looked up once per host and state of the environment: it goes through all variables each time, which would be
    nearly half of what a poll costs."""
    found = select_proxy(origin, get_environ_proxies(origin, no_proxy=None))
    if not found:
        return None
    # "proxy.example:3128" is what many a machine has; with a user in it, nobody knows where the password begins.
    proxy = found if "://" in found or "@" in found else f"http://{found}"
    return checked_proxy(proxy, "HTTPS_PROXY, HTTP_PROXY or ALL_PROXY")
