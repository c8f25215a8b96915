"""What changes a training sub-job: forward-backward, step, save, load, weight sync."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cortex_training.config import CheckpointType
from cortex_training.errors import ConfigurationError
from cortex_training.protocol import calls
from cortex_training.protocol.calls import Permit
from cortex_training.protocol.chunks import ChunkedCall, checked_frame, send_chunks
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import exchange_json, required_text
from cortex_training.protocol.messages import Flow, Kind, Request
from cortex_training.protocol.operations import operation_request
from cortex_training.protocol.urls import segment

WEIGHT_FORMATS = ("vllm", "hf", "lora")


def submit(context: Context, request: Request) -> Flow[str]:
    """Send a request that schedules work; the id to poll."""
    reply = yield from exchange_json(context, request)
    request_id = required_text(request, reply, "request_id")
    context.remember_request(request.job_id, request_id, request.operation)
    return request_id


def forward_backward(
    context: Context, job_id: str, frame: Any, *, chunk_group_id: str | None = None, permit: Permit = None
) -> Flow[str]:
    view = checked_frame("forward_backward", frame)
    if chunk_group_id is not None and (not isinstance(chunk_group_id, str) or not chunk_group_id.strip()):
        raise ConfigurationError.of("chunk_group_id", chunk_group_id, "must be a non-empty string, or be left out")
    call = ChunkedCall(
        path=f"{calls.job_path(job_id)}/forward-backward",
        operation="fwd-bwd",
        job_id=job_id,
        frame=view,
        group_id=chunk_group_id or str(uuid.uuid4()),
        # The group id makes the whole call idempotent: the service runs a group once however often it is sent.
        final_kind=Kind.IDEMPOTENT,
        permit=permit,
    )
    return (yield from send_chunks(context, call))


def step(context: Context, job_id: str, learning_rate: float | None = None, *, permit: Permit = None) -> Flow[str]:
    body: dict[str, Any] = {}
    if learning_rate is not None:
        if isinstance(learning_rate, bool) or not isinstance(learning_rate, int | float):
            raise ConfigurationError.of("learning_rate", learning_rate, "must be a number, or be left out")
        if not math.isfinite(learning_rate) or learning_rate < 0:
            raise ConfigurationError.of("learning_rate", learning_rate, "must be finite, and 0 or greater")
        body["learning_rate"] = float(learning_rate)
    path = f"{calls.job_path(job_id)}/step"
    request = calls.post_json(context, path, "step", body, Kind.AT_MOST_ONCE, job_id=job_id, permit=permit)
    return (yield from submit(context, request))


def save(
    context: Context,
    job_id: str,
    checkpoint_id: str | None = None,
    checkpoint_type: CheckpointType | str | None = None,
    *,
    permit: Permit = None,
) -> Flow[str]:
    body: dict[str, Any] = {}
    if checkpoint_id is not None:
        segment("checkpoint_id", checkpoint_id)
        body["checkpoint_id"] = checkpoint_id
    if checkpoint_type is not None:
        kind = checkpoint_type.lower() if isinstance(checkpoint_type, str) else checkpoint_type
        if kind not in set(CheckpointType):
            raise ConfigurationError.of(
                "checkpoint_type", checkpoint_type, f"must be one of {', '.join(CheckpointType)}"
            )
        body["checkpoint_type"] = str(kind)
    path = f"{calls.job_path(job_id)}/save"
    request = calls.post_json(context, path, "save", body, Kind.AT_MOST_ONCE, job_id=job_id, permit=permit)
    return (yield from submit(context, request))


def load(
    context: Context,
    job_id: str,
    checkpoint_id: str,
    source_job_id: str | None = None,
    *,
    target_sub_job_id: str | None = None,
    permit: Permit = None,
) -> Flow[str]:
    segment("checkpoint_id", checkpoint_id)
    body: dict[str, Any] = {"checkpoint_id": checkpoint_id}
    for name, value in (("source_job_id", source_job_id), ("target_sub_job_id", target_sub_job_id)):
        if value is not None:
            if not isinstance(value, str):
                raise ConfigurationError.of(name, value, "must be a string, or be left out")
            body[name] = value
    path = f"{calls.job_path(job_id)}/load"
    request = calls.post_json(context, path, "load", body, Kind.AT_MOST_ONCE, job_id=job_id, permit=permit)
    return (yield from submit(context, request))


def weight_sync(
    context: Context,
    job_id: str,
    source_sub_job_id: str,
    target_sub_job_ids: Sequence[str],
    *,
    weight_format: str | None = None,
    bucket_size: int | None = None,
    sub_job_id: str | None = None,
    sub_job_type: str | None = None,
    permit: Permit = None,
) -> Flow[str]:
    segment("source_sub_job_id", source_sub_job_id)
    payload: dict[str, Any] = {
        "source_sub_job_id": source_sub_job_id,
        "target_sub_job_ids": _checked_targets(target_sub_job_ids),
    }
    if weight_format is not None:
        if weight_format not in WEIGHT_FORMATS:
            raise ConfigurationError.of("weight_format", weight_format, f"must be one of {', '.join(WEIGHT_FORMATS)}")
        payload["weight_format"] = weight_format
    if bucket_size is not None:
        if type(bucket_size) is not int or bucket_size <= 0:
            raise ConfigurationError.of("bucket_size", bucket_size, "must be a whole number greater than 0")
        payload["bucket_size"] = bucket_size
    request = operation_request(
        context,
        job_id,
        "weight-sync",
        payload,
        Kind.IDEMPOTENT,
        sub_job_id=sub_job_id if sub_job_id is not None else source_sub_job_id,
        sub_job_type=sub_job_type if sub_job_type is not None else "training",
        permit=permit,
    )
    return (yield from submit(context, request))


def _checked_targets(targets: object) -> list[str]:
    # A single string is a sequence too: without this check "job:sampling:0" would become fourteen one-letter targets.
    if isinstance(targets, str | bytes | Mapping) or not isinstance(targets, Sequence) or not targets:
        raise ConfigurationError.of("target_sub_job_ids", targets, "must be a non-empty list of sub-job ids")
    for index, target in enumerate(targets):
        segment(f"target_sub_job_ids[{index}]", target)
    return list(targets)
