"""One call, sent as often as its kind allows.

The rule for sending again follows from what may have happened at the other end, never from the caller:

====================================  =======================  ==========================================
answer                                safe, idempotent         at most once
====================================  =======================  ==========================================
never sent (refused, DNS, TLS)        again                    again
no reply after sending, 502, 504      again                    `OutcomeUnknown`
429                                   wait, again              wait, again: it was not executed
503                                   again                    again only if the body says not accepted
500                                   again                    `OutcomeUnknown`
409 workers restarting                again                    again
other 409, 3xx, other 4xx             error                    error
404                                   again for a new id       error
expired session                       renew once, again        renew once, again
====================================  =======================  ==========================================

"Again" ends with the time for it: the deadline of a wait, or `Policy.retry_budget_s`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any

from cortex_training.errors import (
    ApiError,
    CortexTrainingError,
    DeadlineExceeded,
    OutcomeUnknown,
    ProtocolError,
    TransportError,
)
from cortex_training.protocol import bootstrap, tally
from cortex_training.protocol.context import Context
from cortex_training.protocol.messages import Flow, Kind, Request, Response, Sleep, TransportFault, computed
from cortex_training.protocol.refusals import (
    api_error,
    is_session_expired,
    is_zone_restarting,
    says_workers_restart,
    was_not_accepted,
)

_log = logging.getLogger("cortex_training")

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 10.0

_HOW_TO_SETTLE = {
    "create": "If it was, a job is running under an id nobody here knows: look for it with list_jobs() and cancel it.",
    "step": "The next step's global_steps, or list_checkpoints() after a save, tells whether it was. Do not repeat it "
    "blindly: a doubled step silently changes the training.",
    "save": "list_checkpoints() shows the checkpoint if it was; saving again only costs space.",
    "load": "Loading the same checkpoint again gives the same weights once nothing else is in flight on the job.",
    "generate": "Generation changes nothing, so it may be sent again if paying for it twice is acceptable.",
    "generate-stream": "Generation changes nothing, so it may be sent again if paying for it twice is acceptable.",
    "forward": "Send it again only if running the operation twice is harmless.",
}


class _Verdict(Enum):
    AGAIN = auto()
    RENEW = auto()
    UNKNOWN = auto()
    ERROR = auto()


@dataclass(frozen=True, slots=True)
class _Judgement:
    verdict: _Verdict
    executed: bool
    """Whether the service may have executed the call."""


def exchange(
    context: Context, request: Request, *, deadline: float | None = None, budget_s: float | None = None
) -> Flow[Response]:
    """The 2xx answer to `request`.

    `deadline` is monotonic and bounds everything, the retries included. Without one, attempts begin for `budget_s`
    seconds (the policy's retry budget by default).

    Raises `ApiError`, `TransportError`, `OutcomeUnknown`, `DeadlineExceeded`, and what `request.permit` raises.
    An `ApiError` has `after_lost_reply` set when an earlier attempt of the same call may have been executed.
    A missing database is created once, if the policy says so (`DatabaseNotCreated` if that fails): the call that found
    it missing was refused, so it is sent again.
    """
    tried_with_database = context.database_created
    try:
        return (yield from _attempts(context, request, deadline, budget_s))
    except ApiError as error:
        wanted = context.policy.database_to_create
        if wanted is None or tried_with_database or not bootstrap.says_database_missing(error):
            raise
    if not context.database_created:
        yield from _create_database(context, wanted, deadline)
    return (yield from _attempts(context, request, deadline, budget_s))


def _create_database(context: Context, wanted: tuple[str, str], deadline: float | None) -> Flow[None]:
    for statement in bootstrap.statements(*wanted):
        request = bootstrap.statement_request(context.policy, statement)
        try:
            response = yield from _attempts(context, request, deadline, budget_s=None)
        except (ApiError, TransportError) as error:
            raise bootstrap.not_created(statement, str(error)) from error
        bootstrap.check_executed(statement, response)
        _log.warning("executed %s, because the service misses the database or schema", statement)
    context.database_created = True


def _attempts(context: Context, request: Request, deadline: float | None, budget_s: float | None) -> Flow[Response]:
    until = deadline
    if until is None:
        until = context.clock() + (context.policy.retry_budget_s if budget_s is None else budget_s)
    tally.count(requests=1)
    failure: CortexTrainingError | None = None
    retries = 0
    lost_reply = renewed = False
    while True:
        attempt = _bounded(context, request, deadline, failure)
        tally.count(attempts=1)
        answer: Response | TransportFault = yield attempt
        _log.debug("%s %s: %s", request.method, request.path, answer)
        if isinstance(answer, Response) and 200 <= answer.status < 300:
            context.saw_ids(request.names)
            return answer
        judged = _judge(context, request, answer)
        if judged.verdict is _Verdict.RENEW:
            if not renewed and isinstance(answer, Response):
                renewed = True
                request = replace(request, rejected=answer.credential)
                continue
            judged = _Judgement(_Verdict.ERROR, executed=False)
        request = replace(request, rejected=None)
        failure = _failure(request, answer)
        if isinstance(failure, ApiError) and isinstance(answer, Response):
            failure.after_lost_reply = lost_reply
            failure.workers_restarting = says_workers_restart(answer)
            if failure.workers_restarting and request.permit is not None:
                # A caller that keeps a permit keeps track of what the workers hold: gradients that a restart loses
                # must not be stepped over in silence.
                raise failure
        if judged.verdict is _Verdict.UNKNOWN:
            raise outcome_unknown(request, _what_came_back(answer, failure)) from failure
        if judged.verdict is _Verdict.ERROR:
            raise failure
        lost_reply = lost_reply or judged.executed
        retries += 1
        wait_s = _wait_s(context, answer, retries, until)
        if wait_s is None or (context.policy.max_retries is not None and retries > context.policy.max_retries):
            if deadline is not None and wait_s is None:
                raise _too_late(request, failure) from failure
            raise failure
        yield Sleep(wait_s)


def exchange_json(
    context: Context, request: Request, *, deadline: float | None = None, budget_s: float | None = None
) -> Flow[dict[str, Any]]:
    """The JSON object in the answer to `request`; raises as `exchange`, and `ProtocolError` for anything else."""
    response = yield from exchange(context, request, deadline=deadline, budget_s=budget_s)
    try:
        reply = yield from computed(lambda: response.json_object(request), len(response.body))
    except ProtocolError as error:
        if request.kind is Kind.AT_MOST_ONCE:
            raise outcome_unknown(request, str(error)) from error
        raise
    return reply


def required_text(request: Request, reply: dict[str, Any], key: str) -> str:
    """`reply[key]`, a non-empty string.

    Without it an at-most-once call was executed and its handle is lost, which is `OutcomeUnknown`; any other call
    raises `ProtocolError`.
    """
    value = reply.get(key)
    if isinstance(value, str) and value:
        return value
    text = f"{request.method} {request.path} was answered without a {key} (keys: {', '.join(sorted(reply)) or 'none'})"
    if request.kind is Kind.AT_MOST_ONCE:
        raise outcome_unknown(request, text)
    raise ProtocolError(text)


def _what_came_back(answer: Response | TransportFault, failure: CortexTrainingError) -> str:
    if isinstance(failure, ApiError):
        code = f" [{failure.code}]" if failure.code else ""
        return f"it was answered {failure.status}{code}: {failure.message or 'no message'}"
    return f"it was sent, and no answer came back ({answer.error if isinstance(answer, TransportFault) else ''})"


def outcome_unknown(request: Request, reason: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        operation=request.operation,
        job_id=request.job_id,
        reason=reason.rstrip("."),
        hint=_HOW_TO_SETTLE.get(request.operation, "Ask the service for the state of the job before sending it again."),
        sent=f"{len(request.body or b'')} bytes",
    )


def _bounded(
    context: Context, request: Request, deadline: float | None, failure: CortexTrainingError | None
) -> Request:
    if deadline is None:
        return request
    remaining_s = deadline - context.clock()
    if remaining_s <= 0:
        raise _too_late(request, failure) from failure
    timeouts = request.timeouts
    if max(timeouts.connect_s, timeouts.read_s, timeouts.total_s) <= remaining_s:
        return request
    return replace(request, timeouts=timeouts.within(remaining_s))


def _too_late(request: Request, failure: CortexTrainingError | None) -> DeadlineExceeded:
    last = f" The last attempt ended with: {failure}" if failure is not None else ""
    return DeadlineExceeded(f"{request.method} {request.path} got no useful answer before the deadline.{last}")


def _judge(context: Context, request: Request, answer: Response | TransportFault) -> _Judgement:
    repeatable = request.kind in (Kind.SAFE, Kind.IDEMPOTENT)
    maybe_executed = _Judgement(
        _Verdict.AGAIN if repeatable else _Verdict.UNKNOWN if request.kind is Kind.AT_MOST_ONCE else _Verdict.ERROR,
        executed=True,
    )
    not_executed = _Judgement(_Verdict.AGAIN, executed=False)
    refused = _Judgement(_Verdict.ERROR, executed=False)
    if isinstance(answer, TransportFault):
        return not_executed if answer.sent is False else maybe_executed
    status = answer.status
    if answer.renewable and is_session_expired(answer):
        return _Judgement(_Verdict.RENEW, executed=False)
    if status == 429 or is_zone_restarting(answer) or was_not_accepted(answer):
        return not_executed
    if status == 404 and repeatable and any(map(context.is_fresh, request.names)):
        return not_executed
    if status >= 500 and status not in (501, 505):
        return maybe_executed
    return refused


def _failure(request: Request, answer: Response | TransportFault) -> CortexTrainingError:
    if isinstance(answer, Response):
        return api_error(request, answer)
    how = "was not sent" if answer.sent is False else "was sent, and no answer came back"
    return TransportError(
        f"{request.method} {request.path} {how}: {answer.error}",
        sent=answer.sent,
        method=request.method,
        path=request.path,
    )


def _wait_s(context: Context, answer: Response | TransportFault, retries: int, until: float) -> float | None:
    """Seconds before the next attempt; None when there is no time left for one."""
    remaining_s = until - context.clock()
    if remaining_s <= 0:
        return None
    asked_s = retry_after_s(answer.headers, context.wall()) if isinstance(answer, Response) else None
    if asked_s is not None:
        # Everybody who was told "in 5 seconds" must not come back in the same instant.
        wait_s = max(asked_s, 0.1) + min(1.0, 0.1 * asked_s) * context.random.random()
        return wait_s if wait_s <= remaining_s else None
    backoff_s = min(_FIRST_BACKOFF_S * 2.0 ** min(retries - 1, 16), _LONGEST_BACKOFF_S)
    return min(backoff_s * (0.5 + 0.5 * context.random.random()), remaining_s)


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """`Retry-After` in seconds, from its number or its date; None if absent or unreadable.

    `headers` have lower-case names, or don't mind; `now` is this machine's clock, UTC epoch seconds.
    """
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text) if text[0].isdigit() else _date(text) - _service_now(headers, now)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def clock_skew_s(context: Context) -> Flow[float | None]:
    """Seconds that this machine's clock is ahead of the service's; None when the service does not tell its time."""
    began = context.wall()
    request = Request(
        "GET", context.policy.prefix + "/capacity", Kind.SAFE, "clock-skew", context.policy.timeouts, names=()
    )
    response = yield from exchange(context, request)
    try:
        theirs = _date(response.headers["date"])
    except (KeyError, ValueError, TypeError):
        return None
    # The service read its clock somewhere between our two readings, to the second.
    return (began + context.wall()) / 2 - theirs - 0.5


def _date(text: str) -> float:
    return parsedate_to_datetime(text).timestamp()


def _service_now(headers: Mapping[str, str], now: float) -> float:
    # The date is by the service's clock, so its own idea of now is the one to compare with.
    try:
        return _date(headers["date"])
    except (KeyError, ValueError, TypeError):
        return now
