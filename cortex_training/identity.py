"""Names that exist before the call they name.

A caller that crashes between "decided to call" and "read the answer" can only find out what happened if the thing it
asked for already had a name. So a job's id is written down before the job is created, and a forward-backward's id
follows from what it is.
"""

from __future__ import annotations

import uuid

_NAMESPACE = uuid.UUID("6f0c8e53-2a0b-5d7e-9b39-0f7a6c1f4d21")
"""Fixed for ever: another namespace would turn every replay of a running job into a new execution."""


def new_job_id() -> str:
    """A random UUID in text form, to be stored durably before the job is created."""
    return str(uuid.uuid4())


def new_token() -> str:
    """32 random hex digits that tell one writer of a record from another."""
    return uuid.uuid4().hex


def group_id(job_id: str, segment: int, step: int, micro_batch: int, attempt: int = 0) -> str:
    """The ``chunk_group_id`` of one forward-backward.

    The service runs a group at most once, so the id holds everything that makes an execution a new one: `segment`
    changes when weights are reloaded or the job is replaced, `attempt` rises only after the service confirmed that
    the request failed or was cancelled (a failed group keeps answering "failed" under its id).

    `step` counts from 1, `micro_batch` and `segment` from 0.
    """
    if step < 1 or micro_batch < 0 or segment < 0 or attempt < 0:
        raise ValueError(
            f"group_id: step counts from 1, segment, micro_batch and attempt from 0; got step={step}, "
            f"segment={segment}, micro_batch={micro_batch}, attempt={attempt}"
        )
    return str(uuid.uuid5(_NAMESPACE, f"{job_id}|{segment}|{step}|{micro_batch}|{attempt}"))
