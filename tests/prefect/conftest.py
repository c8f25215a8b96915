"""A real Prefect server for the session, and blocks that point at whatever a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import settings
from prefect_snowflake import SnowflakeConnector, SnowflakeCredentials

from cortex_training.local.models import model_folder
from demo import snowflake_server
from demo.prefect_server import PrefectServer
from demo.rows import load_rows, standard_library_rows
from demo.snowflake_server import SnowflakeServer
from prefect_cortex_training import CortexTrainingCredentials

PAT = "pat-0123456789-must-never-be-seen"


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


@pytest.fixture(scope="session")
def snowflake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SnowflakeServer]:
    """A Snowflake-compatible server with some of the demo's rows in TRAINING_EXAMPLES."""
    with SnowflakeServer(tmp_path_factory.mktemp("snowflake")) as server:
        rows = standard_library_rows()
        short = [row for row in rows if len(row.prompt) + len(row.completion) < 400]
        with server.connect() as connection:
            load_rows(connection, short[:300])
        yield server


@pytest.fixture
def stored_blocks(on_server: PrefectServer, local_service: Any, snowflake: SnowflakeServer) -> None:
    """Blocks `cortex` and `snowflake`, as a user makes them once."""
    block = CortexTrainingCredentials(host=local_service.base_url, database="TESTS", schema_="PUBLIC", pat=PAT)
    block.save("cortex", overwrite=True)
    account = SnowflakeCredentials(account="local", user="demo", password="demo")
    connector = SnowflakeConnector(
        credentials=account, database=snowflake_server.DATABASE, schema=snowflake_server.SCHEMA, warehouse="ANY"
    )
    connector.save("snowflake", overwrite=True)


@pytest.fixture
def connect_options(snowflake: SnowflakeServer) -> dict[str, Any]:
    arguments = snowflake.connection_arguments()
    return {name: arguments[name] for name in ("host", "port", "insecure_mode")}


@pytest.fixture
def flow_parameters(tmp_path: Path, stored_blocks: None, connect_options: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the flow that fine-tunes the tiny model in half a minute."""
    for folder in ("runs", "models"):
        (tmp_path / folder).mkdir()
    return {
        "root": str(tmp_path / "runs" / "nightly"),
        "models": str(tmp_path / "models"),
        "tokenizer": str(model_folder("tiny")),
        "model": "tiny",
        "cortex": "cortex",
        "snowflake": "snowflake",
        "connect_options": connect_options,
        "max_seq_len": 256,
        "overlong": "skip",
        "steps": 6,
        "micro_batch_size": 2,
        "save_every_steps": 3,
        "learning_rate": 5e-3,
        "warmup_steps": 1,
        "dtype": "float32",
        "max_tokens": 8,
    }
