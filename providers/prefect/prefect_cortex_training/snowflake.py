"""Snowflake connections, which belong to prefect-snowflake: found by name, with an error that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cortex_training.errors import ConfigurationError
from prefect_cortex_training.dispatch import dual, run_to_end

if TYPE_CHECKING:
    from prefect_snowflake import SnowflakeConnector, SnowflakeCredentials  # type: ignore[import-untyped]


async def aload_snowflake_connector(name: str) -> SnowflakeConnector:
    """The stored `SnowflakeConnector` block called `name`; raises ConfigurationError when there is none."""
    return await _load("SnowflakeConnector", "Snowflake Connector", name, field="snowflake")


@dual(aload_snowflake_connector)
def load_snowflake_connector(name: str) -> SnowflakeConnector:
    """The stored `SnowflakeConnector` block called `name`; raises ConfigurationError when there is none."""
    return run_to_end(aload_snowflake_connector(name))


async def aload_snowflake_credentials(name: str) -> SnowflakeCredentials:
    """The stored `SnowflakeCredentials` block called `name`; raises ConfigurationError when there is none."""
    return await _load("SnowflakeCredentials", "Snowflake Credentials", name, field="snowflake_credentials")


async def _load(kind: str, shown: str, name: str, *, field: str) -> Any:
    try:
        # Not before it is needed: with it comes the Snowflake connector.
        import prefect_snowflake
    except ImportError as error:
        raise ConfigurationError(
            f"Snowflake is reached through prefect-snowflake, which can't be imported ({error}); pip install "
            "'prefect-cortex-training[snowflake]'",
            field=field,
        ) from error
    try:
        return await getattr(prefect_snowflake, kind).aload(name)
    except ValueError as error:
        raise ConfigurationError(
            f"{field}: the Prefect server has no usable {shown} block called {name!r} ({error}). "
            "Register the block type with `prefect block register -m prefect_snowflake`, then create the block in the "
            f"UI or with {kind}(...).save({name!r})",
            field=field,
        ) from None
