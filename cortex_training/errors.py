"""One tree for everything that can go wrong between a caller and the service.

Each class is also the exception the public client raises in that place (`requests.HTTPError`, `RuntimeError`,
`TimeoutError`, `ValueError`), so code written for it keeps catching what it caught. No message, attribute or
representation holds a credential: errors are built from what the service said, never from what was sent in a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import requests


def _restore(cls: type[CortexTrainingError], args: tuple[Any, ...], state: dict[str, Any]) -> CortexTrainingError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class CortexTrainingError(Exception):
    """Root of the tree. `str(error)` says what was tried, on what, what came back and what to do."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else self.__class__.__name__

    def __reduce__(self) -> tuple[Any, ...]:
        # Engines carry exceptions between processes; the keyword-only constructors below would not survive the
        # default way.
        return _restore, (self.__class__, self.args, self.__dict__.copy())


class ConfigurationError(CortexTrainingError, ValueError):
    """Bad input, found before anything remote happened. The message names the field, the value and the fix."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, value: object, fix: str) -> ConfigurationError:
        """`field` is ``value``, and `fix` says what it must be. Never pass a secret as `value`."""
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:200] + "…"
        return cls(f"{field} = {shown}: {fix}", field=field)


class TransportError(CortexTrainingError, requests.ConnectionError):
    """No answer came back.

    `sent` is False when the request provably never reached the service (no connection, name or TLS failure, nothing
    written), True or None when it may have.
    """

    def __init__(self, message: str, *, sent: bool | None = None, method: str = "", path: str = "") -> None:
        requests.ConnectionError.__init__(self, message)
        self.sent = sent
        self.method = method
        self.path = path


class ApiError(CortexTrainingError, requests.HTTPError):
    """An answer outside 2xx.

    `status` HTTP status · `code` the service's own error code, "" if none · `message` its words · `request_id` the
    ``x-snowflake-request-id`` of the answer, "" if none · `detail` the innermost structured error, {} if none ·
    `response` the answer as a `requests.Response` (no request attached: it would hold the credential) ·
    `workers_restarting` whether the workers are on their way back, and may have lost what they held ·
    `after_lost_reply` whether an earlier attempt of the same call may have been executed, so that this refusal may be
    the echo of its success.
    """

    def __init__(
        self,
        *,
        status: int,
        code: str = "",
        message: str = "",
        request_id: str = "",
        detail: Mapping[str, Any] | None = None,
        method: str = "",
        path: str = "",
        advice: str = "",
        response: requests.Response | None = None,
    ) -> None:
        said = message or "no message"
        coded = f" [{code}]" if code and code != str(status) else ""
        text = f"{method} {path} was answered {status}{coded}: {said}".strip()
        if advice:
            text += f"{'' if text.endswith(('.', '!', '?')) else '.'} {advice}"
        if request_id:
            text += f" (snowflake request id: {request_id})"
        requests.HTTPError.__init__(self, text, response=response)
        self.status = status
        self.code = code
        self.message = message
        self.request_id = request_id
        self.detail: dict[str, Any] = dict(detail or {})
        self.method = method
        self.path = path
        self.after_lost_reply = False
        self.workers_restarting = False


class AuthError(ApiError):
    """401 or 403: the credential is missing, expired, or may not do this."""


class NotFoundError(ApiError):
    """404: the service does not know this id (or this role may not see it)."""


class ConflictError(ApiError):
    """409: the job's state or an earlier call forbids this one."""


class RateLimitedError(ApiError):
    """429, and the time to wait for the service was used up."""


class ServiceError(ApiError):
    """5xx, and the time to wait for the service was used up."""


class ChunkGroupError(ApiError):
    """The service refused a chunk of a forward-backward or generate; `detail` is its chunk-group record."""


class ChunkGroupRestartError(ChunkGroupError):
    """The service lost the group again after the one restart a call makes."""


class ChunkGroupConflictError(ChunkGroupError):
    """The same group id was used with other bytes, or chunks of the group are missing."""


class OutcomeUnknown(CortexTrainingError):
    """An at-most-once call may or may not have been executed, so it was not sent again.

    `operation` and `job_id` name the call, `sent` describes what was sent, `hint` says how to find out what happened.
    """

    def __init__(self, *, operation: str, job_id: str, reason: str, hint: str, sent: str = "") -> None:
        what = f"{operation} on job {job_id}" if job_id else operation
        once = f"It was sent once ({sent}) and not repeated." if sent else "It was sent once and not repeated."
        super().__init__(f"{what} may have been executed: {reason}. {once} {hint}")
        self.operation = operation
        self.job_id = job_id
        self.reason = reason
        self.hint = hint
        self.sent = sent


class SendRefused(CortexTrainingError):
    """The caller's `permit` said no just before the socket write; nothing was sent."""


class DeadlineExceeded(CortexTrainingError, TimeoutError):
    """The caller's time is over. The remote work goes on; the same wait can be started again."""

    def __init__(self, message: str, *, timeout_s: float | None = None) -> None:
        TimeoutError.__init__(self, message)
        self.timeout_s = timeout_s


class RequestFailed(CortexTrainingError, RuntimeError):
    """A request ended `failed` or `cancelled`: `error` is what the service said."""

    def __init__(self, *, job_id: str, request_id: str, state: str, error: str = "") -> None:
        super().__init__(
            f"request {request_id} of job {job_id} ended {state!r}: {error or 'the service gave no reason'}"
        )
        self.job_id = job_id
        self.request_id = request_id
        self.state = state
        self.error = error


class JobFailed(CortexTrainingError, RuntimeError):
    """A job ended: `state` is its terminal state, `reason` the service's words."""

    def __init__(self, *, job_id: str, state: str, reason: str = "") -> None:
        super().__init__(f"job {job_id} is {state!r}: {reason or 'the service gave no reason'}")
        self.job_id = job_id
        self.state = state
        self.reason = reason


class DatabaseNotCreated(CortexTrainingError, RuntimeError):
    """The service misses the database or schema, and creating it, which the client was asked to do, failed."""


class ProtocolError(CortexTrainingError, RuntimeError):
    """An answer that breaks the protocol: not JSON, a redirect, a missing id, a wrong hash."""
