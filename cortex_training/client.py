"""The blocking client, on `requests`.

Every method makes one flow of `cortex_training.protocol` and drives it; what is sent, what an answer means and when to
ask again is written there, once for this client and for `cortex_training.aio`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cortex_training import artifacts
from cortex_training._requests_driver import RequestsDriver
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
from cortex_training.config import (
    CheckpointType,
    Hardware,
    InferenceConfig,
    JobType,
    SubJobConfig,
    TrainingConfig,
)
from cortex_training.errors import ChunkGroupConflictError, ChunkGroupError, ChunkGroupRestartError
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

__all__ = [
    "CheckpointType",
    "ChunkGroupConflictError",
    "ChunkGroupError",
    "ChunkGroupRestartError",
    "CortexTrainingClient",
    "Hardware",
    "InferenceConfig",
    "JobType",
    "SubJobConfig",
    "TrainingConfig",
    "build_forward_backward_kwargs",
    "build_forward_backward_payload",
    "serialize_forward_backward_args",
]

if TYPE_CHECKING:
    from cortex_training.payloads import (
        build_forward_backward_kwargs,
        build_forward_backward_payload,
        serialize_forward_backward_args,
    )

_PAYLOAD_NAMES = ("build_forward_backward_kwargs", "build_forward_backward_payload", "serialize_forward_backward_args")


def __getattr__(name: str) -> Any:
    """Code written for the public client imports these from here; numpy, which they need, is loaded only then."""
    if name in _PAYLOAD_NAMES:
        return getattr(importlib.import_module("cortex_training.payloads"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@observed
class CortexTrainingClient:
    """Calls the service and waits for answers. Threads may share one client; a forked process gets sockets of its own.

    `base_url`: scheme, host and port. Times in seconds: `poll_timeout` is the longest wait of `poll_request` and
    `wait_for_job`; `request_timeout` is (connect, read), or one number for both; `retry_budget_s` is how long one call
    is tried again after failures that its kind allows to repeat. `max_retries`, if given, also limits their number.

    Polls adapt to how long such requests took before on the job; `poll_interval` and `poll_max_interval` bound them,
    and `poll_backoff_multiplier`, if given, replaces them by the fixed schedule of that growth.

    `auth` is a credential (`cortex_training.auth`). Proxies come from `proxy` or the environment, never a credential
    from netrc. `token_prompts="tensor"` sends token prompts as int32 tensors instead of JSON lists.

    `telemetry_timeout`, which `from_pat` and `from_connection_name` set, bounds each request of the best-effort reports
    about failed operations (`cortex_training.telemetry`); None sends none. With `create_database` a database or schema
    that the service misses is created; without it that is an error.

    Methods raise the errors of `cortex_training.errors`. A `permit` is called right before a request's body is written,
    at every attempt; what it raises goes to the caller, and then that attempt did not reach the service.
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
            )
        )

    def _configure(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._opened_session: SnowflakeSessionAuth | None = None
        self._telemetry = telemetry_of(settings)
        self._context = Context(settings.policy)
        self._driver = RequestsDriver(settings)
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

    def create_job(
        self,
        sub_jobs: Sequence[SubJobConfig],
        job_id: str | None = None,
        experiment_name: str | None = None,
        hardware: Hardware | str | None = None,
        idle_timeout_seconds: int | None = None,
        pending_timeout_seconds: int | None = None,
    ) -> str:
        """Create a job and return its id, which is the service's even where `job_id` asked for another.

        With `job_id` (a random UUID written down before the call) the call can be repeated: a job that already exists
        under it is adopted if it has the same configuration and has not ended. Without it, a lost reply is
        `OutcomeUnknown`. Idle and pending timeouts are 300 to 604800 seconds; idle 0 means never.
        """
        return self._run(
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

    def create_job_from_body(self, body: Mapping[str, Any]) -> CreatedJob:
        """Create a job from its REST body, which is posted as it is, and return the reply."""
        return self._run(jobs.create_job_from_body(self._context, body))

    def get_job(self, job_id: str) -> Job:
        """The job with its status, reason and `sub_jobs`."""
        return self._run(jobs.get_job(self._context, job_id))

    def list_jobs(self, status: str | None = None) -> list[Job]:
        """Jobs of this database, schema and endpoint, all or those in one state."""
        return self._run(jobs.list_jobs(self._context, status))

    def wait_for_job(self, job_id: str, *, timeout_s: float | None = None, progress: Progress = None) -> Job:
        """Wait until the job runs and return it. `progress(job)` is called after each look.

        Raises `JobFailed` when it ended in any way, `DeadlineExceeded` after `timeout_s` seconds.
        """
        return self._run(jobs.wait_for_job(self._context, job_id, timeout_s=timeout_s, progress=progress))

    def cancel_job(self, job_id: str) -> None:
        """Cancel a job. Cancelling a cancelled one again is no error; an otherwise ended one raises `ConflictError`."""
        self._run(jobs.cancel_job(self._context, job_id))

    def get_capacity(self, hardware: Hardware | str | None = None) -> Capacity:
        """GPUs of the account: `has_reservation`, `max_total_gpus` (-1: no limit), `reserved_gpus`, `in_use_gpus`,
        `pending_gpus`, `available_gpus`. All zero means that nothing is known."""
        return self._run(jobs.get_capacity(self._context, hardware))

    def get_experiment_run(self, job_id: str) -> ExperimentRun:
        """The names of the job's experiment and run, under which its logs and metrics are kept."""
        return self._run(jobs.get_experiment_run(self._context, job_id))

    # Training

    def forward_backward(
        self, job_id: str, data: bytes, *, chunk_group_id: str | None = None, permit: Permit = None
    ) -> str:
        """Send one batch (`data`, a DSSST1 frame) and return the id of the request that computes its gradients.

        `chunk_group_id` names the operation: the service runs it once however often the same frame is sent under the
        same id, also from another process. A random one is used if None.
        """
        return self._run(
            training.forward_backward(self._context, job_id, data, chunk_group_id=chunk_group_id, permit=permit)
        )

    def step(self, job_id: str, learning_rate: float | None = None, *, permit: Permit = None) -> str:
        """Schedule one optimizer step; without `learning_rate` the optimizer's own is used. At most once."""
        return self._run(training.step(self._context, job_id, learning_rate, permit=permit))

    def save(
        self,
        job_id: str,
        checkpoint_id: str | None = None,
        checkpoint_type: CheckpointType | str | None = None,
        *,
        permit: Permit = None,
    ) -> str:
        """Schedule a save, ``resumable`` (the service's default) or ``weights-only``. At most once.

        The service chooses the checkpoint's id; `protocol.results.checkpoint_id` finds it in the polled result.
        """
        return self._run(training.save(self._context, job_id, checkpoint_id, checkpoint_type, permit=permit))

    def load(
        self,
        job_id: str,
        checkpoint_id: str,
        source_job_id: str | None = None,
        *,
        target_sub_job_id: str | None = None,
        permit: Permit = None,
    ) -> str:
        """Schedule loading a checkpoint, of another job if `source_job_id` is given. At most once."""
        return self._run(
            training.load(
                self._context,
                job_id,
                checkpoint_id,
                source_job_id,
                target_sub_job_id=target_sub_job_id,
                permit=permit,
            )
        )

    def weight_sync(
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
        """Schedule copying the training weights to sampling sub-jobs: ``vllm``, ``hf``, or ``lora`` (adapter only)."""
        return self._run(
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

    def generate(
        self,
        job_id: str,
        prompts: Prompts,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool | None = None,
        *,
        permit: Permit = None,
    ) -> str:
        """Schedule one generation for `prompts`, a list of strings and lists of token ids. At most once.

        Token prompts that leave no room in the sampling window are refused before anything is sent.
        """
        return self._run(
            generation.generate(self._context, job_id, prompts, sampling_params, routing_key, strict, permit=permit)
        )

    def generate_stream(
        self,
        job_id: str,
        prompts: Prompts,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool | None = None,
        *,
        permit: Permit = None,
    ) -> Accepted:
        """Start a generation whose samples are read as they finish, with `stream_request`."""
        return self._run(
            generation.generate_stream(
                self._context, job_id, prompts, sampling_params, routing_key, strict, permit=permit
            )
        )

    # Requests

    def poll_request(self, job_id: str, request_id: str, *, timeout_s: float | None = None) -> RequestResult:
        """Wait for a request and return its result, ``{}`` if it has none.

        Raises `RequestFailed` when it failed or was cancelled, `JobFailed` when the job ended under it,
        `DeadlineExceeded` after `timeout_s` seconds; the work goes on, and the same id can be polled again.
        """
        return self._run(polling.poll_request(self._context, job_id, request_id, timeout_s=timeout_s))

    def get_request_status(
        self, job_id: str, request_id: str, max_events: int | None = None, cursor: str | None = None
    ) -> RequestStatus:
        """One look at a request. With `max_events` the events of a stream are taken out of it: the service delivers
        each once, so a look whose answer is lost is an error and is not repeated."""
        return self._run(polling.get_request_status(self._context, job_id, request_id, max_events, cursor))

    def stream_request(self, job_id: str, request_id: str, *, timeout_s: float | None = None) -> Iterator[Any]:
        """The events of a streamed generation as they come: `result`, `error` and `done`.

        Each is delivered once, so a lost answer ends the reading with `TransportError`. Raises `RequestFailed`,
        `DeadlineExceeded`.
        """
        stream = EventStream(self._context, job_id, request_id, timeout_s)
        while (events := self._run(stream.next_events())) is not None:
            yield from events

    def cancel_request(
        self, job_id: str, request_id: str, *, sub_job_id: str | None = None, sub_job_type: str | None = None
    ) -> dict[str, Any]:
        """Ask the service to stop a request."""
        return self._run(
            operations.cancel_request(
                self._context, job_id, request_id, sub_job_id=sub_job_id, sub_job_type=sub_job_type
            )
        )

    # Checkpoints

    def list_checkpoints(self, job_id: str) -> list[Checkpoint]:
        """The job's checkpoints with `checkpoint_id`, `global_steps`, `avg_loss`, `created_at`, `checkpoint_type`."""
        return self._run(checkpoints.list_checkpoints(self._context, job_id))

    def export_checkpoint(self, job_id: str, checkpoint_id: str) -> CheckpointExport:
        """Links to a checkpoint's files (`filename`, `url`, `size_bytes`) and `expires_at`. The links are secrets."""
        return self._run(checkpoints.export_checkpoint(self._context, job_id, checkpoint_id))

    def delete_checkpoint(self, job_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint. Raises `NotFoundError` when there is none."""
        self._run(checkpoints.delete_checkpoint(self._context, job_id, checkpoint_id))

    # Logs

    def tail_logs(
        self,
        job_id: str,
        *,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        cursor: str | None = None,
        max_lines: int | None = None,
    ) -> LogPage:
        """One page of a sub-job's log: `entries`, `next_cursor`, `eof`. Works while the job is being placed."""
        return self._run(
            operations.tail_logs(
                self._context,
                job_id,
                sub_job_id=sub_job_id,
                sub_job_type=sub_job_type,
                cursor=cursor,
                max_lines=max_lines,
            )
        )

    def stream_logs(
        self,
        job_id: str,
        *,
        follow: bool = True,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        cursor: str | None = None,
        max_lines: int | None = None,
        poll_interval: float | None = None,
    ) -> Iterator[Any]:
        """Log entries as they come. With `follow` until the job has ended, else until there are no more for now."""
        stream = LogStream(self._context, job_id, sub_job_id, sub_job_type, cursor, max_lines, follow, poll_interval)
        while (entries := self._run(stream.next_entries())) is not None:
            yield from entries

    # Artifacts

    def fetch_execution_logs(self, job_id: str) -> list[ExecutionLog]:
        """Every log file of the job's experiment run: `sub_job_id`, `filename`, `artifact_uri`, `content`.

        A file that cannot be fetched has an `error` and no content. Needs a Snowflake credential, and the Snowflake
        connector or (without it, or with an OAuth token or a key pair) boto3, as the downloads below do; then there is
        an `s3_uri` too.
        """
        with self._stage(job_id) as stage:
            return artifacts.fetch_execution_logs(stage, job_id)

    def download_stdout_logs(
        self, job_id: str, output_dir: str | os.PathLike[str], *, resume: bool = False
    ) -> list[DownloadedArtifact]:
        """Write the console output of each sub-job to ``<output_dir>/<sub_job_id>/stdout.log``.

        Files are replaced when everything was read. With `resume` only what is new is fetched.
        """
        with self._stage(job_id) as stage:
            return artifacts.download_chunked(stage, artifacts.STDOUT, job_id, output_dir, resume=resume)

    def download_metrics(
        self, job_id: str, output_dir: str | os.PathLike[str], *, resume: bool = False
    ) -> list[DownloadedArtifact]:
        """As `download_stdout_logs`, for GPU metrics: ``<output_dir>/<sub_job_id>/gpu.jsonl``."""
        with self._stage(job_id) as stage:
            return artifacts.download_chunked(stage, artifacts.METRICS, job_id, output_dir, resume=resume)

    def _stage(self, job_id: str) -> AbstractContextManager[artifacts.Stage]:
        run = self.get_experiment_run(job_id)
        query = artifacts.stage_query(self._settings, run)
        row = self._run(statements.first_row(self._context, query, self.database, self.schema)) if query else None
        return artifacts.opened_stage(self._settings, run, row)

    # Other operations

    def forward(
        self,
        job_id: str,
        payload: Any = None,
        *,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        route: str = "operation",
        permit: Permit = None,
    ) -> dict[str, Any]:
        """A forward pass of the backend's own kind; poll the reply's `request_id` if it has one. At most once.

        Bytes go in the documented base64 envelope, or with ``route="direct"`` as they are to the forward route; neither
        is proven against every deployment.
        """
        return self._run(
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

    def bootstrap_router_replay(
        self,
        job_id: str,
        source_sub_job_id: str,
        target_sub_job_id: str,
        *,
        max_cache_bytes: int | None = None,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
    ) -> dict[str, Any]:
        """Connect a sampling sub-job (source of expert routing) to a training sub-job (target of its replay)."""
        return self._run(
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

    def router_replay_discard(
        self,
        job_id: str,
        sample_ids: Sequence[str] | None = None,
        *,
        sub_job_id: str | None = None,
        sub_job_type: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Forget recorded routing of samples that will not be trained on."""
        return self._run(
            operations.router_replay_discard(
                self._context, job_id, sample_ids, sub_job_id=sub_job_id, sub_job_type=sub_job_type, extra=extra
            )
        )

    def reset_prefix_cache(
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
        """Empty the prefix cache of a sampling sub-job.

        With `drain` the service answers when what is being generated has ended, `timeout_s` seconds later at most. No
        attempt of the call begins after that time.
        """
        return self._run(
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

    def emit_metric(self, operation: str, value: Any = 1, *, attributes: Mapping[str, Any] | None = None) -> None:
        """Send an event of your own the way failed operations are reported: best effort, never an error, and nothing
        at all where telemetry is off. Never put prompts or secrets into it."""
        if self._telemetry is not None:
            self._telemetry.emit(operation, value, attributes)

    def clock_skew_s(self) -> float | None:
        """Seconds that this machine's clock is ahead of the service's; None when the service does not tell its time."""
        return self._run(clock_skew_s(self._context))

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

    def close(self) -> None:
        """Close the connections, and the profile's session if this client opened it."""
        if self._telemetry is not None:
            self._telemetry.close()
        self._driver.close()
        if self._opened_session is not None:
            self._opened_session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> ClientSettings:
        return self._settings

    def __setstate__(self, settings: ClientSettings) -> None:
        self._configure(settings)
        if isinstance(settings.auth, SnowflakeSessionAuth):
            self._opened_session = settings.auth

    def __repr__(self) -> str:
        where = f"{self.base_url!r}, {self.database!r}, {self.schema!r}, {self.endpoint!r}"
        return f"{type(self).__name__}({where}, auth={self._settings.auth!r})"
