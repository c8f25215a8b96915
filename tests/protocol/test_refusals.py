"""Reading errors wherever the service wraps them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import requests

from cortex_training import errors
from cortex_training.protocol import calls, refusals
from cortex_training.protocol.context import Context, Policy
from cortex_training.protocol.messages import Response

REQUEST = calls.get(Context(Policy(prefix="/p")), "/job", "get-job", job_id="job")


def error_of(status: int, body: Any, **headers: str) -> errors.ApiError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return refusals.api_error(REQUEST, Response(status, {k.replace("_", "-"): v for k, v in headers.items()}, data))


def wrapped(detail: Any) -> dict[str, Any]:
    """As the gateway wraps what stands behind it."""
    return {
        "code": "517604",
        "message": f"Cortex training forwardBackward failed: zone returned 409: {json.dumps({'detail': detail})}",
    }


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("chunk_group_restart_required", errors.ChunkGroupRestartError),
        ("chunk_group_conflict", errors.ChunkGroupConflictError),
        ("chunk_group_missing_chunks", errors.ChunkGroupConflictError),
    ],
)
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: {"detail": d}, wrapped, lambda d: {"errors": [wrapped(d)]}])
def test_chunk_group_errors_are_found_wherever_they_are(code: str, kind: type, wrap: Any) -> None:
    detail = {"code": code, "message": "restart from chunk 0", "chunk_group_id": "g", "received_chunk": 1}
    error = error_of(409, wrap(detail), x_snowflake_request_id="req-1")
    assert type(error) is kind
    assert error.code == code
    assert error.detail == detail
    assert error.message == "restart from chunk 0"
    assert error.request_id == "req-1"
    assert isinstance(error, requests.HTTPError)
    assert error.response.status_code == 409


def test_missing_chunks_without_a_code_are_recognised_by_their_words() -> None:
    error = error_of(409, {"detail": {"chunk_group_id": "g", "message": "request chunk group is missing chunks"}})
    assert type(error) is errors.ChunkGroupConflictError


def test_code_and_message_of_a_plain_error() -> None:
    error = error_of(400, {"code": 390, "message": "bad field"}, x_snowflake_request_id="abc")
    assert (error.code, error.message, error.request_id) == ("390", "bad field", "abc")
    assert str(error) == "GET /p/job was answered 400 [390]: bad field (snowflake request id: abc)"


def test_validation_details_name_the_field() -> None:
    body = {"detail": [{"loc": ["body", "max_seq_len"], "msg": "must be positive", "type": "value_error"}]}
    assert error_of(422, body).message == "body.max_seq_len: must be positive"


@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b"\xff\xfe", b"[]", b'"text"', b"null", b"{"])
def test_any_body_makes_a_readable_error(body: bytes) -> None:
    error = error_of(502, body)
    assert type(error) is errors.ServiceError
    assert "502" in str(error)


def test_json_in_strings_is_followed_down_to_the_depth_limit() -> None:
    def nested(levels: int) -> Any:
        value: Any = {"code": "chunk_group_conflict"}
        for _ in range(levels):
            value = {"message": json.dumps(value)}
        return value

    assert type(error_of(409, nested(3))) is errors.ChunkGroupConflictError
    assert type(error_of(409, nested(9))) is errors.ConflictError


def test_hostile_bodies_are_read_in_bounded_time() -> None:
    for body in (b"[" * 200_000, b"{" * 200_000, b'{"a":' * 50_000, json.dumps({"m": "{" * 300_000}).encode()):
        assert error_of(500, body).status == 500


def test_a_credential_that_the_answer_echoes_is_not_in_the_error() -> None:
    secret = "ver:1-hint:secret-token-value"
    answer = Response(403, {}, json.dumps({"message": f"denied for Bearer {secret}"}).encode())
    error = refusals.api_error(REQUEST, replace(answer, credential={"Authorization": f"Bearer {secret}"}))
    assert secret not in str(error)
    assert secret not in error.response.text
    assert "<redacted>" in error.message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.AuthError),
        (403, errors.AuthError),
        (404, errors.NotFoundError),
        (409, errors.ConflictError),
        (429, errors.RateLimitedError),
        (500, errors.ServiceError),
        (418, errors.ApiError),
    ],
)
def test_the_class_follows_the_status(status: int, kind: type) -> None:
    assert type(error_of(status, {"message": "x"})) is kind


def test_a_bare_401_means_expired_and_a_coded_one_what_it_says() -> None:
    assert refusals.is_session_expired(Response(401, {}, b""))
    assert refusals.is_session_expired(Response(401, {}, b'{"message": "no code"}'))
    assert not refusals.is_session_expired(Response(401, {}, b'{"code": "390100"}'))
    assert refusals.is_session_expired(Response(400, {}, b'{"data": {"error_code": 390112}}'))
    assert not refusals.is_session_expired(Response(200, {}, b'{"code": "390112"}'))


def test_a_restart_of_the_workers_is_told_from_a_conflict() -> None:
    assert refusals.is_zone_restarting(Response(409, {}, b'{"message": "the zone is restarting"}'))
    assert refusals.is_zone_restarting(Response(409, {}, b'{"detail": {"code": "zone_restarting"}}'))
    assert not refusals.is_zone_restarting(Response(409, {}, b'{"message": "job is terminated"}'))
    group = {"detail": {"code": "chunk_group_restart_required", "message": "restarting needed"}}
    assert not refusals.is_zone_restarting(Response(409, {}, json.dumps(group).encode()))


@pytest.mark.parametrize("said", ["the token expired", "the token expired."])
def test_advice_is_a_sentence_of_its_own(said: str) -> None:
    assert "the token expired. Check the credential." in str(error_of(401, {"code": "390100", "message": said}))
