"""Jobs: create, look, list, cancel, wait, capacity."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from cortex_training.answers import Capacity, CreatedJob, ExperimentRun, Job
from cortex_training.config import Hardware, JobType, SubJobConfig, canonical_job_type, check_matching_lora
from cortex_training.errors import (
    ApiError,
    ConfigurationError,
    ConflictError,
    CortexTrainingError,
    DeadlineExceeded,
    JobFailed,
)
from cortex_training.protocol import calls
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import exchange, exchange_json, required_text
from cortex_training.protocol.messages import Flow, Kind, Sleep, Timeouts
from cortex_training.protocol.urls import segment
from cortex_training.states import JobState, is_terminal_job, job_state

_log = logging.getLogger("cortex_training")

DEBUG_OPTIONS_ENV = "CORTEX_TRAINING_ENABLE_DEBUG_OPTIONS"
_SHORTEST_TIMEOUT_S, _LONGEST_TIMEOUT_S = 300, 604_800
_CAPACITY_TIMEOUTS = Timeouts(connect_s=10.0, read_s=30.0, total_s=40.0)
_CAPACITY_BUDGET_S = 20.0

Progress = Callable[[Job], None] | None


def create_job(
    context: Context,
    sub_jobs: Sequence[SubJobConfig],
    job_id: str | None = None,
    experiment_name: str | None = None,
    hardware: Hardware | str | None = None,
    idle_timeout_seconds: int | None = None,
    pending_timeout_seconds: int | None = None,
) -> Flow[str]:
    body = create_body(sub_jobs, job_id, experiment_name, hardware, idle_timeout_seconds, pending_timeout_seconds)
    reply = yield from _create(context, body)
    return str(reply["job_id"])


def create_job_from_body(context: Context, body: Mapping[str, Any]) -> Flow[CreatedJob]:
    check_body(body)
    return cast(CreatedJob, (yield from _create(context, body)))


def create_body(
    sub_jobs: Sequence[SubJobConfig],
    job_id: str | None,
    experiment_name: str | None,
    hardware: Hardware | str | None,
    idle_timeout_seconds: int | None,
    pending_timeout_seconds: int | None,
) -> dict[str, Any]:
    """The create request for typed sub-jobs. Raises `ConfigurationError` naming the sub-job and the field."""
    if isinstance(sub_jobs, str | Mapping) or not isinstance(sub_jobs, Iterable):
        raise ConfigurationError.of("sub_jobs", sub_jobs, "must be a list of SubJobConfig")
    configs = list(sub_jobs)
    if not configs:
        raise ConfigurationError.of("sub_jobs", [], "a job needs at least one sub-job")
    for index, config in enumerate(configs):
        if not isinstance(config, SubJobConfig):
            raise ConfigurationError.of(f"sub_jobs[{index}]", config, "must be a SubJobConfig")
        try:
            config.validate()
        except ConfigurationError as error:
            raise ConfigurationError(f"sub_jobs[{index}].{error}", field=f"sub_jobs[{index}].{error.field}") from None
    check_matching_lora(configs)
    check_timeouts(idle_timeout_seconds, pending_timeout_seconds)
    body: dict[str, Any] = {"sub_job_configs": [config.to_wire() for config in configs]}
    optional = {
        "job_id": job_id,
        "experiment_name": experiment_name,
        "hardware": None if hardware is None else checked_hardware(hardware),
        "idle_timeout_seconds": idle_timeout_seconds,
        "pending_timeout_seconds": pending_timeout_seconds,
    }
    body.update({key: value for key, value in optional.items() if value is not None})
    check_body(body)
    return body


def check_body(body: object) -> None:
    """What the service would refuse only after placing the job, or what would leave a job nobody can use."""
    if not isinstance(body, Mapping):
        raise ConfigurationError.of("body", body, "must be a JSON object with sub_job_configs")
    configs = body.get("sub_job_configs")
    if not isinstance(configs, list) or not configs:
        raise ConfigurationError.of("sub_job_configs", configs, "must be a non-empty list")
    if body.get("job_id") is not None:
        check_job_id(body["job_id"])
    kinds = [canonical_job_type(config.get("job_type")) for config in configs if isinstance(config, Mapping)]
    if kinds.count(JobType.TRAINING) > 1:
        raise ConfigurationError.of("sub_job_configs", kinds, "a job takes at most one training sub-job")
    if body.get("debug") and os.environ.get(DEBUG_OPTIONS_ENV, "").strip().lower() not in ("1", "true", "yes", "on"):
        raise ConfigurationError(f"debug: debug options are for the service's developers; set {DEBUG_OPTIONS_ENV}=1")


def check_job_id(job_id: object) -> None:
    """Refuse what can't be a job's id: it becomes a segment of paths, and the front of its sub-jobs' ids."""
    segment("job_id", job_id)
    if ":" in str(job_id) or "/" in str(job_id):
        raise ConfigurationError.of("job_id", job_id, "must hold no ':' or '/'; use a random UUID in text form")


