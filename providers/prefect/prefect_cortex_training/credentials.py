"""The block that knows where the service is and how to get in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prefect.blocks.abstract import CredentialsBlock
from pydantic import AliasChoices, Field, HttpUrl, SecretStr

from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.client import CortexTrainingClient

LOGO_URL = HttpUrl(
    "https://cdn.sanity.io/images/3ugk85nk/production/bd359de0b4be76c2254bd329fe3a267a1a3879c2-250x250.png"
)
"""The service's own mark as Prefect's catalogue serves it for its Snowflake blocks."""

DOCUMENTATION_URL = HttpUrl("https://docs.snowflake.com/en/user-guide/snowflake-cortex/overview")


class CortexTrainingCredentials(CredentialsBlock):
    """
    Connects to a Snowflake Cortex Training endpoint with a programmatic access token.

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

    host: str = Field(
        default=...,
        description="Account host, or the full URL of the service with scheme and port.",
        examples=["myorg-myaccount.snowflakecomputing.com", "http://127.0.0.1:8080"],
    )
    database: str = Field(default=..., description="Database that holds the endpoint.")
    schema_: str = Field(
        default="PUBLIC",
        serialization_alias="schema",
        # Blocks are dumped with and without aliases; both forms must load.
        validation_alias=AliasChoices("schema_", "schema"),
        description="Schema that holds the endpoint.",
    )
    endpoint: str = Field(default="cortex-training", description="Name of the endpoint below the schema.")
    pat: SecretStr = Field(default=..., title="Programmatic access token", description="Programmatic access token.")
    verify_ssl: bool = Field(default=True, description="Whether the service's certificate is checked.")
    ca_bundle: str | None = Field(
        default=None, description="Path of a PEM file with the certificate authorities to trust."
    )
    proxy: SecretStr | None = Field(
        default=None, description="URL of an HTTP proxy, which may hold a user name and password."
    )

    def get_client(self, **options: Any) -> CortexTrainingClient:
        """A blocking client; `options` go to its constructor, e.g. ``poll_interval``. Close it, or use it as a context
        manager.
        """
        from cortex_training.client import CortexTrainingClient

        return CortexTrainingClient.from_pat(**self._connection(), **options)

    async def aget_client(self, **options: Any) -> AsyncCortexTrainingClient:
        """An asynchronous client for the running loop: ``async with await credentials.aget_client() as client``."""
        from cortex_training.aio import AsyncCortexTrainingClient

        return AsyncCortexTrainingClient.from_pat(**self._connection(), **options)

    def _connection(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "pat": self.pat.get_secret_value(),
            "database": self.database,
            "schema": self.schema_,
            "endpoint": self.endpoint,
            "verify_ssl": self.verify_ssl,
            "ca_bundle": self.ca_bundle,
            "proxy": self.proxy.get_secret_value() if self.proxy else None,
        }


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
