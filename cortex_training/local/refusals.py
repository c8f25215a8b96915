"""A refusal: a 4xx answer with the JSON body the service gives."""

from __future__ import annotations

import json
from typing import Any


class Refusal(Exception):
    """What is asked is not done, and why. `extra` keys are added to the body."""

    def __init__(self, status: int, message: str, *, code: int | str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code: int | str = status if code is None else code
        self.extra = extra

    def body(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, **self.extra}


def bad_field(name: str, value: object, problem: str) -> Refusal:
    """400 with the field, what it holds and what it must be, in both shapes the service uses for validation errors."""
    shown = repr(value)
    if len(shown) > 200:
        shown = shown[:200] + "…"
    message = f"{name}: {problem}, got {shown}"
    return Refusal(400, message, detail=[{"loc": ["body", *name.split(".")], "msg": message, "type": "value_error"}])


def not_found(what: str, name: str) -> Refusal:
    return Refusal(404, f"{what} {name!r} does not exist or is not yours to see")


def job_not_running(job_id: str, state: str, reason: str, asked: str) -> Refusal:
    """409: the answer to data-plane calls and polls on a job in any other state than running."""
    because = f" ({reason})" if reason else ""
    return Refusal(
        409, f"{asked}: job {job_id} is {state}{because}, not running", job_id=job_id, job_status=state, reason=reason
    )


def workers_restarting(sub_job_id: str, asked: str) -> Refusal:
    """409: what was asked has not been accepted, and may be asked again."""
    return Refusal(409, f"{asked}: zone returned 409: the workers of {sub_job_id} are restarting", code="517604")


def chunk_group_refusal(code: str, message: str, group_id: str, **numbers: int) -> Refusal:
    """409 as the service's gateway wraps it: the worker's own answer is JSON inside the message."""
    detail = {"detail": {"code": code, "message": message, "chunk_group_id": group_id, **numbers}}
    wrapped = f"Cortex training forwardBackward failed: zone returned 409: {json.dumps(detail)}"
    return Refusal(409, wrapped, code="517604")
