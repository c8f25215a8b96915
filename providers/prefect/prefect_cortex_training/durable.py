"""What makes a task safe to run again: a key that survives deployments, a stored result, and retries of what is worth
retrying.

Prefect's default key holds the task's source code: a deployment between a crash and its retry would repeat every
remote effect. The key here holds the flow run, the verb and the arguments that say what to do, and nothing else.
Arguments are therefore plain data: ids, numbers, names of blocks. A client or a block among them would make the key
depend on a token.

Stored results may be lost, with a container's disk. What was asked of a job is therefore noted a second time in the
flow run's labels: the job may have ended since, its work done, and a service that restarted may have forgotten which
micro-batches it has seen. So is the model that a person was asked about.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import CachePolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.runtime import flow_run

from cortex_training.errors import (
    ConfigurationError,
    ConflictError,
    JobFailed,
    RateLimitedError,
    ServiceError,
    TransportError,
)
from cortex_training.publication.errors import DownloadError
from cortex_training.states import JobState
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.labels import RunLabels, is_finished

P = ParamSpec("P")
R = TypeVar("R")

KEY_VERSION = 1
"""Rises when the meaning of a stored result changes, so that a new release does not read an old result as its own."""

RETRY_DELAYS_S = [1.0, 5.0, 20.0]


PATIENCE = frozenset({"timeout_s"})
"""Arguments that say how long to wait, not what to do: changing one must not repeat what was done."""


def durable_key(run_id: str, verb: str, arguments: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The name of a result: 64 hex digits that are the same in every process, release and deployment.

    Arguments left at their defaults don't count, so that a release with one more option finds the results of the one
    before.
    """
    told = {
        name: value
        for name, value in arguments.items()
        if name not in PATIENCE and not (name in defaults and value == defaults[name])
    }
    text = json.dumps([KEY_VERSION, run_id, verb, told], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def always(result: Any) -> bool:
    """Whether a noted result still holds, for results that are ids and numbers and nothing else."""
    return True


def is_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a task's failure may go away by itself. An outcome that is unknown never does: it would be repeated."""
    return isinstance(state.data, TransportError | RateLimitedError | ServiceError | DownloadError)


def task_pair(
    verb: str, *, retries: int, cached: bool = True, noted: Callable[[Any], bool] | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], tuple[Task[P, R], Task[P, Coroutine[Any, Any, R]]]]:
    """Make a coroutine function into two durable tasks: one for flows that block, one for flows that await.

    `verb` is the task's name and part of its key. `retries` counts further attempts after a failure that may go away
    by itself. With ``cached=False`` nothing is skipped on a rerun: for verbs whose truth is elsewhere and may have
    changed. With `noted` the result is also written into the flow run's labels, and is found there when the stored one
    is lost: for verbs that work on a job, and for answers that have to stay. `noted` says of such a result whether it
    still holds.
    """

    def decorate(
        function: Callable[P, Coroutine[Any, Any, R]],
    ) -> tuple[Task[P, R], Task[P, Coroutine[Any, Any, R]]]:
        signature = inspect.signature(function)
        defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}

        def checked(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
            arguments = signature.bind(*args, **kwargs).arguments
            require_plain(verb, arguments)
            if noted is None:
                return function(*args, **kwargs)
            return _noted(verb, arguments, defaults, noted, lambda: function(*args, **kwargs))

        @wraps(function)
        def blocking(*args: P.args, **kwargs: P.kwargs) -> R:
            return run_to_end(checked(*args, **kwargs))

        @wraps(function)
        async def awaiting(*args: P.args, **kwargs: P.kwargs) -> R:
            return await checked(*args, **kwargs)

        def key(context: TaskRunContext, arguments: dict[str, Any]) -> str | None:
            run_id = context.task_run.flow_run_id or context.task_run.id
            return durable_key(str(run_id), verb, arguments, defaults) if cached and _is_plain(arguments) else None

        options: dict[str, Any] = {
            "name": verb,
            "cache_policy": CachePolicy.from_cache_key_fn(key),
            "persist_result": True,
            # JSON, because stored results outlive the process that wrote them and a pickle would run what it says.
            "result_serializer": "json",
            "retries": retries,
            "retry_delay_seconds": RETRY_DELAYS_S[:retries] or None,
            "retry_jitter_factor": 0.5 if retries else None,
            "retry_condition_fn": is_transient if retries else None,
        }
        return Task(fn=blocking, **options), Task(fn=awaiting, **options)

    return decorate


async def _noted(
    verb: str,
    arguments: dict[str, Any],
    defaults: dict[str, Any],
    holds: Callable[[Any], bool],
    call: Callable[[], Coroutine[Any, Any, R]],
) -> R:
    """The result that is noted in the flow run's labels, or that of `call`, which is noted then.

    Raises JobFailed when there is none and the work on the job was finished: nothing can be asked of it any more.
    """
    if not flow_run.id:
        return await call()
    labels = RunLabels(flow_run.id)
    key = f"result.{verb}.{durable_key(str(labels.flow_run_id), verb, arguments, defaults)[:16]}"
    written = await labels.read()
    if key in written:
        found: R = json.loads(str(written[key]))
        if holds(found):
            return found
    try:
        result = await call()
    except (ConflictError, JobFailed) as error:
        job_id = str(arguments.get("job_id"))
        if not is_finished(written, job_id):
            raise
        raise JobFailed(
            job_id=job_id,
            state=JobState.CANCELLED,
            reason=f"the work on it was finished by this flow run, whose labels hold no result of this {verb}; start "
            "another flow run, which makes a job of its own",
        ) from error
    await labels.write({key: json.dumps(result, sort_keys=True)})
    return result


def require_plain(verb: str, arguments: dict[str, Any]) -> None:
    """Raise ConfigurationError naming the first argument that is not plain JSON."""
    for name, value in arguments.items():
        if not _is_plain(value):
            raise ConfigurationError(
                f"{verb}: argument {name} holds something that is not plain data ({type(value).__name__}); pass ids, "
                "numbers, names of blocks, paths as text and sub-jobs as .to_wire(), because the arguments name the "
                "stored result that a rerun looks for",
                field=name,
            )


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
