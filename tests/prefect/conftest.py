"""A real Prefect server for the session, and blocks that point at whatever a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import settings

from demo.prefect_server import PrefectServer


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One server for all tests: an empty one takes twenty seconds to start."""
    with PrefectServer(tmp_path_factory.mktemp("prefect-home")) as server:
        yield server


@pytest.fixture
def results_folder(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def on_server(prefect_server: PrefectServer, results_folder: Path) -> Iterator[PrefectServer]:
    """Flows of this process run against the server, with task results in a folder of the test's own."""
    values = {
        settings.PREFECT_API_URL: prefect_server.api_url,
        settings.PREFECT_HOME: prefect_server.home,
        settings.PREFECT_LOCAL_STORAGE_PATH: results_folder,
        settings.PREFECT_SERVER_ANALYTICS_ENABLED: False,
        # The log worker flushes at exit, when the server is gone, and waits a minute for it.
        settings.PREFECT_LOGGING_TO_API_ENABLED: False,
    }
    with settings.temporary_settings(values):
        yield prefect_server
