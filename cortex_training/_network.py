"""The way to the service: proxies and certificate authorities, from settings and environment.

Both transports leave their own reading of the environment switched off, because it would also read netrc, which
replaces the credential. What the environment says about proxies and CA bundles is read here instead, for both alike.
"""

from __future__ import annotations

import os

from cortex_training.proxies import environment_proxy
from cortex_training.settings import ClientSettings

_BUNDLE_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def proxy_for(settings: ClientSettings, url: str) -> str | None:
    """The proxy for `url`: the one configured, else what HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY say."""
    return settings.proxy if settings.proxy is not None else environment_proxy(url)


def ca_file(settings: ClientSettings) -> str | None:
    """The CA bundle to verify with, None for the default one. Without verification there is none."""
    if not settings.verify_ssl:
        return None
    if settings.ca_bundle is not None:
        return settings.ca_bundle
    return next((os.environ[name] for name in _BUNDLE_VARIABLES if os.environ.get(name)), None)
