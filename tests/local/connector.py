"""Services that answer the real Snowflake connector, and connections to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import RunningService


def connection_arguments(service: RunningService, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of ``snowflake.connector.connect``."""
    address = urlsplit(service.base_url)
    arguments = {
        "account": "local",
        "user": "ann",
        "password": "any",
        "host": address.hostname,
        "port": address.port,
        "protocol": address.scheme,
        "database": service.database,
        "schema": service.schema,
        "disable_ocsp_checks": True,
        **changes,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def connect(service: RunningService, **changes: Any) -> Any:
    import snowflake.connector

    return snowflake.connector.connect(**connection_arguments(service, **changes))


def write_profile(folder: Path, service: RunningService, **changes: Any) -> Path:
    """``connections.toml`` in `folder` with the profile ``local``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "connections.toml"
    with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        file.write("[local]\n")
        for name, value in connection_arguments(service, **changes).items():
            file.write(f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n")
    return folder


@contextmanager
def trusted(service: RunningService) -> Iterator[None]:
    """The connector takes the certificates it trusts from the environment alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUESTS_CA_BUNDLE", service.ready["ca_bundle"])
        yield
