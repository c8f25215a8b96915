"""The client for event loops, on aiohttp: the methods of `cortex_training.client` as coroutines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from cortex_training import artifacts
from cortex_training._aiohttp_driver import AiohttpDriver
from cortex_training.answers import (
    Accepted,
    Capacity,
    Checkpoint,
    CheckpointExport,
    CreatedJob,
    DownloadedArtifact,
    ExecutionLog,
    ExperimentRun,
    Job,
    LogPage,
    RequestResult,
    RequestStatus,
)
from cortex_training.auth import Auth, PatAuth, SnowflakeSessionAuth
from cortex_training.config import CheckpointType, Hardware, SubJobConfig
from cortex_training.protocol import checkpoints, generation, jobs, operations, polling, statements, training
from cortex_training.protocol.calls import Permit
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import clock_skew_s
from cortex_training.protocol.generation import Prompts
from cortex_training.protocol.jobs import Progress
from cortex_training.protocol.logs import LogStream
from cortex_training.protocol.streams import EventStream
from cortex_training.settings import ClientSettings, checked_settings, settings_of_profile, url_of_host
from cortex_training.telemetry import observed, telemetry_of

T = TypeVar("T")


@observed
class AsyncCortexTrainingClient:
    """The methods of `CortexTrainingClient` as coroutines; see there for arguments, results and errors.

    Many waits share one client: it has one `aiohttp.ClientSession`, made in the event loop that first uses it, or the
    `session` it is given, which it does not close. Large frames are hashed and decoded in threads, not in the loop.
    """

    def __init__(
        self,
        base_url: str,
        database: str,
        schema: str,
        endpoint: str = "cortex-training",
        poll_interval: float | None = None,
        poll_timeout: float = 1800.0,
        poll_backoff_multiplier: float | None = None,
        poll_max_interval: float | None = None,
        pool_maxsize: int = 1024,
        max_retries: int | None = None,
        request_timeout: float | tuple[float, float] = (30.0, 600.0),
        *,
        retry_budget_s: float = 120.0,
        auth: Auth | None = None,
        verify_ssl: bool = True,
        ca_bundle: str | None = None,
        proxy: str | None = None,
        token_prompts: str = "json",
        telemetry_timeout: float | None = None,
        create_database: bool = False,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._configure(
            checked_settings(
                base_url=base_url,
                database=database,
                schema=schema,
                endpoint=endpoint,
                poll_interval=poll_interval,
                poll_timeout=poll_timeout,
                poll_backoff_multiplier=poll_backoff_multiplier,
                poll_max_interval=poll_max_interval,
                pool_maxsize=pool_maxsize,
                max_retries=max_retries,
                request_timeout=request_timeout,
                retry_budget_s=retry_budget_s,
                auth=auth,
                verify_ssl=verify_ssl,
                ca_bundle=ca_bundle,
                proxy=proxy,
                token_prompts=token_prompts,
                telemetry_timeout=telemetry_timeout,
                create_database=create_database,
            ),
            session,
        )

    def _configure(self, settings: ClientSettings, session: aiohttp.ClientSession | None) -> None:
        self._settings = settings
        self._opened_session: SnowflakeSessionAuth | None = None
        self._telemetry = telemetry_of(settings)
        self._context = Context(settings.policy)
        self._driver = AiohttpDriver(settings, session)
        self._run = self._driver.run

    @classmethod
    def from_pat(
        cls,
        host: str,
        pat: str,
        database: str,
        schema: str,
        endpoint: str = "cortex-training",
        verify_ssl: bool = True,
        *,
        telemetry_timeout: float = 3.0,
        **options: Any,
    ) -> Self:
        """A client with a programmatic access token. `host` is a host name or a URL with scheme and port; `options`
        are those of the constructor."""
        return cls(
            url_of_host(host),
            database,
            schema,
            endpoint,
            auth=PatAuth(pat),
            verify_ssl=verify_ssl,
            telemetry_timeout=telemetry_timeout,
            **options,
        )

    @classmethod
    def from_connection_name(
        cls,
        connection_name: str | None = None,
        *,
        database: str | None = None,
        schema: str | None = None,
        endpoint: str = "cortex-training",
        verify_ssl: bool = True,
        telemetry_timeout: float = 3.0,
        **options: Any,
    ) -> Self:
        """A client with the session of a Snowflake connection profile (None: the default profile).

        Database and schema are the profile's unless given; a profile without a schema means PUBLIC. Raises
        `SnowflakeProfileError` when the profile cannot be opened.
        """
        return cls.from_session(
            SnowflakeSessionAuth(connection_name),
            database=database,
            schema=schema,
            endpoint=endpoint,
            verify_ssl=verify_ssl,
            telemetry_timeout=telemetry_timeout,
            **options,
        )

    @classmethod
    def from_session(
        cls,
        session: SnowflakeSessionAuth,
        *,
        database: str | None = None,
        schema: str | None = None,
        telemetry_timeout: float = 3.0,
        **options: Any,
    ) -> Self:
        """A client with a Snowflake session, which it closes in the end. Database and schema are the session's unless
        given.
        """
        base_url, database, schema = settings_of_profile(session, database, schema)
        client = cls(base_url, database, schema, auth=session, telemetry_timeout=telemetry_timeout, **options)
        client._opened_session = session
        return client

    # Jobs

    async def create_job(
        self,
        sub_jobs: Sequence[SubJobConfig],
        job_id: str | None = None,
        experiment_name: str | None = None,
        hardware: Hardware | str | None = None,
        idle_timeout_seconds: int | None = None,
        pending_timeout_seconds: int | None = None,
    ) -> str:
        """As `CortexTrainingClient.create_job`."""
        return await self._run(
            jobs.create_job(
                self._context,
                sub_jobs,
                job_id,
                experiment_name,
                hardware,
                idle_timeout_seconds,
                pending_timeout_seconds,
            )
        )

    async def create_job_from_body(self, body: Mapping[str, Any]) -> CreatedJob:
        """As `CortexTrainingClient.create_job_from_body`."""
        return await self._run(jobs.create_job_from_body(self._context, body))

    async def get_job(self, job_id: str) -> Job:
        """As `CortexTrainingClient.get_job`."""
        return await self._run(jobs.get_job(self._context, job_id))

    async def list_jobs(self, status: str | None = None) -> list[Job]:
        """As `CortexTrainingClient.list_jobs`."""
        return await self._run(jobs.list_jobs(self._context, status))

    async def wait_for_job(self, job_id: str, *, timeout_s: float | None = None, progress: Progress = None) -> Job:
        """As `CortexTrainingClient.wait_for_job`."""
        return await self._run(jobs.wait_for_job(self._context, job_id, timeout_s=timeout_s, progress=progress))

    async def cancel_job(self, job_id: str) -> None:
        """As `CortexTrainingClient.cancel_job`."""
        await self._run(jobs.cancel_job(self._context, job_id))

    async def get_capacity(self, hardware: Hardware | str | None = None) -> Capacity:
        """As `CortexTrainingClient.get_capacity`."""
        return await self._run(jobs.get_capacity(self._context, hardware))

    async def get_experiment_run(self, job_id: str) -> ExperimentRun:
        """As `CortexTrainingClient.get_experiment_run`."""
        return await self._run(jobs.get_experiment_run(self._context, job_id))

    # Training

    async def forward_backward(
        self, job_id: str, data: bytes, *, chunk_group_id: str | None = None, permit: Permit = None
    ) -> str:
        """As `CortexTrainingClient.forward_backward`."""
        return await self._run(
            training.forward_backward(self._context, job_id, data, chunk_group_id=chunk_group_id, permit=permit)
        )

    async def step(self, job_id: str, learning_rate: float | None = None, *, permit: Permit = None) -> str:
        """As `CortexTrainingClient.step`."""
        return await self._run(training.step(self._context, job_id, learning_rate, permit=permit))

    async def save(
        self,
        job_id: str,
        checkpoint_id: str | None = None,
        checkpoint_type: CheckpointType | str | None = None,
        *,
        permit: Permit = None,
    ) -> str:
        """As `CortexTrainingClient.save`."""
        return await self._run(training.save(self._context, job_id, checkpoint_id, checkpoint_type, permit=permit))

    async def load(
        self,
        job_id: str,
        checkpoint_id: str,
        source_job_id: str | None = None,
        *,
        target_sub_job_id: str | None = None,
        permit: Permit = None,
    ) -> str:
        """As `CortexTrainingClient.load`."""
        return await self._run(
            training.load(
                self._context,
                job_id,
                checkpoint_id,
                source_job_id,
                target_sub_job_id=target_sub_job_id,
                permit=permit,
            )
        )

    async def weight_sync(
        self,
        job_id: str,
        source_sub_job_id: str,
        target_sub_job_ids: Sequence[str],
        *,
        weight_format: str | None = None,
        bucket_size: int | None = None,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        permit: Permit = None,
    ) -> str:
        """As `CortexTrainingClient.weight_sync`."""
        return await self._run(
            training.weight_sync(
                self._context,
                job_id,
                source_sub_job_id,
                target_sub_job_ids,
                weight_format=weight_format,
                bucket_size=bucket_size,
                sub_job_id=sub_job_id,
                sub_job_type=sub_job_type,
                permit=permit,
            )
        )

    # Sampling

    async def generate(
        self,
        job_id: str,
        prompts: Prompts,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool | None = None,
        *,
        permit: Permit = None,
    ) -> str:
        """As `CortexTrainingClient.generate`."""
        return await self._run(
            generation.generate(self._context, job_id, prompts, sampling_params, routing_key, strict, permit=permit)
        )

    async def generate_stream(
        self,
        job_id: str,
        prompts: Prompts,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool | None = None,
        *,
        permit: Permit = None,
    ) -> Accepted:
        """As `CortexTrainingClient.generate_stream`."""
        return await self._run(
            generation.generate_stream(
                self._context, job_id, prompts, sampling_params, routing_key, strict, permit=permit
            )
        )

    # Requests

    async def poll_request(self, job_id: str, request_id: str, *, timeout_s: float | None = None) -> RequestResult:
        """As `CortexTrainingClient.poll_request`."""
        return await self._run(polling.poll_request(self._context, job_id, request_id, timeout_s=timeout_s))

    async def get_request_status(
        self, job_id: str, request_id: str, max_events: int | None = None, cursor: str | None = None
    ) -> RequestStatus:
        """As `CortexTrainingClient.get_request_status`."""
        return await self._run(polling.get_request_status(self._context, job_id, request_id, max_events, cursor))

    async def stream_request(
        self, job_id: str, request_id: str, *, timeout_s: float | None = None
    ) -> AsyncIterator[Any]:
        """As `CortexTrainingClient.stream_request`."""
        stream = EventStream(self._context, job_id, request_id, timeout_s)
        while (events := await self._run(stream.next_events())) is not None:
            for event in events:
                yield event

    async def cancel_request(
        self, job_id: str, request_id: str, *, sub_job_id: str | None = None, sub_job_type: str | None = None
    ) -> dict[str, Any]:
        """As `CortexTrainingClient.cancel_request`."""
        return await self._run(
            operations.cancel_request(
                self._context, job_id, request_id, sub_job_id=sub_job_id, sub_job_type=sub_job_type
            )
        )

    # Checkpoints

    async def list_checkpoints(self, job_id: str) -> list[Checkpoint]:
        """As `CortexTrainingClient.list_checkpoints`."""
        return await self._run(checkpoints.list_checkpoints(self._context, job_id))

    async def export_checkpoint(self, job_id: str, checkpoint_id: str) -> CheckpointExport:
        """As `CortexTrainingClient.export_checkpoint`."""
        return await self._run(checkpoints.export_checkpoint(self._context, job_id, checkpoint_id))

    async def delete_checkpoint(self, job_id: str, checkpoint_id: str) -> None:
        """As `CortexTrainingClient.delete_checkpoint`."""
        await self._run(checkpoints.delete_checkpoint(self._context, job_id, checkpoint_id))

    # Logs

    async def tail_logs(
        self,
        job_id: str,
        *,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        cursor: str | None = None,
        max_lines: int | None = None,
    ) -> LogPage:
        """As `CortexTrainingClient.tail_logs`."""
        return await self._run(
            operations.tail_logs(
                self._context,
                job_id,
                sub_job_id=sub_job_id,
                sub_job_type=sub_job_type,
                cursor=cursor,
                max_lines=max_lines,
            )
        )

    async def stream_logs(
        self,
        job_id: str,
        *,
        follow: bool = True,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        cursor: str | None = None,
        max_lines: int | None = None,
        poll_interval: float | None = None,
    ) -> AsyncIterator[Any]:
        """As `CortexTrainingClient.stream_logs`."""
        stream = LogStream(self._context, job_id, sub_job_id, sub_job_type, cursor, max_lines, follow, poll_interval)
        while (entries := await self._run(stream.next_entries())) is not None:
            for entry in entries:
                yield entry

    # Artifacts

    async def fetch_execution_logs(self, job_id: str) -> list[ExecutionLog]:
        """As `CortexTrainingClient.fetch_execution_logs`, in a thread."""
        return await self._on_stage(job_id, lambda stage: artifacts.fetch_execution_logs(stage, job_id))

    async def download_stdout_logs(
        self, job_id: str, output_dir: str | os.PathLike[str], *, resume: bool = False
    ) -> list[DownloadedArtifact]:
        """As `CortexTrainingClient.download_stdout_logs`, in a thread."""
        return await self._on_stage(
            job_id,
            lambda stage: artifacts.download_chunked(stage, artifacts.STDOUT, job_id, output_dir, resume=resume),
        )

    async def download_metrics(
        self, job_id: str, output_dir: str | os.PathLike[str], *, resume: bool = False
    ) -> list[DownloadedArtifact]:
        """As `CortexTrainingClient.download_metrics`, in a thread."""
        return await self._on_stage(
            job_id,
            lambda stage: artifacts.download_chunked(stage, artifacts.METRICS, job_id, output_dir, resume=resume),
        )

    async def _on_stage(self, job_id: str, work: Callable[[artifacts.Stage], list[T]]) -> list[T]:
        run = await self.get_experiment_run(job_id)
        query = artifacts.stage_query(self._settings, run)
        row = await self._run(statements.first_row(self._context, query, self.database, self.schema)) if query else None

        def opened() -> list[T]:
            with artifacts.opened_stage(self._settings, run, row) as stage:
                return work(stage)

        return await asyncio.to_thread(opened)

    # Other operations

    async def forward(
        self,
        job_id: str,
        payload: Any = None,
        *,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        route: str = "operation",
        permit: Permit = None,
    ) -> dict[str, Any]:
        """As `CortexTrainingClient.forward`."""
        return await self._run(
            operations.forward(
                self._context,
                job_id,
                payload,
                sub_job_id=sub_job_id,
                sub_job_type=sub_job_type,
                route=route,
                permit=permit,
            )
        )

    fwd = forward
    fwd_no_grad = forward

    async def bootstrap_router_replay(
        self,
        job_id: str,
        source_sub_job_id: str,
        target_sub_job_id: str,
        *,
        max_cache_bytes: int | None = None,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
    ) -> dict[str, Any]:
        """As `CortexTrainingClient.bootstrap_router_replay`."""
        return await self._run(
            operations.bootstrap_router_replay(
                self._context,
                job_id,
                source_sub_job_id,
                target_sub_job_id,
                max_cache_bytes=max_cache_bytes,
                sub_job_id=sub_job_id,
                sub_job_type=sub_job_type,
            )
        )

    async def router_replay_discard(
        self,
        job_id: str,
        sample_ids: Sequence[str] | None = None,
        *,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As `CortexTrainingClient.router_replay_discard`."""
        return await self._run(
            operations.router_replay_discard(
                self._context, job_id, sample_ids, sub_job_id=sub_job_id, sub_job_type=sub_job_type, extra=extra
            )
        )

    async def reset_prefix_cache(
        self,
        job_id: str,
        *,
        sub_job_id: str | None = None,
        sub_job_type: str | None = "sampling",
        drain: bool = True,
        timeout_s: float = 60.0,
        retry_interval_s: float = 0.1,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As `CortexTrainingClient.reset_prefix_cache`."""
        return await self._run(
            operations.reset_prefix_cache(
                self._context,
                job_id,
                sub_job_id=sub_job_id,
                sub_job_type=sub_job_type,
                drain=drain,
                timeout_s=timeout_s,
                retry_interval_s=retry_interval_s,
                extra=extra,
            )
        )

    # The object itself

    async def emit_metric(self, operation: str, value: Any = 1, *, attributes: Mapping[str, Any] | None = None) -> None:
        """As `CortexTrainingClient.emit_metric`."""
        if self._telemetry is not None:
            self._telemetry.emit(operation, value, attributes)

    async def clock_skew_s(self) -> float | None:
        """As `CortexTrainingClient.clock_skew_s`."""
        return await self._run(clock_skew_s(self._context))

    @property
    def base_url(self) -> str:
        return self._settings.base_url

    @property
    def database(self) -> str:
        return self._settings.database

    @property
    def schema(self) -> str:
        return self._settings.schema

    @property
    def endpoint(self) -> str:
        return self._settings.endpoint

    async def aclose(self) -> None:
        """Close what this client opened: connections, unless the session is shared, and a profile's session."""
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.close)
        await self._driver.aclose()
        if self._opened_session is not None:
            await asyncio.to_thread(self._opened_session.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __getstate__(self) -> ClientSettings:
        return self._settings

    def __setstate__(self, settings: ClientSettings) -> None:
        self._configure(settings, None)
        if isinstance(settings.auth, SnowflakeSessionAuth):
            self._opened_session = settings.auth

    def __repr__(self) -> str:
        where = f"{self.base_url!r}, {self.database!r}, {self.schema!r}, {self.endpoint!r}"
        return f"{type(self).__name__}({where}, auth={self._settings.auth!r})"
