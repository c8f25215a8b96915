"""The block that knows where the service is and how to get in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from prefect.blocks.abstract import CredentialsBlock
from pydantic import AliasChoices, Field, HttpUrl, SecretStr, model_validator

from cortex_training.errors import ConfigurationError
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.patience import waits_for_server
from prefect_cortex_training.snowflake import aload_snowflake_credentials

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.auth import SnowflakeSessionAuth
    from cortex_training.client import CortexTrainingClient

WAYS_IN = ("pat", "connection_name", "snowflake_credentials")

LOGO_URL = HttpUrl(
    "https://cdn.sanity.io/images/3ugk85nk/production/bd359de0b4be76c2254bd329fe3a267a1a3879c2-250x250.png"
)
"""The service's own mark as Prefect's catalogue serves it for its Snowflake blocks."""

DOCUMENTATION_URL = HttpUrl("https://docs.snowflake.com/en/user-guide/snowflake-cortex/overview")


class CortexTrainingCredentials(CredentialsBlock):
    """
    Connects to a Snowflake Cortex Training endpoint: with a programmatic access token, with a connection profile of the
    Snowflake connector, or with a credentials block of prefect-snowflake.

    Example:
        Load stored credentials and list the account's jobs:
        ```python
        from prefect_cortex_training import CortexTrainingCredentials

        credentials = CortexTrainingCredentials.load("BLOCK_NAME")
        with credentials.get_client() as client:
            print(client.list_jobs())
        ```
    """

    _block_type_name = "Cortex Training Credentials"
    _block_type_slug = "cortex-training-credentials"
    _logo_url = LOGO_URL
    _documentation_url = DOCUMENTATION_URL

    host: str | None = Field(
        default=None,
        description="Account host, or the full URL of the service with scheme and port; needed with a token.",
        examples=["myorg-myaccount.snowflakecomputing.com", "http://127.0.0.1:8080"],
    )
    database: str | None = Field(
        default=None, description="Database that holds the endpoint; a connection profile may name it instead."
    )
    schema_: str | None = Field(
        default=None,
        serialization_alias="schema",
        # Blocks are dumped with and without aliases; both forms must load.
        validation_alias=AliasChoices("schema_", "schema"),
        description="Schema that holds the endpoint; without it the profile's, or PUBLIC.",
    )
    endpoint: str = Field(default="cortex-training", description="Name of the endpoint below the schema.")
    pat: SecretStr | None = Field(
        default=None, title="Programmatic access token", description="Programmatic access token."
    )
    verify_ssl: bool = Field(default=True, description="Whether the service's certificate is checked.")
    ca_bundle: str | None = Field(
        default=None, description="Path of a PEM file with the certificate authorities to trust."
    )
    proxy: SecretStr | None = Field(
        default=None, description="URL of an HTTP proxy, which may hold a user name and password."
    )
    connection_name: str | None = Field(
        default=None,
        title="Snowflake connection profile",
        description="Profile in connections.toml of the machine that runs the flow, instead of a token.",
    )
    snowflake_credentials: str | None = Field(
        default=None,
        title="Snowflake Credentials block",
        description="Name of a Snowflake Credentials block of prefect-snowflake, instead of a token.",
    )

    @model_validator(mode="after")
    def _has_one_way_in(self) -> Self:
        given = [name for name in WAYS_IN if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(WAYS_IN)}; got {' and '.join(given) or 'none'}")
        if self.pat is not None and not self.host:
            raise ValueError("pat needs host, the account that the token is for")
        if self.connection_name is None and not self.database:
            raise ValueError(f"{given[0]} needs database, the one that holds the endpoint")
        return self

    def get_client(self, **options: Any) -> CortexTrainingClient:
        """A blocking client; `options` go to its constructor, e.g. ``poll_interval``. Close it, or use it as a context
        manager.
        """
        from cortex_training.client import CortexTrainingClient

        if self.pat is not None:
            return CortexTrainingClient.from_pat(**self._token_connection(self.pat), **options)
        block = run_to_end(self._snowflake_block())
        return CortexTrainingClient.from_session(self._open_session(block), **self._session_settings(), **options)

    async def aget_client(self, **options: Any) -> AsyncCortexTrainingClient:
        """An asynchronous client for the running loop: ``async with await credentials.aget_client() as client``."""
        from cortex_training.aio import AsyncCortexTrainingClient

        if self.pat is not None:
            return AsyncCortexTrainingClient.from_pat(**self._token_connection(self.pat), **options)
        block = await self._snowflake_block()
        session = await asyncio.to_thread(self._open_session, block)
        return AsyncCortexTrainingClient.from_session(session, **self._session_settings(), **options)

    def _token_connection(self, pat: SecretStr) -> dict[str, Any]:
        where = {"host": self.host, "database": self.database, "schema": self.schema_ or "PUBLIC"}
        return {"pat": pat.get_secret_value(), **where, **self._transport()}

    def _session_settings(self) -> dict[str, Any]:
        return {"database": self.database, "schema": self.schema_, **self._transport()}

    def _transport(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "verify_ssl": self.verify_ssl,
            "ca_bundle": self.ca_bundle,
            "proxy": self.proxy.get_secret_value() if self.proxy else None,
        }

    async def _snowflake_block(self) -> Any:
        if self.snowflake_credentials is None:
            return None
        return await aload_snowflake_credentials(self.snowflake_credentials)

    def _open_session(self, block: Any) -> SnowflakeSessionAuth:
        """Log in to Snowflake: seconds, and a session that the client closes."""
        from cortex_training.auth import SnowflakeSessionAuth

        if block is None:
            return SnowflakeSessionAuth(self.connection_name)
        where = {"database": self.database, "schema": self.schema_}
        options = {name: value for name, value in where.items() if value is not None}
        if self.host:
            options |= parts_of_host(self.host)
        described = f"the Snowflake Credentials block {self.snowflake_credentials!r}"
        return SnowflakeSessionAuth(connect=partial(block.get_client, **options), described=described)


def parts_of_host(host: str) -> dict[str, Any]:
    """The Snowflake connector's arguments for a host, or for a URL with scheme and port."""
    if "://" not in host:
        return {"host": host}
    parts = urlsplit(host)
    named = {"protocol": parts.scheme, "host": parts.hostname, "port": parts.port}
    return {name: value for name, value in named.items() if value is not None}


@waits_for_server
async def load_credentials(name: str) -> CortexTrainingCredentials:
    """The stored block called `name`; raises ConfigurationError when the Prefect server has none of that name."""
    try:
        return await CortexTrainingCredentials.aload(name)
    except ValueError as error:
        raise ConfigurationError(
            f"credentials: the Prefect server has no usable Cortex Training Credentials block called {name!r} "
            f"({error}). Register the block type with `prefect block register -m prefect_cortex_training`, then "
            "create the block in the UI or with CortexTrainingCredentials(host=..., database=..., "
            f"pat=...).save({name!r})",
            field="credentials",
        ) from None


@asynccontextmanager
async def connected(name: str, **options: Any) -> AsyncIterator[AsyncCortexTrainingClient]:
    """A client of the service that the block called `name` describes, closed at the end; `options` are its
    constructor's.
    """
    credentials = await load_credentials(name)
    async with await credentials.aget_client(**options) as client:
        yield client
