"""Requests on a running job, submitted once by a flow run and found again by whoever runs it next."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from cortex_training.answers import RequestResult
from cortex_training.errors import ApiError, NotFoundError, OutcomeUnknown, RequestFailed, SendRefused, TransportError
from cortex_training.identity import new_token
from cortex_training.states import RequestState, request_state
from prefect_cortex_training.labels import Label, RunLabels, is_finished

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

INTENT = "intent"
NOT_SENT = "not sent"
"""What a claim says before there is a request id. Labels can be changed, never removed."""

Submit = Callable[[], Awaitable[str]]


def operation_key(verb: str, job_id: str, seq: int) -> str:
    """The label of operation number `seq` of one verb on one job."""
    return f"{verb}.{job_id}.{seq}"


async def submit_once(labels: RunLabels, key: str, job_id: str, submit: Submit) -> str:
    """The id of the request under `key`: recorded by an earlier execution, or submitted now, never twice.

    Whoever wants to send writes a claim of its own first and then looks for others. Of two processes at least one sees
    the other, so at most one sends. Raises OutcomeUnknown when another execution may have sent it, or is about to.
    """
    earlier = _recorded(await labels.read(), key, job_id)
    if earlier is not None:
        return earlier
    claim = f"{key}.{new_token()[:8]}"
    others = await labels.write({claim: INTENT})
    del others[claim]
    try:
        earlier = _recorded(others, key, job_id)
    except OutcomeUnknown:
        await labels.write({claim: NOT_SENT})
        raise
    if earlier is not None:
        await labels.write({claim: NOT_SENT})
        return earlier
    try:
        request_id = await submit()
    except (ApiError, SendRefused, TransportError) as error:
        if getattr(error, "sent", False) is False:
            # Refused, or never on its way: nothing was executed, and a rerun may send it.
            await labels.write({claim: NOT_SENT})
        raise
    await labels.write({claim: request_id})
    return request_id


def _recorded(written: Mapping[str, Label], key: str, job_id: str) -> str | None:
    """The id of the request that some execution sent under `key`, if any did; raises OutcomeUnknown if one may have."""
    claims = [str(value) for name, value in written.items() if name.startswith(f"{key}.")]
    sent = [value for value in claims if value not in (INTENT, NOT_SENT)]
    if sent:
        return sent[0]
    if INTENT in claims:
        raise OutcomeUnknown(
            operation=key.partition(".")[0],
            job_id=job_id,
            reason="another execution of this task wrote down that it was about to send it, and nothing after that",
            hint="To go on without knowing, cancel the job and run the flow again: create_job then makes a new one",
        )
    return None


async def recorded_request(labels: RunLabels, key: str, job_id: str) -> str | None:
    """The id of the request that some execution sent under `key`, if it wrote one down; None while that is unknown."""
    with contextlib.suppress(OutcomeUnknown):
        return _recorded(await labels.read(), key, job_id)
    return None


async def submit_again_if_lost(
    client: AsyncCortexTrainingClient, labels: RunLabels, key: str, job_id: str, submit: Submit, timeout_s: float | None
) -> tuple[str, RequestResult]:
    """Request id and result of an operation that may be repeated: one in flight is waited for, a lost or failed one
    sent anew.
    """
    recorded = (await labels.read()).get(key)
    if recorded is not None:
        with contextlib.suppress(NotFoundError, RequestFailed):
            return str(recorded), await client.poll_request(job_id, str(recorded), timeout_s=timeout_s)
    request_id = await submit()
    await labels.write({key: request_id})
    return request_id, await client.poll_request(job_id, request_id, timeout_s=timeout_s)


async def find_or_submit(
    client: AsyncCortexTrainingClient, labels: RunLabels, key: str, job_id: str, submit: Submit
) -> str:
    """The request of an operation that may be repeated: the recorded one, unless it failed or is lost, else a new one.
    Nobody waits for it here. A job whose work is finished has ended, and is not asked.
    """
    written = await labels.read()
    recorded = written.get(key)
    if recorded is not None and (is_finished(written, job_id) or not await _is_lost(client, job_id, str(recorded))):
        return str(recorded)
    request_id = await submit()
    await labels.write({key: request_id})
    return request_id


async def _is_lost(client: AsyncCortexTrainingClient, job_id: str, request_id: str) -> bool:
    try:
        status = await client.get_request_status(job_id, request_id, max_events=1)
    except NotFoundError:
        return True
    return request_state(status.get("status")) in (RequestState.FAILED, RequestState.CANCELLED)


def numbers_of(result: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The `names` of a result that are numbers or text: what a stored task result may hold."""
    return {name: result[name] for name in names if isinstance(result.get(name), int | float | str)}