def checked_hardware(value: object) -> str:
    """The name of a kind of GPU node as the service spells it, or `ConfigurationError`."""
    if not isinstance(value, str) or value not in set(Hardware):
        raise ConfigurationError.of("hardware", value, f"must be one of {', '.join(Hardware)}")
    return str(value)


def check_timeouts(idle_timeout_seconds: object, pending_timeout_seconds: object) -> None:
    """Refuse times that the service does not take; None leaves one to its default."""
    _check_timeout("idle_timeout_seconds", idle_timeout_seconds, zero_allowed=True)
    _check_timeout("pending_timeout_seconds", pending_timeout_seconds, zero_allowed=False)


def _check_timeout(name: str, value: object, *, zero_allowed: bool) -> None:
    if value is None or (zero_allowed and value == 0 and type(value) is int):
        return
    if type(value) is not int or not _SHORTEST_TIMEOUT_S <= value <= _LONGEST_TIMEOUT_S:
        zero = "0 (never), or " if zero_allowed else ""
        allowed = f"{zero}{_SHORTEST_TIMEOUT_S} to {_LONGEST_TIMEOUT_S}"
        raise ConfigurationError.of(name, value, f"must be a whole number of seconds: {allowed}")


def _create(context: Context, body: Mapping[str, Any]) -> Flow[dict[str, Any]]:
    """POST the job; the id in the reply wins over the one that was asked for.

    With an id of ours the call can be repeated: a duplicate is refused with 409, and is adopted when it is the job we
    describe. A service that was seen to choose its own ids gives no such protection.
    """
    asked = body.get("job_id")
    repeatable = asked is not None and context.job_ids_honoured is not False
    kind = Kind.IDEMPOTENT if repeatable else Kind.AT_MOST_ONCE
    request = calls.post_json(context, "", "create", body, kind)
    try:
        reply = yield from exchange_json(context, request)
    except ConflictError as conflict:
        if asked is None:
            raise
        reply = yield from _adopt(context, asked, body, conflict)
    created = required_text(request, reply, "job_id")
    if asked is not None:
        context.job_ids_honoured = created == asked
        if created != asked:
            _log.warning("the service created job %s although %s was asked for; record the id it gave", created, asked)
    context.remember_id(created)
    return reply


def _adopt(context: Context, job_id: str, body: Mapping[str, Any], conflict: ConflictError) -> Flow[dict[str, Any]]:
    """The existing job under our id, if it is the one we describe and can still be used; else raises the conflict."""
    try:
        job = yield from get_job(context, job_id)
    except ApiError:
        raise conflict from None
    if is_terminal_job(job.get("status")):
        raise conflict
    difference = difference_from(body["sub_job_configs"], job.get("sub_jobs"))
    if difference:
        raise ConfigurationError(
            f"job_id = {job_id!r}: a job with this id exists and is another one ({difference}). Use a new random UUID.",
            field="job_id",
        ) from conflict
    return {**job, "job_id": job_id}


def difference_from(described: object, existing: object) -> str:
    """How the sub-jobs of a job differ from those of a create request, "" if they are the same configuration.

    The service adds fields of its own and returns numbers as floats, so every field we sent must be there with an
    equal value, and what we did not send does not count.
    """
    if not isinstance(described, list) or not isinstance(existing, list) or len(described) != len(existing):
        return "another number of sub-jobs"
    for index, (ours, theirs) in enumerate(zip(described, existing, strict=True)):
        if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
            return f"sub_jobs[{index}] is not an object"
        ours, theirs = dict(ours), dict(theirs)
        ours["job_type"] = canonical_job_type(ours.get("job_type"))
        theirs["job_type"] = canonical_job_type(theirs.get("job_type"))
        path = _first_difference(ours, theirs, f"sub_jobs[{index}]")
        if path:
            return f"{path} differs"
    return ""


def _first_difference(ours: object, theirs: object, path: str) -> str:
    if isinstance(ours, Mapping):
        if not isinstance(theirs, Mapping):
            return path
        parts: Iterable[tuple[object, object, str]] = ((ours[k], theirs.get(k), f"{path}.{k}") for k in ours)
    elif isinstance(ours, list | tuple):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            return path
        parts = ((a, b, f"{path}[{index}]") for index, (a, b) in enumerate(zip(ours, theirs, strict=True)))
    else:
        # `True == 1` must not pass for equal.
        same = ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)
        return "" if same else path
    return next(filter(None, (_first_difference(a, b, where) for a, b, where in parts)), "")


