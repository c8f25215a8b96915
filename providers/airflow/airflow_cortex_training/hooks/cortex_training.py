"""From an Airflow connection to a client of Cortex Training."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.connection import get_async_connection, get_async_extra_dejson
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import amask_secret, mask_secret

from airflow_cortex_training.connection import (
    CONN_TYPE,
    ConnectionSettings,
    Target,
    in_the_form,
    require_type,
    snowflake_conn_id,
)
from airflow_cortex_training.snowflake_login import SnowflakeLogin
from cortex_training.errors import ConfigurationError, CortexTrainingError
from cortex_training.settings import ClientSettings

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from airflow.sdk import Connection

    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.client import CortexTrainingClient

LOOK_TIMEOUTS_S = (15.0, 30.0)
"""Seconds to connect and to read, for one look of many."""

_TEST_TIMEOUT_S = 10.0


class CortexTrainingHook(BaseHook):
    """Builds clients for one connection.

    Args:
        conn_id: connection of type ``cortex_training``.
        database, schema, endpoint: used instead of the connection's own.

    Every method that reads the connection raises `cortex_training.errors.ConfigurationError` when it does not exist,
    is of another type or lacks a field; the message names the connection, the field and the fix.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "cortex_training_default"
    conn_type = CONN_TYPE
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

    def get_conn(self, *, patience_s: float | None = None) -> CortexTrainingClient:
        """A synchronous client. Close it, or use it as a context manager.

        `patience_s`: how long a call is tried again when nobody answers, seconds; a limit of the caller's own beside
        the client's.
        """
        settings = self.settings()
        if patience_s is None:
            return self._client(settings)
        return self._client(settings, retry_budget_s=min(patience_s, ClientSettings.retry_budget_s))

    def get_watching_conn(self) -> CortexTrainingClient:
        """A client for who looks again by himself, at his own pace: every call is tried once, and not for long."""
        return self._client(self.settings(), request_timeout=LOOK_TIMEOUTS_S, max_retries=0)

    async def get_async_client(self, session: ClientSession | None = None, **options: Any) -> AsyncCortexTrainingClient:
        """An asynchronous client of the running loop; on a `session` given, which it does not close. `options` are
        those of the client."""
        from cortex_training.aio import AsyncCortexTrainingClient

        settings = await self.asettings()
        # In a thread: a reused OAuth login asks for its first token here.
        arguments = await asyncio.to_thread(settings.client_arguments)
        return AsyncCortexTrainingClient(**arguments, session=session, **options)

    def settings(self) -> ConnectionSettings:
        connection = self._connection(self.conn_id)
        require_type(self.conn_id, connection.conn_type)
        extra, login = connection.extra_dejson, None
        reused = snowflake_conn_id(self.conn_id, extra)
        if reused:
            other = self._connection(reused)
            login = _login(reused, other, other.extra_dejson)
        settings = self._read(connection, extra, login)
        for secret in settings.secrets:
            mask_secret(secret)
        return settings

    async def asettings(self) -> ConnectionSettings:
        connection = await self._aconnection(self.conn_id)
        require_type(self.conn_id, connection.conn_type)
        extra, login = await get_async_extra_dejson(connection), None
        reused = snowflake_conn_id(self.conn_id, extra)
        if reused:
            other = await self._aconnection(reused)
            login = _login(reused, other, await get_async_extra_dejson(other))
        settings = self._read(connection, extra, login)
        for secret in settings.secrets:
            await amask_secret(secret)
        return settings

    def _connection(self, conn_id: str) -> Connection:
        try:
            return self.get_connection(conn_id)
        except AirflowNotFoundException as error:
            raise _unknown(conn_id) from error

    async def _aconnection(self, conn_id: str) -> Connection:
        try:
            return await get_async_connection(conn_id, hook=self)
        except AirflowNotFoundException as error:
            raise _unknown(conn_id) from error

    def test_connection(self) -> tuple[bool, str]:
        """Ask for the account's capacity, once. For the form's *Test* button."""
        try:
            settings = self.settings()
            with self._client(settings, request_timeout=(_TEST_TIMEOUT_S, _TEST_TIMEOUT_S), max_retries=0) as client:
                client.get_capacity()
        except CortexTrainingError as error:
            return False, in_the_form(str(error), self.conn_id)
        return True, f"{settings.base_url} answers for {settings.database}.{settings.schema} ({settings.endpoint})"

    def _read(self, connection: Connection, extra: dict[str, Any], login: SnowflakeLogin | None) -> ConnectionSettings:
        return ConnectionSettings.read(
            self.target,
            host=connection.host,
            port=connection.port,
            schema=connection.schema,
            password=connection.password,
            extra=extra,
            login=login,
        )

    @staticmethod
    def _client(settings: ConnectionSettings, **options: Any) -> CortexTrainingClient:
        from cortex_training.client import CortexTrainingClient

        return CortexTrainingClient(**settings.client_arguments(), **options)


def _login(conn_id: str, connection: Connection, extra: dict[str, Any]) -> SnowflakeLogin:
    return SnowflakeLogin.read(
        conn_id,
        conn_type=connection.conn_type,
        login=connection.login,
        password=connection.password,
        schema=connection.schema,
        extra=extra,
    )


def _unknown(conn_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"connection {conn_id!r} does not exist: create it in Admin > Connections (type cortex_training; snowflake for "
        f"a login to reuse), or set AIRFLOW_CONN_{conn_id.upper()} where workers and triggerers run",
        field="conn_id",
    )
