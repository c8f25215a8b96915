"""Ids never name another resource."""

from __future__ import annotations

from typing import Any

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.protocol import checkpoints, jobs, polling
from cortex_training.protocol.urls import segment, service_prefix


@pytest.mark.parametrize("value", ["", "  ", ".", "..", None, 7, b"job", "a\nb", "a\x00", "\ud800"])
def test_what_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="job_id"):
        segment("job_id", value)


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("a?x=1", "a%3Fx%3D1"),
        ("a#b", "a%23b"),
        ("../x", "..%2Fx"),
        ("j:training:0", "j%3Atraining%3A0"),
        ("a b%2F", "a%20b%252F"),
        ("ключ", "%D0%BA%D0%BB%D1%8E%D1%87"),
        ("cp_1f-2", "cp_1f-2"),
    ],
)
def test_an_id_is_one_path_segment(value: str, quoted: str) -> None:
    assert segment("job_id", value) == quoted


def test_database_schema_and_endpoint_are_quoted() -> None:
    assert service_prefix('my "db"', "a/b", "x?") == "/api/v2/databases/my%20%22db%22/schemas/a%2Fb/x%3F"
    with pytest.raises(ConfigurationError, match="schema"):
        service_prefix("db", "..", "x")


def test_flows_quote_what_they_are_given(world: Any, say: Any) -> None:
    world.run(jobs.get_job(world.context, "a?x=1"), [say.reply({})])
    world.run(jobs.cancel_job(world.context, "j:1"), [say.reply({})])
    world.run(checkpoints.delete_checkpoint(world.context, "j", "../../j2"), [say.reply(None, 204)])
    world.run(polling.get_request_status(world.context, "j", "r#1", cursor="a&b"), [say.reply({})])
    assert world.sent == [
        "GET /a%3Fx%3D1",
        "POST /j%3A1:cancel",
        "DELETE /j/checkpoints/..%2F..%2Fj2",
        "GET /j/requests/r%231",
    ]
    assert world.requests[-1].query == (("cursor", "a&b"),)


@pytest.mark.parametrize("call", [jobs.get_job, jobs.cancel_job, jobs.wait_for_job, checkpoints.list_checkpoints])
@pytest.mark.parametrize("job_id", ["", ".", ".."])
def test_a_call_without_an_id_sends_nothing(world: Any, call: Any, job_id: str) -> None:
    with pytest.raises(ConfigurationError):
        world.run(call(world.context, job_id))
    assert world.requests == []
