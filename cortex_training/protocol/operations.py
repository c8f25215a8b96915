"""The generic operation envelope: ``POST /{job_id}/operation``."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, cast

from cortex_training.answers import LogPage
from cortex_training.errors import ConfigurationError
from cortex_training.protocol import calls
from cortex_training.protocol.calls import Permit
from cortex_training.protocol.chunks import MAX_REQUEST_BYTES
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import exchange_json
from cortex_training.protocol.messages import Flow, Kind, Request
from cortex_training.protocol.urls import segment


def operation_request(
    context: Context,
    job_id: str,
    operation_type: str,
    payload: Mapping[str, Any] | None,
    kind: Kind,
    *,
    sub_job_id: str | None = None,
    sub_job_type: str | None = None,
    permit: Permit = None,
) -> Request:
    """The request for one operation; hints of None are left out."""
    body: dict[str, Any] = {"operation_type": operation_type}
    if sub_job_id is not None:
        body["sub_job_id"] = sub_job_id
    if sub_job_type is not None:
        body["sub_job_type"] = sub_job_type
    if payload is not None:
        body["payload"] = dict(payload)
    path = f"{calls.job_path(job_id)}/operation"
    return calls.post_json(context, path, operation_type, body, kind, job_id=job_id, permit=permit)


def run_operation(context: Context, request: Request, *, budget_s: float | None = None) -> Flow[dict[str, Any]]:
    """Send an operation and return its reply; a reply that schedules work can be polled."""
    reply = yield from exchange_json(context, request, budget_s=budget_s)
    request_id = reply.get("request_id")
    if isinstance(request_id, str) and request_id:
        context.remember_request(request.job_id, request_id, request.operation)
    return reply


def forward(
    context: Context,
    job_id: str,
    payload: Any,
    *,
    sub_job_id: str | None = None,
    sub_job_type: str | None = None,
    route: str = "operation",
    permit: Permit = None,
) -> Flow[dict[str, Any]]:
    if isinstance(payload, bytes | bytearray | memoryview):
        frame = bytes(payload)
        if len(frame) > MAX_REQUEST_BYTES:
            raise ConfigurationError(
                f"payload: {len(frame)} bytes exceed {MAX_REQUEST_BYTES}, and a forward is never cut into chunks; "
                "send fewer sequences"
            )
        if route == "direct":
            path = f"{calls.job_path(job_id)}/forward"
            request = calls.post_frame(context, path, "forward", frame, Kind.AT_MOST_ONCE, job_id=job_id, permit=permit)
            return (yield from run_operation(context, request))
        payload = {"payload_b64": base64.b64encode(frame).decode(), "content_type": "application/octet-stream"}
    if route == "direct":
        raise ConfigurationError.of("payload", payload, "route='direct' posts a DSSST1 frame; give bytes")
    if route != "operation":
        raise ConfigurationError.of("route", route, "must be 'operation' or 'direct'")
    request = operation_request(
        context,
        job_id,
        "forward",
        payload,
        Kind.AT_MOST_ONCE,
        sub_job_id=sub_job_id,
        sub_job_type=sub_job_type,
        permit=permit,
    )
    return (yield from run_operation(context, request))


def bootstrap_router_replay(
    context: Context,
    job_id: str,
    source_sub_job_id: str,
    target_sub_job_id: str,
    *,
    max_cache_bytes: int | None = None,
    sub_job_id: str | None = None,
    sub_job_type: str | None = None,
) -> Flow[dict[str, Any]]:
    segment("source_sub_job_id", source_sub_job_id)
    segment("target_sub_job_id", target_sub_job_id)
    payload: dict[str, Any] = {"source_sub_job_id": source_sub_job_id, "target_sub_job_id": target_sub_job_id}
    if max_cache_bytes is not None:
        payload["max_cache_bytes"] = max_cache_bytes
    request = operation_request(
        context,
        job_id,
        "bootstrap-router-replay",
        payload,
        Kind.IDEMPOTENT,
        sub_job_id=sub_job_id,
        sub_job_type=sub_job_type,
    )
    return (yield from run_operation(context, request))


def router_replay_discard(
    context: Context,
    job_id: str,
    sample_ids: Sequence[str] | None,
    *,
    sub_job_id: str | None = None,
    sub_job_type: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Flow[dict[str, Any]]:
    if isinstance(sample_ids, str):
        raise ConfigurationError.of("sample_ids", sample_ids, "must be a list of sample ids")
    payload = {"sample_ids": list(sample_ids or ()), **(extra or {})}
    request = operation_request(
        context,
        job_id,
        "router-replay-discard",
        payload,
        Kind.IDEMPOTENT,
        sub_job_id=sub_job_id,
        sub_job_type=sub_job_type,
    )
    return (yield from run_operation(context, request))


def reset_prefix_cache(
    context: Context,
    job_id: str,
    *,
    sub_job_id: str | None = None,
    sub_job_type: str | None = "sampling",
    drain: bool = True,
    timeout_s: float = 60.0,
    retry_interval_s: float = 0.1,
    extra: Mapping[str, Any] | None = None,
) -> Flow[dict[str, Any]]:
    payload = {"drain": drain, "timeout_s": timeout_s, "retry_interval_s": retry_interval_s, **(extra or {})}
    request = operation_request(
        context,
        job_id,
        "reset-prefix-cache",
        payload,
        Kind.IDEMPOTENT,
        sub_job_id=sub_job_id,
        sub_job_type=sub_job_type,
    )
    # Each attempt drains anew: none begins when the caller's time for it is over.
    return (yield from run_operation(context, request, budget_s=min(timeout_s, context.policy.retry_budget_s)))


def cancel_request(
    context: Context,
    job_id: str,
    request_id: str,
    *,
    sub_job_id: str | None = None,
    sub_job_type: str | None = None,
) -> Flow[dict[str, Any]]:
    segment("request_id", request_id)
    request = operation_request(
        context,
        job_id,
        "cancel-request",
        {"request_id": request_id},
        Kind.IDEMPOTENT,
        sub_job_id=sub_job_id,
        sub_job_type=sub_job_type,
    )
    return (yield from exchange_json(context, request))


def tail_logs(
    context: Context,
    job_id: str,
    *,
    sub_job_id: str | None = None,
    sub_job_type: str | None = None,
    cursor: str | None = None,
    max_lines: int | None = None,
) -> Flow[LogPage]:
    payload: dict[str, Any] = {}
    if cursor is not None:
        payload["cursor"] = cursor
    if max_lines is not None:
        if type(max_lines) is not int or max_lines < 1:
            raise ConfigurationError.of("max_lines", max_lines, "must be a whole number greater than 0")
        payload["max_lines"] = max_lines
    request = operation_request(
        context, job_id, "tail-logs", payload, Kind.IDEMPOTENT, sub_job_id=sub_job_id, sub_job_type=sub_job_type
    )
    return cast(LogPage, (yield from exchange_json(context, request)))
