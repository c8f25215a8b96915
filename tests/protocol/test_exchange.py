"""What is sent again, and what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cortex_training import errors
from cortex_training.errors import DeadlineExceeded, OutcomeUnknown, SendRefused, TransportError
from cortex_training.protocol import calls
from cortex_training.protocol.exchange import exchange, exchange_json
from cortex_training.protocol.messages import Kind, Request

REPEATABLE = [Kind.SAFE, Kind.IDEMPOTENT]


def request(world: Any, kind: Kind) -> Request:
    return calls.post_json(world.context, "/job/step", "step", {}, kind, job_id="job")


@pytest.mark.parametrize("kind", [*REPEATABLE, Kind.AT_MOST_ONCE])
@pytest.mark.parametrize("kind_of_answer", ["never sent", "429", "503 throttled", "503 restarting", "409 restarting"])
def test_a_call_that_was_not_executed_is_sent_again(world: Any, say: Any, kind: Kind, kind_of_answer: str) -> None:
    answer = {
        "never sent": say.never_sent,
        "429": say.reply({"message": "slow down"}, 429),
        "503 throttled": say.reply({"message": "request was throttled"}, 503),
        "503 restarting": say.reply({"detail": {"code": "zone_restarting"}}, 503),
        "409 restarting": say.reply({"message": "zone is restarting, try later"}, 409),
    }[kind_of_answer]
    done = world.run(exchange(world.context, request(world, kind)), [answer, answer, say.reply({"ok": 1})])
    assert done.status == 200
    assert len(world.requests) == 3
    assert len(world.sleeps) == 2


@pytest.mark.parametrize("status", [500, 502, 503, 504, None])
@pytest.mark.parametrize("kind", REPEATABLE)
def test_a_repeatable_call_that_may_have_been_executed_is_sent_again(
    world: Any, say: Any, kind: Kind, status: int | None
) -> None:
    answer = say.lost if status is None else say.reply({"message": "broken"}, status)
    assert world.run(exchange(world.context, request(world, kind)), [answer, say.reply({})]).status == 200
    assert [sent.body for sent in world.requests] == [b"{}", b"{}"]


@pytest.mark.parametrize("status", [500, 502, 503, 504, 520, None])
def test_an_at_most_once_call_that_may_have_been_executed_is_never_sent_again(
    world: Any, say: Any, status: int | None
) -> None:
    answer = say.lost if status is None else say.reply({"message": "broken"}, status, x_snowflake_request_id="req-7")
    with pytest.raises(OutcomeUnknown) as caught:
        world.run(exchange(world.context, request(world, Kind.AT_MOST_ONCE)), [answer])
    assert len(world.requests) == 1
    assert caught.value.operation == "step"
    assert caught.value.job_id == "job"
    assert "global_steps" in caught.value.hint
    assert isinstance(caught.value.__cause__, TransportError if status is None else errors.ServiceError)


@pytest.mark.parametrize("status", [301, 302, 304, 400, 403, 404, 405, 409, 412, 422, 501])
@pytest.mark.parametrize("kind", [*REPEATABLE, Kind.AT_MOST_ONCE])
def test_a_refused_call_is_an_error_at_once(world: Any, say: Any, kind: Kind, status: int) -> None:
    expected = {
        403: errors.AuthError,
        404: errors.NotFoundError,
        409: errors.ConflictError,
        501: errors.ServiceError,
    }.get(status, errors.ApiError)
    with pytest.raises(expected) as caught:
        world.run(exchange(world.context, request(world, kind)), [say.reply({"message": "no"}, status)])
    assert type(caught.value) is expected
    assert caught.value.status == status
    assert len(world.requests) == 1


def test_a_lost_drained_read_is_an_error_and_not_repeated(world: Any, say: Any) -> None:
    drained = replace(calls.get(world.context, "/job/requests/r", "get-request-status"), kind=Kind.DRAINED)
    with pytest.raises(TransportError) as caught:
        world.run(exchange(world.context, drained), [say.lost])
    assert caught.value.sent is None
    assert world.run(exchange(world.context, drained), [say.never_sent, say.reply({})]).status == 200


def test_404_is_retried_only_for_an_id_created_seconds_ago(world: Any, say: Any) -> None:
    missing = say.reply({"message": "not found"}, 404)
    about_job = calls.get(world.context, "/job", "get-job", job_id="job")
    with pytest.raises(errors.NotFoundError):
        world.run(exchange(world.context, about_job), [missing])
    world.context.remember_id("job")
    assert world.run(exchange(world.context, about_job), [missing, missing, say.reply({})]).status == 200
    world.context.remember_id("job")
    world.now += 60
    with pytest.raises(errors.NotFoundError):
        world.run(exchange(world.context, about_job), [missing])


def test_404_is_an_error_once_the_service_was_seen_to_know_the_id(world: Any, say: Any) -> None:
    world.context.remember_id("job")
    about_job = calls.get(world.context, "/job", "get-job", job_id="job")
    world.run(exchange(world.context, about_job), [say.reply({}, 404), say.reply({})])
    with pytest.raises(errors.NotFoundError):
        world.run(exchange(world.context, about_job), [say.reply({}, 404)])


def test_404_of_a_fresh_id_ends_with_its_freshness(world: Any, say: Any) -> None:
    world.context.remember_id("job")
    with pytest.raises(errors.NotFoundError):
        world.run(
            exchange(world.context, calls.get(world.context, "/job", "get-job", job_id="job")),
            lambda sent: say.reply({}, 404),
        )
    assert 15 <= world.now - 1000 <= 40


def test_an_at_most_once_call_on_a_fresh_job_is_not_repeated_after_404(world: Any, say: Any) -> None:
    world.context.remember_id("job")
    with pytest.raises(errors.NotFoundError):
        world.run(exchange(world.context, request(world, Kind.AT_MOST_ONCE)), [say.reply({}, 404)])


def test_retry_after_is_obeyed(world: Any, say: Any) -> None:
    answers = [say.reply({}, 429, retry_after="37"), say.reply({})]
    world.run(exchange(world.context, request(world, Kind.AT_MOST_ONCE)), answers)
    assert 37 <= world.sleeps[0] <= 38.1


def test_retry_after_as_a_date_is_compared_with_the_services_clock(world: Any, say: Any) -> None:
    answer = say.reply({}, 503, retry_after="Wed, 21 Oct 2037 07:28:20 GMT", date="Wed, 21 Oct 2037 07:28:00 GMT")
    world.run(exchange(world.context, request(world, Kind.SAFE)), [answer, say.reply({})])
    assert 20 <= world.sleeps[0] <= 21.1


@pytest.mark.parametrize("nonsense", ["soon", "-5", "nan", "1e999", "Wed, 99 Oct"])
def test_an_unreadable_retry_after_is_ignored(world: Any, say: Any, nonsense: str) -> None:
    world.run(
        exchange(world.context, request(world, Kind.SAFE)), [say.reply({}, 429, retry_after=nonsense), say.reply({})]
    )
    assert 0 < world.sleeps[0] < 1


def test_retry_after_beyond_the_budget_is_an_error_without_waiting(world: Any, say: Any) -> None:
    with pytest.raises(errors.RateLimitedError):
        world.run(exchange(world.context, request(world, Kind.SAFE)), [say.reply({}, 429, retry_after="3600")])
    assert world.sleeps == []


def test_the_retry_budget_is_time(make_world: Any, say: Any) -> None:
    world = make_world(retry_budget_s=60.0)
    with pytest.raises(errors.ServiceError):
        world.run(exchange(world.context, request(world, Kind.SAFE)), lambda sent: say.reply({}, 503))
    assert 55 <= world.now - 1000 <= 61
    assert len(world.requests) < 25


def test_backoff_grows_and_is_jittered(world: Any, say: Any) -> None:
    with pytest.raises(errors.ServiceError):
        world.run(exchange(world.context, request(world, Kind.SAFE)), lambda sent: say.reply({}, 503))
    waits = world.sleeps[:-1]
    assert waits[0] <= 0.25
    assert max(waits) <= 10
    assert all(0.5 * min(0.25 * 2**k, 10) <= wait <= min(0.25 * 2**k, 10) for k, wait in enumerate(waits))


def test_max_retries_limits_their_number(make_world: Any, say: Any) -> None:
    world = make_world(max_retries=2)
    with pytest.raises(errors.ServiceError):
        world.run(exchange(world.context, request(world, Kind.SAFE)), lambda sent: say.reply({}, 500))
    assert len(world.requests) == 3


def test_a_deadline_covers_the_retries(world: Any, say: Any) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        world.run(
            exchange(world.context, request(world, Kind.SAFE), deadline=world.now + 5),
            lambda sent: say.reply({"message": "overloaded"}, 503),
        )
    assert world.now - 1000 <= 5.01
    assert "overloaded" in str(caught.value)
    assert isinstance(caught.value.__cause__, errors.ServiceError)


def test_a_deadline_bounds_each_attempts_timeouts(world: Any, say: Any) -> None:
    world.takes_s = 1.0
    world.run(exchange(world.context, request(world, Kind.SAFE), deadline=world.now + 4), [say.lost, say.reply({})])
    first, second = (sent.timeouts for sent in world.requests)
    assert first.total_s == first.read_s == first.connect_s == 4
    assert second.total_s < 3


def test_nothing_is_sent_after_the_deadline(world: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        world.run(exchange(world.context, request(world, Kind.SAFE), deadline=world.now - 1))
    assert world.requests == []


@pytest.mark.parametrize("code", ["390111", "390112", "390114", None])
def test_an_expired_session_is_renewed_once_and_the_call_replayed(world: Any, say: Any, code: str | None) -> None:
    done = world.run(exchange(world.context, request(world, Kind.AT_MOST_ONCE)), [say.expired(code), say.accepted])
    assert done.status == 200
    assert [sent.rejected for sent in world.requests] == [
        None,
        {"Authorization": 'Snowflake Token="old-session-token"'},
    ]
    assert world.sleeps == []


def test_a_session_that_expires_twice_is_an_error(world: Any, say: Any) -> None:
    with pytest.raises(errors.AuthError):
        world.run(exchange(world.context, request(world, Kind.SAFE)), [say.expired(), say.expired()])


def test_another_401_is_not_replayed(world: Any, say: Any) -> None:
    with pytest.raises(errors.AuthError) as caught:
        world.run(exchange(world.context, request(world, Kind.SAFE)), [say.expired("390100")])
    assert caught.value.code == "390100"


def test_a_credential_that_cannot_be_renewed_is_not_replayed(world: Any, say: Any) -> None:
    with pytest.raises(errors.AuthError):
        world.run(exchange(world.context, request(world, Kind.SAFE)), [say.reply({}, 401)])


def test_a_renewal_happens_once_even_when_the_replay_has_bad_weather(world: Any, say: Any) -> None:
    answers = [say.expired(), say.reply({}, 503), say.reply({})]
    world.run(exchange(world.context, request(world, Kind.SAFE)), answers)
    assert [sent.rejected is not None for sent in world.requests] == [False, True, False]


def test_a_permit_is_asked_at_every_attempt_and_its_refusal_reaches_the_caller(world: Any, say: Any) -> None:
    asked: list[int] = []

    def permit() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise SendRefused("the epoch was taken over")

    guarded = replace(request(world, Kind.AT_MOST_ONCE), permit=permit)
    with pytest.raises(SendRefused, match="taken over"):
        world.run(exchange(world.context, guarded), lambda sent: say.reply({}, 429))
    assert len(world.requests) == 2


def test_an_error_after_a_lost_reply_says_so(world: Any, say: Any) -> None:
    conflict = say.reply({"message": "already"}, 409)
    with pytest.raises(errors.ConflictError) as caught:
        world.run(exchange(world.context, request(world, Kind.IDEMPOTENT)), [say.lost, conflict])
    assert caught.value.after_lost_reply
    with pytest.raises(errors.ConflictError) as caught:
        world.run(exchange(world.context, request(world, Kind.IDEMPOTENT)), [say.never_sent, conflict])
    assert not caught.value.after_lost_reply


@pytest.mark.parametrize("body", [b"", b"<html>sign in</html>", b"[1, 2]", b'{"cut', b"null"])
def test_an_answer_that_is_no_json_object_is_a_protocol_error(world: Any, say: Any, body: bytes) -> None:
    with pytest.raises(errors.ProtocolError, match="not a JSON object"):
        world.run(exchange_json(world.context, request(world, Kind.SAFE)), [say.reply(body)])


def test_an_unreadable_answer_to_an_at_most_once_call_leaves_its_outcome_unknown(world: Any, say: Any) -> None:
    with pytest.raises(OutcomeUnknown) as caught:
        world.run(exchange_json(world.context, request(world, Kind.AT_MOST_ONCE)), [say.reply(b"<html>")])
    assert isinstance(caught.value.__cause__, errors.ProtocolError)
