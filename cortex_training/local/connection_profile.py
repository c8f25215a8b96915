"""The profile that makes the Snowflake connector, and whatever uses it, talk to this service."""

from __future__ import annotations

from urllib.parse import urlsplit

from cortex_training.local.settings import ServiceSettings


def connections_toml(base_url: str, settings: ServiceSettings) -> str:
    """A section for ``connections.toml``. A token the service was started with is not shown."""
    address = urlsplit(base_url)
    password = "the token this service was started with" if settings.token else "any"
    lines = [
        "[local]",
        'account = "local"',
        'user = "local"',
        f'password = "{password}"',
        f'host = "{address.hostname}"',
        f"port = {address.port}",
        f'protocol = "{address.scheme}"',
        'database = "LOCAL"',
        'schema = "PUBLIC"',
    ]
    if settings.tls:
        # No authority that publishes revocations stands behind a certificate that was made a moment ago.
        lines.append("disable_ocsp_checks = true")
    return "\n".join(lines)
