"""Whether an optimizer step was executed, of which only the intent is known."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cortex_training.answers import RequestResult
from cortex_training.errors import CortexTrainingError, OutcomeUnknown, ProtocolError
from cortex_training.protocol.results import checkpoint_id
from prefect_cortex_training.labels import RunLabels
from prefect_cortex_training.submission import recorded_request

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

ON_ITS_WAY_S = 4.0
"""How long another execution that has just written its intent may take to have the answer on record."""


async def settle_step(
    client: AsyncCortexTrainingClient,
    labels: RunLabels,
    key: str,
    job_id: str,
    expected_global_step: int,
    timeout_s: float,
    unknown: CortexTrainingError,
) -> tuple[str, RequestResult]:
    """Request id (or the name of the checkpoint that settled it) and result of a step whose answer was lost.

    Nothing but a save may be sent behind such a step. One step less than expected means that the request may still
    land: the save then holds everything up to here, and the job has to be given up. Raises OutcomeUnknown then.
    """
    await asyncio.sleep(ON_ITS_WAY_S)
    if isinstance(unknown, OutcomeUnknown):
        request_id = await recorded_request(labels, key, job_id)
        if request_id is not None:
            return request_id, await client.poll_request(job_id, request_id, timeout_s=timeout_s)
    saved = await client.poll_request(
        job_id, await client.save(job_id, checkpoint_type="resumable"), timeout_s=timeout_s
    )
    checkpoint = checkpoint_id(saved)
    listed = {entry.get("checkpoint_id"): entry for entry in await client.list_checkpoints(job_id)}
    if checkpoint is None or checkpoint not in listed:
        raise ProtocolError(f"the save that was to settle {key} is not among the checkpoints of job {job_id}")
    counted = int(listed[checkpoint]["global_steps"])
    if counted == expected_global_step - 1:
        raise OutcomeUnknown(
            operation="step",
            job_id=job_id,
            reason=f"{unknown}. A save tells that it has not been executed; it may still be",
            hint=(
                f"Checkpoint {checkpoint} holds everything before it. Either cancel the job and run the flow again, "
                f"or create another job, load {checkpoint} of job {job_id} into it, and go on there"
            ),
        )
    return checkpoint, {"global_steps": counted}
