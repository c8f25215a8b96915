"""Events about failed operations, for the account's own telemetry. Best effort: never delays a call, never fails one.

An event is put into a bounded queue by the caller's thread and sent by a daemon thread, which asks the account for its
collector first. Whatever goes wrong on the way is dropped together with the event.

CORTEX_TRAINING_DISABLE_TELEMETRY=1 switches it off, CORTEX_TRAINING_ENABLE_SUCCESS_TELEMETRY=1 adds the calls that went
well. Only clients of a Snowflake account have it: those made by `from_pat` and `from_connection_name`.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import logging
import math
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

import cortex_training
from cortex_training._network import ca_file, proxy_for
from cortex_training.auth import PatAuth
from cortex_training.errors import ApiError
from cortex_training.protocol import tally
from cortex_training.settings import ClientSettings

T = TypeVar("T")

_log = logging.getLogger("cortex_training")

DISABLE_ENV = "CORTEX_TRAINING_DISABLE_TELEMETRY"
SUCCESS_ENV = "CORTEX_TRAINING_ENABLE_SUCCESS_TELEMETRY"

OPERATIONS = frozenset(
    {
        *("create_job", "create_job_from_body", "wait_for_job", "get_job", "list_jobs", "cancel_job", "get_capacity"),
        *("get_experiment_run", "forward_backward", "forward", "generate", "generate_stream", "step", "save", "load"),
        *("list_checkpoints", "export_checkpoint", "delete_checkpoint", "fetch_execution_logs", "weight_sync"),
        *("bootstrap_router_replay", "router_replay_discard", "reset_prefix_cache"),
        *("poll_request", "get_request_status", "cancel_request"),
    }
)
_NAMED = (
    *("job_id", "sub_job_id", "sub_job_type", "source_job_id", "source_sub_job_id", "target_sub_job_id"),
    *("target_sub_job_ids", "request_id", "checkpoint_id"),
)
"""Arguments that say what an operation was about. Nothing else of a call is reported."""

_DOMAIN = ".snowflakecomputing.com"
"""Of accounts and their collectors. A session token goes nowhere else, whatever the discovery answers."""
_QUEUED_EVENTS = 1024
_EVENTS_AT_ONCE = 64
_IDLE_S = 30.0
_FLUSH_S = 1.0
_FAILURES_IN_A_ROW = 3
_SILENCE_S = 300.0
_LONGEST_TEXT = 512
_DEEPEST_VALUE = 6

_SECRET = re.compile(
    r"(?i)(authorization|bearer|snowflake[ _-]?token|password|secret|credential|(?<![a-z])pat|api[ _-]?key"
    r"|private[ _-]?key|(?:access|refresh|session)[ _-]?token|token)(s?[\"']?\s*[:=]\s*|\s+(?=\S{16}))"
    r"(?:(?:bearer|basic|snowflake\s+token\s*=)\s*)?(\"[^\"]*\"|'[^']*'|[^\s,;}&]+)"
)
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']+")


class Telemetry:
    """Sends the events of one client. `emit` may be called from any thread and from an event loop."""

    def __init__(self, settings: ClientSettings, timeout_s: float) -> None:
        self._settings = settings
        self._collector = _Collector(settings, timeout_s)
        self.successes = _switched_on(SUCCESS_ENV)
        self._closed = False
        self._start_over()
        _living.add(self)

    def _start_over(self) -> None:
        """Also after a fork, where the thread is missing and the lock and the queue's may be held by nobody."""
        self._lock = threading.Lock()
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(_QUEUED_EVENTS)
        self._thread: threading.Thread | None = None

    def emit(self, operation: str, value: Any = 1, attributes: Mapping[str, Any] | None = None) -> None:
        """Queue one event; drops it when the queue is full. Never raises."""
        try:
            event = _log_record(operation, value, attributes or {})
            with self._lock:
                if self._closed:
                    return
                self._queue.put_nowait(event)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="cortex-training-telemetry", daemon=True)
                    self._thread.start()
        except Exception as error:
            _log.debug("a telemetry event was dropped: %s", type(error).__name__)

    def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait until everything queued was sent or given up, at most `timeout_s` seconds."""
        waiting = self._queue
        if self._thread is not None:
            with waiting.all_tasks_done:
                waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, timeout_s)

    def close(self) -> None:
        """Flush briefly; later events are dropped."""
        with self._lock:
            self._closed = True
        self.flush()

    def _work(self) -> None:
        while True:
            try:
                events = [self._queue.get(timeout=_IDLE_S)]
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            while len(events) < _EVENTS_AT_ONCE and not self._queue.empty():
                events.append(self._queue.get_nowait())
            self._collector.deliver(events)
            for _ in events:
                self._queue.task_done()


@dataclass(frozen=True, slots=True)
class _Route:
    """Where events go and with what, until when (monotonic)."""

    url: str
    headers: Mapping[str, str]
    until: float


class _Collector:
    """The account's event collector, found when there is something to send. Used by one thread."""

    def __init__(self, settings: ClientSettings, timeout_s: float) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._route: _Route | None = None
        self._failures = 0
        self._silent_until = 0.0

    def deliver(self, events: list[dict[str, Any]]) -> None:
        if time.monotonic() < self._silent_until:
            return
        try:
            self._send(events)
            self._failures = 0
        except Exception as error:
            # Its text may hold what was sent, so only its kind is told.
            _log.debug("telemetry could not be sent: %s", type(error).__name__)
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                self._failures, self._silent_until = 0, time.monotonic() + _SILENCE_S

    def _send(self, events: list[dict[str, Any]]) -> None:
        route = self._route
        if route is None or time.monotonic() > route.until:
            route = self._route = self._discovered()
        try:
            self._ask("POST", route.url, route.headers, _export_request(self._settings, events))
        except _Refused:
            self._route = None
            raise

    def _discovered(self) -> _Route:
        base, auth, began = self._settings.base_url, self._settings.auth, time.monotonic()
        headers, valid_s = dict(auth.headers()), 60.0
        if isinstance(auth, PatAuth):
            session = self._ask("POST", f"{base}/api/v2/sessions", headers, {})
            headers = {"Authorization": f'Snowflake Token="{session["token"]}"'}
            valid_s = max(float(session.get("validityInSeconds", 3600)), 60.0)
        found = str(self._ask("GET", f"{base}/observability/system/hostname", headers)["hostname"]).strip().rstrip("/")
        if not is_snowflake(f"https://{found}"):
            raise ValueError("the collector is no host of Snowflake's")
        return _Route(f"https://{found}/v1/logs", headers, began + valid_s - min(60.0, valid_s / 10))

    def _ask(self, method: str, url: str, headers: Mapping[str, str], body: Any = None) -> dict[str, Any]:
        proxy = proxy_for(self._settings, url)
        with requests.Session() as session:
            session.trust_env = False  # a netrc entry would replace the token
            answer = session.request(
                method,
                url,
                # Without "Accept" the discovery answers 500.
                headers={**headers, "Accept": "application/json"},
                json=body,
                timeout=(self._timeout_s, self._timeout_s),
                allow_redirects=False,
                verify=ca_file(self._settings) or self._settings.verify_ssl,
                proxies={"http": proxy, "https": proxy} if proxy else {},
            )
        if answer.status_code in (401, 403):
            raise _Refused
        if not 200 <= answer.status_code < 300:
            raise ValueError(f"status {answer.status_code}")
        return dict(json.loads(answer.content or b"{}"))


