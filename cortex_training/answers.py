"""What the service's answers hold, as far as it is documented.

They are plain dictionaries: whatever else the service sends is in them too, and a key is absent where the service left
it out. Only the keys named here are known to a type checker. What `poll_request` returns depends on the request:
`RequestResult` has the keys of all kinds, `StepResult` and its kin those of one.
"""

from __future__ import annotations

import datetime
from typing import Any, TypedDict


class SubJob(TypedDict, total=False):
    """One part of a job. `sub_job_id` is ``<job id>:<training | sampling | log_prob>:<index>``."""

    sub_job_id: str
    job_type: str
    status: str | int | None
    """In any of the spellings that `cortex_training.states` reads."""
    model_name: str
    training_config: dict[str, Any]
    inference_config: dict[str, Any]


class Job(TypedDict, total=False):
    """A job. Times are RFC 3339; `submitted_by` and `owner_role` are absent where the role may not see them."""

    job_id: str
    status: str | int | None
    """In any of the spellings that `cortex_training.states` reads."""
    reason: str
    created_at: str
    updated_at: str
    submitted_by: str
    owner_role: str
    hardware: str
    sub_jobs: list[SubJob]


class CreatedJob(TypedDict, total=False):
    """The reply to a create."""

    job_id: str


class Capacity(TypedDict):
    """GPUs of the account. `max_total_gpus` -1 means no limit, and nothing but zeros that nothing is known."""

    has_reservation: bool
    max_total_gpus: int
    reserved_gpus: int
    in_use_gpus: int
    pending_gpus: int
    available_gpus: int


class ExperimentRun(TypedDict, total=False):
    """Under which names a job's logs and metrics are kept."""

    experiment_name: str
    experiment_run_name: str


class Accepted(TypedDict, total=False):
    """A scheduled request."""

    request_id: str
    job_id: str
    count: int


class RequestStatus(TypedDict, total=False):
    """One look at a request. `events` are those of a stream, or the pages of a large result."""

    status: str | int | None
    """In any of the spellings that `cortex_training.states` reads."""
    result: Any
    error: Any
    events: list[dict[str, Any]]
    next_cursor: str
    metrics: dict[str, Any]


class Checkpoint(TypedDict, total=False):
    """An entry of a job's list of checkpoints. `created_at` is RFC 3339."""

    checkpoint_id: str
    global_steps: int
    avg_loss: float
    created_at: str
    checkpoint_type: str


class ExportedFile(TypedDict, total=False):
    """`url` is signed: whoever has it can read the file."""

    filename: str
    url: str
    size_bytes: int


class CheckpointExport(TypedDict, total=False):
    """Links to a checkpoint's files, good until `expires_at` (RFC 3339)."""

    checkpoint_id: str
    files: list[ExportedFile]
    expires_at: str


class LogPage(TypedDict, total=False):
    """One page of a log."""

    entries: list[Any]
    next_cursor: str | None
    eof: bool


class ExecutionLog(TypedDict, total=False):
    """A log file, with `content`, or with `error` where it could not be fetched; with `s3_uri` where that is known."""

    sub_job_id: str
    filename: str
    artifact_uri: str
    s3_uri: str
    content: str
    error: str


class DownloadedArtifact(TypedDict, total=False):
    """A file put together from its chunks."""

    sub_job_id: str
    filename: str
    saved_path: str
    chunk_count: int
    first_artifact_uri: str
    last_artifact_uri: str


class ForwardBackwardResult(TypedDict, total=False):
    """What polling a forward-backward gives."""

    job_id: str
    avg_loss: float
    metrics: dict[str, Any]
    post_process_outputs: dict[str, Any]


class StepResult(TypedDict, total=False):
    """What polling a step gives. `last_lr` has one element per parameter group if it is a list."""

    global_steps: int
    last_lr: float | list[float]
    peak_memory: dict[str, int]


class SaveResult(TypedDict, total=False):
    """What polling a save gives; `protocol.results.checkpoint_id` finds the id in all its forms."""

    job_id: str
    checkpoint_id: str
    stage_path: str
    checkpoint_path: str
    checkpoint_tag: str


class Sample(TypedDict, total=False):
    """One generated completion."""

    text: str
    token_ids: list[int]
    logprobs: Any
    finish_reason: str


class GenerateResult(TypedDict, total=False):
    """What polling a generate gives: `results` in the order of the prompts."""

    job_id: str
    results: list[Sample]


class LoadResult(TypedDict, total=False):
    """What polling a load gives. `global_steps` is the count of the loaded checkpoint, where the service says it."""

    job_id: str
    checkpoint_id: str
    global_steps: int


class WeightSyncResult(TypedDict, total=False):
    """What polling a weight sync gives."""

    job_id: str
    weight_format: str


class StreamResult(TypedDict, total=False):
    """What polling a streamed generation gives: its events, ordered by prompt, those of failed prompts included."""

    job_id: str
    events: list[dict[str, Any]]


class RequestResult(
    ForwardBackwardResult,
    StepResult,
    SaveResult,
    LoadResult,
    GenerateResult,
    WeightSyncResult,
    StreamResult,
    total=False,
):
    """What `poll_request` returns: the keys of the kind of request that was polled, and whatever else was sent.

    Which kind it was is known to whoever submitted it. Where that is fixed, assign the result to its own type
    (``stepped: StepResult = …``), and the type checker knows which keys can be there.
    """


def created_at(job: Job) -> datetime.datetime | None:
    """When a job was created; None where the service does not say, or says something else than a time."""
    try:
        created = datetime.datetime.fromisoformat(str(job.get("created_at")))
    except ValueError:
        return None
    return created if created.tzinfo is not None else created.replace(tzinfo=datetime.UTC)
