"""Snowflake connections, which belong to prefect-snowflake: found by name, with an error that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cortex_training.errors import ConfigurationError
from prefect_cortex_training.dispatch import dual, run_to_end

if TYPE_CHECKING:
    from prefect_snowflake import SnowflakeConnector  # type: ignore[import-untyped]


async def aload_snowflake_connector(name: str) -> SnowflakeConnector:
    """The stored `SnowflakeConnector` block called `name`; raises ConfigurationError when there is none."""
    try:
        from prefect_snowflake import SnowflakeConnector
    except ImportError as error:
        raise ConfigurationError(
            f"Snowflake is read through prefect-snowflake, which can't be imported ({error}); pip install "
            "prefect-snowflake"
        ) from error
    try:
        connector: Any = await SnowflakeConnector.aload(name)
    except ValueError as error:
        raise ConfigurationError(
            f"snowflake: the Prefect server has no usable Snowflake Connector block called {name!r} ({error}). "
            "Register the block type with `prefect block register -m prefect_snowflake`, then create the block in the "
            f"UI or with SnowflakeConnector(...).save({name!r})",
            field="snowflake",
        ) from None
    return connector


@dual(aload_snowflake_connector)
def load_snowflake_connector(name: str) -> SnowflakeConnector:
    """The stored `SnowflakeConnector` block called `name`; raises ConfigurationError when there is none."""
    return run_to_end(aload_snowflake_connector(name))
