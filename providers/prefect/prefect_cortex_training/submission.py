"""Requests on a running job, submitted once by a flow run and found again by whoever runs it next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from cortex_training.errors import ApiError, NotFoundError, OutcomeUnknown, RequestFailed, SendRefused, TransportError
from prefect_cortex_training.labels import RunLabels

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

INTENT = "intent"
NOT_SENT = "not sent"
"""What an operation's label says before there is a request id. Labels can be changed, never removed."""

Submit = Callable[[], Awaitable[str]]


def operation_key(verb: str, job_id: str, seq: int) -> str:
    """The label of operation number `seq` of one verb on one job."""
    return f"{verb}.{job_id}.{seq}"


async def submit_once(labels: RunLabels, key: str, job_id: str, submit: Submit) -> str:
    """The id of the request under `key`: recorded by an earlier execution, or submitted now, never twice.

    Raises OutcomeUnknown when an earlier execution may have submitted it and could not write down what came back.
    """
    recorded = (await labels.read()).get(key, NOT_SENT)
    if recorded == INTENT:
        raise OutcomeUnknown(
            operation=key.partition(".")[0],
            job_id=job_id,
            reason="an earlier execution of this task wrote down that it was about to send it, and nothing after that",
            hint=(
                "A save and its global_steps tell whether it was executed. To go on without knowing, cancel the job "
                "and run the flow again: create_job then makes a new one"
            ),
        )
    if recorded != NOT_SENT:
        return str(recorded)
    await labels.write({key: INTENT})
    try:
        request_id = await submit()
    except (ApiError, SendRefused, TransportError) as error:
        if getattr(error, "sent", False) is False:
            # Refused, or never on its way: nothing was executed, and a rerun may send it.
            await labels.write({key: NOT_SENT})
        raise
    await labels.write({key: request_id})
    return request_id


async def submit_again_if_lost(
    client: AsyncCortexTrainingClient, labels: RunLabels, key: str, job_id: str, submit: Submit, timeout_s: float | None
) -> tuple[str, dict[str, Any]]:
    """Request id and result of an operation that may be repeated: one in flight is waited for, a lost or failed one
    sent anew.
    """
    recorded = (await labels.read()).get(key)
    if recorded is not None and recorded != NOT_SENT:
        try:
            return str(recorded), await client.poll_request(job_id, str(recorded), timeout_s=timeout_s)
        except (NotFoundError, RequestFailed):
            await labels.write({key: NOT_SENT})
    request_id = await submit()
    await labels.write({key: request_id})
    return request_id, await client.poll_request(job_id, request_id, timeout_s=timeout_s)


def numbers_of(result: dict[str, Any], *names: str) -> dict[str, Any]:
    """The `names` of a result that are numbers or text: what a stored task result may hold."""
    return {name: result[name] for name in names if isinstance(result.get(name), int | float | str)}