def get_job(context: Context, job_id: str, *, deadline: float | None = None) -> Flow[Job]:
    request = calls.get(context, calls.job_path(job_id), "get-job", job_id=job_id)
    return cast(Job, (yield from exchange_json(context, request, deadline=deadline)))


def list_jobs(context: Context, status: str | None = None) -> Flow[list[Job]]:
    reply = yield from exchange_json(context, calls.get(context, "", "list-jobs", query={"status": status}))
    jobs = reply.get("jobs")
    return [cast(Job, job) for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []


def cancel_job(context: Context, job_id: str) -> Flow[None]:
    path = f"{calls.job_path(job_id)}:cancel"
    request = calls.without_body(context, "POST", path, "cancel", Kind.IDEMPOTENT, job_id=job_id)
    try:
        yield from exchange(context, request)
    except ConflictError as conflict:
        # An ended job refuses a cancel. When our own first cancel ended it and its reply was lost, that is success.
        if not conflict.after_lost_reply:
            raise
        job = yield from get_job(context, job_id)
        if not is_terminal_job(job.get("status")):
            raise


def get_experiment_run(context: Context, job_id: str) -> Flow[ExperimentRun]:
    request = calls.get(context, f"{calls.job_path(job_id)}/experiment-run", "get-experiment-run", job_id=job_id)
    return cast(ExperimentRun, (yield from exchange_json(context, request)))


def get_capacity(context: Context, hardware: Hardware | str | None = None) -> Flow[Capacity]:
    """All six fields; the service omits those that are zero or false, and ``{}`` means that nothing is known."""
    query = {"hardware": None if hardware is None else checked_hardware(hardware)}
    request = calls.get(context, "/capacity", "get-capacity", query=query)
    request = replace(request, timeouts=request.timeouts.capped(_CAPACITY_TIMEOUTS))
    budget_s = min(_CAPACITY_BUDGET_S, context.policy.retry_budget_s)
    reply = yield from exchange_json(context, request, budget_s=budget_s)
    capacity: dict[str, Any] = {"has_reservation": reply.get("has_reservation") is True}
    for name in ("max_total_gpus", "reserved_gpus", "in_use_gpus", "pending_gpus", "available_gpus"):
        capacity[name] = _whole(reply.get(name))
    return cast(Capacity, {**reply, **capacity})


def _whole(value: object) -> int:
    # Counters are 64-bit on the wire, which JSON gateways write as text or as floats.
    try:
        return int(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return 0


def wait_for_job(
    context: Context, job_id: str, *, timeout_s: float | None = None, progress: Progress = None
) -> Flow[Job]:
    """The job once it runs. Raises `JobFailed` on every terminal state, `DeadlineExceeded` after `timeout_s`."""
    limit_s = checked_timeout(context, timeout_s)
    started = context.clock()
    deadline = started + limit_s
    pace = context.pace()
    state = "not seen"
    while True:
        try:
            job = yield from get_job(context, job_id, deadline=deadline)
        except DeadlineExceeded as error:
            raise _not_running(job_id, limit_s, state) from error
        if progress is not None:
            progress(job)
        state = job_state(job.get("status"))
        if state == JobState.RUNNING:
            return job
        if is_terminal_job(state):
            raise job_failed(job_id, job)
        now = context.clock()
        if now >= deadline:
            raise _not_running(job_id, limit_s, state)
        yield Sleep(pace.delay_within_s(now - started, deadline - now))


def job_failed(job_id: str, job: Mapping[str, Any]) -> JobFailed:
    return JobFailed(job_id=job_id, state=job_state(job.get("status")), reason=str(job.get("reason") or ""))


def _not_running(job_id: str, limit_s: float, state: str) -> CortexTrainingError:
    return DeadlineExceeded(
        f"job {job_id} was not running within {limit_s:g} s (last state: {state}). It goes on and keeps its place in "
        "the queue: wait again, or cancel it.",
        timeout_s=limit_s,
    )


def checked_timeout(context: Context, timeout_s: float | None) -> float:
    """Seconds of a wait: `timeout_s`, or the client's poll timeout."""
    if timeout_s is None:
        return context.policy.poll_timeout
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigurationError.of("timeout_s", timeout_s, "must be a number of seconds greater than 0")
    return float(timeout_s)
