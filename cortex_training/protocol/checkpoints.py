"""Checkpoints of a job: list, export, delete."""

from __future__ import annotations

from typing import cast

from cortex_training.answers import Checkpoint, CheckpointExport
from cortex_training.errors import NotFoundError, ProtocolError
from cortex_training.protocol import calls
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import exchange, exchange_json
from cortex_training.protocol.messages import Flow, Kind
from cortex_training.protocol.urls import segment


def list_checkpoints(context: Context, job_id: str) -> Flow[list[Checkpoint]]:
    path = f"{calls.job_path(job_id)}/checkpoints"
    request = calls.get(context, path, "list-checkpoints", job_id=job_id)
    reply = yield from exchange_json(context, request)
    checkpoints = reply.get("checkpoints", [])
    if not isinstance(checkpoints, list):
        raise ProtocolError(f"GET {request.path}: checkpoints is a {type(checkpoints).__name__}, not a list")
    return [cast(Checkpoint, checkpoint) for checkpoint in checkpoints if isinstance(checkpoint, dict)]


def export_checkpoint(context: Context, job_id: str, checkpoint_id: str) -> Flow[CheckpointExport]:
    """The links are secrets: whoever has one can read the file until it expires."""
    path = f"{calls.job_path(job_id)}/checkpoints/{segment('checkpoint_id', checkpoint_id)}:export"
    request = calls.without_body(context, "POST", path, "export", Kind.IDEMPOTENT, job_id=job_id)
    return cast(CheckpointExport, (yield from exchange_json(context, request)))


def delete_checkpoint(context: Context, job_id: str, checkpoint_id: str) -> Flow[None]:
    path = f"{calls.job_path(job_id)}/checkpoints/{segment('checkpoint_id', checkpoint_id)}"
    request = calls.without_body(context, "DELETE", path, "delete-checkpoint", Kind.IDEMPOTENT, job_id=job_id)
    try:
        yield from exchange(context, request)
    except NotFoundError as missing:
        # Gone after our own attempt whose reply was lost: that attempt deleted it. Gone at the first look: an error.
        if not missing.after_lost_reply:
            raise
