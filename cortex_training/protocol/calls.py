"""How requests to the service are put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.protocol.context import Context
from cortex_training.protocol.messages import FRAME_CONTENT, JSON_CONTENT, Kind, Request
from cortex_training.protocol.urls import segment

Permit = Callable[[], None] | None


def get(
    context: Context, path: str, operation: str, *, job_id: str = "", query: Mapping[str, object] | None = None
) -> Request:
    """A read of `path` (relative to the service's prefix); query values of None are left out."""
    pairs = tuple((key, str(value)) for key, value in (query or {}).items() if value is not None)
    return _request(context, "GET", path, Kind.SAFE, operation, job_id, query=pairs)


def post_json(
    context: Context, path: str, operation: str, body: Any, kind: Kind, *, job_id: str = "", permit: Permit = None
) -> Request:
    """A POST of a JSON body, which is encoded here and once: every attempt sends the same bytes."""
    data = json_bytes(operation, body)
    return _request(context, "POST", path, kind, operation, job_id, body=data, content_type=JSON_CONTENT, permit=permit)


def post_frame(
    context: Context, path: str, operation: str, body: bytes, kind: Kind, *, job_id: str, permit: Permit = None
) -> Request:
    return _request(
        context, "POST", path, kind, operation, job_id, body=body, content_type=FRAME_CONTENT, permit=permit
    )


def without_body(context: Context, method: str, path: str, operation: str, kind: Kind, *, job_id: str) -> Request:
    return _request(context, method, path, kind, operation, job_id)


def _request(
    context: Context, method: str, path: str, kind: Kind, operation: str, job_id: str, **content: Any
) -> Request:
    return Request(
        method,
        context.policy.prefix + path,
        kind,
        operation,
        context.policy.timeouts,
        job_id=job_id,
        names=(job_id,) if job_id else (),
        **content,
    )


def job_path(job_id: object) -> str:
    return f"/{segment('job_id', job_id)}"


def json_bytes(operation: str, body: Any) -> bytes:
    """`body` as JSON. Raises `ConfigurationError` for what JSON cannot hold, NaN included: the service refuses it."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{operation}: the request cannot be written as JSON: {error}") from None
