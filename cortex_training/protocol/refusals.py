"""What an answer outside 2xx says.

The service's gateway wraps the answers of what is behind it, sometimes as JSON inside a string inside JSON. Every
object that such a body holds is looked at, outermost first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import requests

from cortex_training.errors import (
    ApiError,
    AuthError,
    ChunkGroupConflictError,
    ChunkGroupError,
    ChunkGroupRestartError,
    ConflictError,
    NotFoundError,
    RateLimitedError,
    ServiceError,
)
from cortex_training.protocol.messages import Request, Response

MAX_DEPTH = 8
_MAX_OBJECTS = 256
_MAX_EMBEDDED_TEXT = 256 * 1024
_MAX_CANDIDATES = 16
_MAX_MESSAGE = 2000

EXPIRED_SESSION_CODES = frozenset({"390111", "390112", "390114"})
RESTART_REQUIRED = "chunk_group_restart_required"
_CHUNK_GROUP_CODES = frozenset({RESTART_REQUIRED, "chunk_group_conflict", "chunk_group_missing_chunks"})
_MISSING_CHUNKS = "request chunk group is missing chunks"
_RESTARTING = re.compile(r"(?<![a-z])restarting(?![a-z])")
_NOT_ACCEPTED = re.compile(r"throttl|rate.?limit|too many requests|not accepted|(?<![a-z])restarting(?![a-z])")

_decoder = json.JSONDecoder()


def structured_errors(body: bytes) -> list[dict[str, Any]]:
    """Every JSON object in a body, outermost first, also those inside strings, down to a depth of 8."""
    found: list[dict[str, Any]] = []
    for value in _walk(_parsed(body), 0):
        found.append(value)
        if len(found) == _MAX_OBJECTS:
            break
    return found


def _parsed(body: bytes) -> Any:
    text = body[:_MAX_EMBEDDED_TEXT].decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _walk(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for element in value:
            yield from _walk(element, depth + 1)
    elif isinstance(value, str):
        for element in _embedded(value):
            yield from _walk(element, depth + 1)


def _embedded(text: str) -> Iterator[Any]:
    """JSON objects written somewhere inside a sentence."""
    text = text[:_MAX_EMBEDDED_TEXT]
    start = text.find("{")
    for _ in range(_MAX_CANDIDATES):
        if start < 0:
            return
        try:
            value, end = _decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            yield value
        start = text.find("{", end)


def error_code(error: Mapping[str, Any]) -> str:
    """The code of one structured error, "" if it has none; numbers become text."""
    for key in ("code", "error_code", "errorCode"):
        value = error.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
            return str(value)
    return ""


def _message(error: Mapping[str, Any]) -> str:
    for key in ("message", "msg", "detail", "error", "reason"):
        value = error.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
    detail = error.get("detail")
    if isinstance(detail, list):
        return "; ".join(_field_message(entry) for entry in detail if isinstance(entry, dict))
    return ""


def _field_message(entry: Mapping[str, Any]) -> str:
    location = entry.get("loc")
    where = ".".join(map(str, location)) if isinstance(location, list) else ""
    text = str(entry.get("msg") or entry.get("message") or entry.get("type") or "invalid")
    return f"{where}: {text}" if where else text


def is_session_expired(response: Response) -> bool:
    """True for an expired session: one of its codes anywhere, or a bare 401 that gives no code at all."""
    if response.status < 400:
        return False
    codes = {error_code(error) for error in structured_errors(response.body)} - {""}
    return bool(codes & EXPIRED_SESSION_CODES) or (response.status == 401 and not codes)


def is_zone_restarting(response: Response) -> bool:
    """True for a 409 that says the workers are on their way back, which is no conflict."""
    if response.status != 409 or _chunk_group_error(structured_errors(response.body)) is not None:
        return False
    return _says(response, _RESTARTING)


def was_not_accepted(response: Response) -> bool:
    """True for a 503 whose body says that the call was turned away before anything was executed."""
    return response.status == 503 and _says(response, _NOT_ACCEPTED)


def says_workers_restart(response: Response) -> bool:
    """True when the workers are on their way back: whatever they held in memory may be gone."""
    return is_zone_restarting(response) or (response.status == 503 and _says(response, _RESTARTING))


def _says(response: Response, pattern: re.Pattern[str]) -> bool:
    text = response.body[:_MAX_EMBEDDED_TEXT].decode("utf-8", "replace").lower()
    return pattern.search(text) is not None


def _chunk_group_error(errors: list[dict[str, Any]]) -> dict[str, Any] | None:
    for error in errors:
        if error_code(error) in _CHUNK_GROUP_CODES:
            return error
        if "chunk_group_id" in error and error.get("message") == _MISSING_CHUNKS:
            return error
    return None


def api_error(request: Request, response: Response) -> ApiError:
    """The exception for an answer outside 2xx, with everything the service said and no credential."""
    body = _without_credential(response)
    errors = structured_errors(body)
    group = _chunk_group_error(errors)
    if group is not None:
        code, message = error_code(group) or "chunk_group_missing_chunks", _message(group)
    else:
        code = next(filter(None, map(error_code, errors)), "")
        message = next(filter(None, map(_message, errors)), "")
    if not message and not errors:
        message = " ".join(body[:300].decode("utf-8", "replace").split())
    detail = group or next((error for error in reversed(errors) if error_code(error)), errors[0] if errors else {})
    kind = _error_class(response.status, code if group is not None else None)
    return kind(
        status=response.status,
        code=code,
        message=message[:_MAX_MESSAGE],
        request_id=response.request_id,
        detail=detail,
        method=request.method,
        path=request.path,
        advice=_advice(response.status, code),
        response=_as_requests_response(response, body),
    )


def _without_credential(response: Response) -> bytes:
    # A gateway's error page may echo the headers it was sent; what is raised from it ends up in logs.
    body = response.body
    for value in (response.credential or {}).values():
        for token in re.findall(r'[^\s"=]{12,}', value):
            body = body.replace(token.encode(), b"<redacted>")
    return body


def _error_class(status: int, chunk_group_code: str | None) -> type[ApiError]:
    if chunk_group_code == RESTART_REQUIRED:
        return ChunkGroupRestartError
    if chunk_group_code is not None:
        return ChunkGroupConflictError if status == 409 or status < 500 else ChunkGroupError
    if status in (401, 403):
        return AuthError
    if status >= 500:
        return ServiceError
    return {404: NotFoundError, 409: ConflictError, 429: RateLimitedError}.get(status, ApiError)


def _advice(status: int, code: str) -> str:
    if 300 <= status < 400:
        return "Redirects are never followed; check the host, database, schema and endpoint."
    if status == 401:
        return (
            "Check the credential. A programmatic access token must not be expired and, for a service user, needs a "
            "network policy that admits this address."
        )
    if status == 403:
        return "The role of this credential may not do this; check its grants on the database, schema and job."
    if status == 404 and not code:
        return "Check the id, and that database, schema and endpoint are those the job was created in."
    return ""


def _as_requests_response(response: Response, body: bytes) -> requests.Response:
    """For code that reads ``error.response.status_code`` and ``.json()``, as with the public client."""
    answer = requests.Response()
    answer.status_code = response.status
    answer.headers.update(response.headers)
    answer._content = body
    answer.encoding = "utf-8"
    return answer
