from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.snowflake_server import SnowflakeServer


@pytest.fixture(scope="session")
def snowflake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SnowflakeServer]:
    with SnowflakeServer(tmp_path_factory.mktemp("snowflake")) as server:
        yield server
