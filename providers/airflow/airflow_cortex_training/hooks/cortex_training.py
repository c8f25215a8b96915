"""From an Airflow connection to a client of Cortex Training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.connection import get_async_connection, get_async_extra_dejson
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import amask_secret, mask_secret

from airflow_cortex_training.connection import ConnectionSettings, Target
from cortex_training.errors import ConfigurationError, CortexTrainingError

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from airflow.sdk import Connection

    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.client import CortexTrainingClient

_TEST_TIMEOUT_S = 10.0


class CortexTrainingHook(BaseHook):
    """Builds clients for one connection.

    Args:
        conn_id: connection of type ``cortex_training``.
        database, schema, endpoint: used instead of the connection's own.

    Every method that reads the connection raises `cortex_training.errors.ConfigurationError` when it does not exist
    or lacks a field; the message names the connection, the field and the fix.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "cortex_training_default"
    conn_type = "cortex_training"
    hook_name = "Cortex Training"

    def __init__(
        self,
        conn_id: str = default_conn_name,
        *,
        database: str | None = None,
        schema: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self.target = Target(conn_id, database, schema, endpoint)

    @classmethod
    def for_target(cls, target: Target) -> CortexTrainingHook:
        return cls(**target.to_kwargs())

    def get_conn(self) -> CortexTrainingClient:
        """A synchronous client. Close it, or use it as a context manager."""
        return self._client(self.settings())

    async def get_async_client(self, session: ClientSession | None = None) -> AsyncCortexTrainingClient:
        """An asynchronous client of the running loop; on a `session` given, which it does not close."""
        from cortex_training.aio import AsyncCortexTrainingClient

        settings = await self.asettings()
        return AsyncCortexTrainingClient.from_pat(**settings.client_arguments(), session=session)

    def settings(self) -> ConnectionSettings:
        try:
            connection = self.get_connection(self.conn_id)
        except AirflowNotFoundException as error:
            raise _unknown(self.conn_id) from error
        settings = self._read(connection, connection.extra_dejson)
        for secret in _secrets(settings):
            mask_secret(secret)
        return settings

    async def asettings(self) -> ConnectionSettings:
        try:
            connection = await get_async_connection(self.conn_id, hook=self)
        except AirflowNotFoundException as error:
            raise _unknown(self.conn_id) from error
        settings = self._read(connection, await get_async_extra_dejson(connection))
        for secret in _secrets(settings):
            await amask_secret(secret)
        return settings

    def test_connection(self) -> tuple[bool, str]:
        """Ask for the account's capacity, once. For the form's *Test* button."""
        try:
            settings = self.settings()
            with self._client(settings, request_timeout=(_TEST_TIMEOUT_S, _TEST_TIMEOUT_S), max_retries=0) as client:
                client.get_capacity()
        except CortexTrainingError as error:
            return False, str(error)
        return True, f"{settings.base_url} answers for {settings.database}.{settings.schema} ({settings.endpoint})"

    def _read(self, connection: Connection, extra: dict[str, Any]) -> ConnectionSettings:
        return ConnectionSettings.read(
            self.target,
            host=connection.host,
            port=connection.port,
            schema=connection.schema,
            password=connection.password,
            extra=extra,
        )

    @staticmethod
    def _client(settings: ConnectionSettings, **options: Any) -> CortexTrainingClient:
        from cortex_training.client import CortexTrainingClient

        return CortexTrainingClient.from_pat(**settings.client_arguments(), **options)


def _secrets(settings: ConnectionSettings) -> list[str]:
    # Airflow masks the password by itself, and fields of the extra only by their names: "proxy" is not one of those.
    return [secret for secret in (settings.pat, settings.proxy) if secret]


def _unknown(conn_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"connection {conn_id!r} does not exist: create it with type cortex_training in Admin > Connections, "
        f"or set AIRFLOW_CONN_{conn_id.upper()} where workers and triggerers run",
        field="conn_id",
    )
