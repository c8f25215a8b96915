"""The way to the service: proxies and certificate authorities, from settings and environment.

Both transports leave their own reading of the environment switched off, because it would also read netrc, which
replaces the credential. What the environment says about proxies and CA bundles is read here instead, for both alike.
"""

from __future__ import annotations

import functools
import os

from requests.utils import get_environ_proxies, select_proxy

from cortex_training.settings import ClientSettings

_PROXY_VARIABLES = tuple(
    spelling for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for spelling in (name, name.upper())
)
_BUNDLE_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def proxy_for(settings: ClientSettings, url: str) -> str | None:
    """The proxy for `url`: the one configured, else what HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY say."""
    if settings.proxy is not None:
        return settings.proxy
    origin = "/".join(url.split("/", 3)[:3])
    return _environment_proxy(origin, tuple(map(os.environ.get, _PROXY_VARIABLES)))


@functools.lru_cache(maxsize=256)
def _environment_proxy(origin: str, variables: tuple[str | None, ...]) -> str | None:
    """Looked up once per host and state of the environment: it goes through all variables each time, which would be
    nearly half of what a poll costs."""
    found = select_proxy(origin, get_environ_proxies(origin, no_proxy=None))
    return str(found) if found else None


def ca_file(settings: ClientSettings) -> str | None:
    """The CA bundle to verify with, None for the default one. Without verification there is none."""
    if not settings.verify_ssl:
        return None
    if settings.ca_bundle is not None:
        return settings.ca_bundle
    return next((os.environ[name] for name in _BUNDLE_VARIABLES if os.environ.get(name)), None)