class _Refused(Exception):
    """The session has ended, or may not do this."""


_living: weakref.WeakSet[Telemetry] = weakref.WeakSet()


def _flush_all() -> None:
    until = time.monotonic() + _FLUSH_S
    for telemetry in list(_living):
        telemetry.flush(max(0.0, until - time.monotonic()))


def _start_all_over() -> None:
    for telemetry in list(_living):
        telemetry._start_over()


atexit.register(_flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_all_over)


def telemetry_of(settings: ClientSettings) -> Telemetry | None:
    """The telemetry of a client, None where there is none: switched off, or not an account of Snowflake's."""
    if settings.telemetry_timeout is None or _switched_on(DISABLE_ENV) or not is_snowflake(settings.base_url):
        return None
    return Telemetry(settings, settings.telemetry_timeout)


def is_snowflake(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" and "@" not in parts.netloc and (parts.hostname or "").endswith(_DOMAIN)


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")


# Watching calls


def observed(kind: type[T]) -> type[T]:
    """Class decorator: the methods named in `OPERATIONS` report how they ended to `self._telemetry`."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and method.__name__ in OPERATIONS:
            setattr(kind, name, _observed(method))
    return kind


def _observed(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._telemetry is None:
                return await method(self, *args, **kwargs)
            with _watched(self._telemetry, method, (self, *args), kwargs) as results:
                results.append(await method(self, *args, **kwargs))
            return results[0]

        return coroutine

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._telemetry is None:
            return method(self, *args, **kwargs)
        with _watched(self._telemetry, method, (self, *args), kwargs) as results:
            results.append(method(self, *args, **kwargs))
        return results[0]

    return call


@contextmanager
def _watched(
    telemetry: Telemetry, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[list[Any]]:
    """Report one call, which puts its result into the list. Calls made by a reported call belong to it."""
    if tally.current.get() is not None:
        yield []
        return
    counted, began = tally.Tally(), time.monotonic()
    results: list[Any] = []
    token = tally.current.set(counted)
    failure: Exception | None = None
    try:
        yield results
    except Exception as error:
        failure = error
        raise
    finally:
        tally.current.reset(token)
        if failure is not None or (results and telemetry.successes):
            seconds = time.monotonic() - began
            try:
                attributes = {**_subject(method, args, kwargs, results), **_what_failed(failure)}
                telemetry.emit(method.__name__, _outcome(counted, seconds, failure), attributes)
            except Exception as error:
                _log.debug("a telemetry event was dropped: %s", type(error).__name__)


def _outcome(counted: tally.Tally, seconds: float, failure: Exception | None) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "success": failure is None,
        "duration_ms": round(seconds * 1000, 3),
        "request_count": counted.requests,
        "attempt_count": counted.attempts,
        "retry_count": max(counted.attempts - counted.requests, 0),
    }
    if failure is not None:
        outcome["error_message"] = str(failure)
    return outcome


def _subject(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]
) -> dict[str, Any]:
    """Which job, request or checkpoint a call was about, from its arguments and its result."""
    try:
        given = inspect.signature(method).bind_partial(*args, **kwargs).arguments
    except TypeError:
        given = {}
    named = {name: given[name] for name in _NAMED if given.get(name) is not None}
    for result in results:
        if isinstance(result, str):
            named["job_id" if method.__name__ == "create_job" else "request_id"] = result
        elif isinstance(result, dict):
            named |= {name: result[name] for name in ("job_id", "request_id") if isinstance(result.get(name), str)}
    return named


def _what_failed(failure: Exception | None) -> dict[str, Any]:
    if failure is None:
        return {}
    answer = failure if isinstance(failure, ApiError) else failure.__cause__
    told: dict[str, Any] = {"error.type": type(failure).__name__}
    if isinstance(answer, ApiError):
        told["error.http_status"] = answer.status
        told["snowflake.request_id"] = answer.request_id or None
        told["error.code"] = answer.code or None
    return told


# OTLP in JSON


def _log_record(operation: str, value: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "timeUnixNano": str(time.time_ns()),
        "severityText": "INFO",
        "body": _otlp_value(value, 0),
        "attributes": _otlp_pairs({**attributes, "event.name": operation}, 0),
    }


def _export_request(settings: ClientSettings, events: list[dict[str, Any]]) -> dict[str, Any]:
    resource = {
        "service.name": "cortex-training",
        "service.version": cortex_training.__version__,
        "snowflake.account_host": urlsplit(settings.base_url).hostname,
    }
    logs = [{"scope": {"name": "cortex-training"}, "logRecords": events}]
    return {"resourceLogs": [{"resource": {"attributes": _otlp_pairs(resource, 0)}, "scopeLogs": logs}]}


def _otlp_pairs(values: Mapping[str, Any], depth: int) -> list[dict[str, Any]]:
    return [{"key": str(k), "value": _otlp_value(v, depth + 1)} for k, v in values.items() if v is not None]


def _otlp_value(value: Any, depth: int) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float) and math.isfinite(value):
        return {"doubleValue": value}
    if depth < _DEEPEST_VALUE and isinstance(value, Mapping):
        return {"kvlistValue": {"values": _otlp_pairs(value, depth)}}
    if depth < _DEEPEST_VALUE and isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_otlp_value(element, depth + 1) for element in value]}}
    return {"stringValue": redacted(str(value))}


def redacted(text: str) -> str:
    """`text` on one line, without what looks like a credential or a link's signature, at most 512 characters."""
    # Cut generously before the search, so that a huge text costs nothing and a secret at the cut is still whole.
    line = " ".join(text[: 4 * _LONGEST_TEXT].split())
    line = _QUERY.sub(r"\1?<redacted>", line)
    return _SECRET.sub(r"\1\2<redacted>", line)[:_LONGEST_TEXT]
