"""The control port: what tests and benchmarks ask of the service that no caller of the API may.

It exists only with `--faults`, listens on loopback whatever the service itself listens on, and lets nobody in without
the token that was printed at the start.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cortex_training.local.bodies import read_body
from cortex_training.local.jobs import Job
from cortex_training.local.refusals import Refusal, not_found
from cortex_training.local.service import Service
from cortex_training.local.weather import Active
from cortex_training.local.weather_rules import RuleError, read_act

_BODY_BYTES = 1024 * 1024
_MOST_WAIT_S = 300.0
_HOSTS = frozenset({"localhost", "127.0.0.1"})


class ControlServer(uvicorn.Server):
    """Serves the control port in the event loop of the service, which alone listens to signals."""

    def __init__(self, service: Service, port: int) -> None:
        """Raises OSError when the port is taken."""
        self.token = secrets.token_urlsafe(24)
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(("127.0.0.1", port))
            self._listening.listen(128)
        except OSError as error:
            self._listening.close()
            raise OSError(f"cannot listen on 127.0.0.1:{port}: {error}; choose another --control-port") from None
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        app = build_control_app(service, self.token)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_beside(self) -> None:
        await self.serve(sockets=[self._listening])


def build_control_app(service: Service, token: str) -> ASGIApp:
    """The ASGI application of the control port."""
    calls = ControlCalls(service)

    def route(path: str, method: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, handler, methods=[method])

    app = Starlette(
        routes=[
            route("/rules", "GET", calls.list_rules),
            route("/rules", "POST", calls.add_rules),
            route("/rules", "DELETE", calls.remove_rules),
            route("/rules/{name}", "GET", calls.get_rule),
            route("/rules/{name}", "DELETE", calls.remove_rule),
            route("/rules/{name}:release", "POST", calls.release),
            route("/actions", "POST", calls.act),
            route("/executions", "GET", calls.executions),
            route("/jobs", "GET", calls.jobs),
            route("/jobs/{job_id}", "GET", calls.job),
        ],
        exception_handlers={Refusal: _refused, RuleError: _rule_refused},
    )
    app.router.redirect_slashes = False
    return _ControlDoor(app, token)


class ControlCalls:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._weather = service.weather

    async def list_rules(self, _: Request) -> Response:
        return JSONResponse({"rules": [active.describe() for active in self._weather.rules]})

    async def add_rules(self, request: Request) -> Response:
        """One rule, or ``{"rules": [...]}``: all or none."""
        document = await _json_object(request)
        added = self._weather.add(document["rules"] if set(document) == {"rules"} else [document])
        return JSONResponse({"rules": [active.describe() for active in added]}, 201)

    async def remove_rules(self, _: Request) -> Response:
        self._weather.clear()
        return Response(status_code=204)

    async def get_rule(self, request: Request) -> Response:
        """With `fired` or `holding`, answers when the rule has fired or holds that often, or when time is over."""
        fired, holding = _count(request, "fired"), _count(request, "holding")
        timeout_s = min(_count(request, "timeout_s"), _MOST_WAIT_S)

        def enough(active: Active) -> bool:
            return active.fired >= fired and len(active.holding) >= holding

        active = await self._weather.wait(self._name(request), enough, timeout_s)
        return JSONResponse(active.describe())

    async def remove_rule(self, request: Request) -> Response:
        self._weather.remove(self._name(request))
        return Response(status_code=204)

    async def release(self, request: Request) -> Response:
        return JSONResponse({"released": self._weather.release(self._name(request))})

    async def act(self, request: Request) -> Response:
        """Let something happen to a job, or to the service, at once."""
        act, job_id = read_act(await _json_object(request))
        self._service.job_weather.apply(act, self._find(job_id) if job_id is not None else None)
        return Response(status_code=204)

    async def executions(self, request: Request) -> Response:
        entries, offset = self._service.execution_log.read(int(_count(request, "offset")))
        return JSONResponse({"entries": entries, "next_offset": offset})

    async def jobs(self, _: Request) -> Response:
        return JSONResponse({"jobs": [_busy(job) for job in self._service.jobs.values()]})

    async def job(self, request: Request) -> Response:
        return JSONResponse(_busy(self._find(request.path_params["job_id"])))

    def _find(self, job_id: str) -> Job:
        job = self._service.jobs.get(job_id)
        if job is None:
            raise not_found("job", job_id)
        return job

    def _name(self, request: Request) -> str:
        name = str(request.path_params["name"])
        if name not in {active.rule.name for active in self._weather.rules}:
            raise not_found("rule", name)
        return name


class _ControlDoor:
    """Host and token are checked before anything else."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        if refusal is not None:
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Refusal | None:
        host = request.headers.get("host", "").partition(":")[0].lower()
        if host not in _HOSTS:
            # A page of another site whose name was made to point here would arrive with its own name.
            return Refusal(421, f"the control port does not answer for the host {host!r:.100}")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            return Refusal(401, "the control token is missing or wrong; the ready line names it as control_token")
        return None


def _busy(job: Job) -> dict[str, Any]:
    """How long the job's sub-jobs have worked, in seconds, by operation."""
    operations = {name: {"count": count, "busy_s": seconds} for name, (count, seconds) in sorted(job.busy.items())}
    return {
        "job_id": job.job_id,
        "status": str(job.state),
        "in_flight": job.in_flight,
        "busy_s": sum(seconds for _, seconds in job.busy.values()),
        "operations": operations,
    }


def _count(request: Request, name: str) -> float:
    text = request.query_params.get(name, "0")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e15:
        raise Refusal(400, f"{name}: must be a number of at least 0, got {text!r:.100}")
    return number


async def _json_object(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "the body must be application/json")
    raw = await read_body(request, _BODY_BYTES)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Refusal(400, f"the body must be an object, got {type(document).__name__}")
    return document


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, Refusal):
        raise error
    return JSONResponse(error.body(), error.status)


async def _rule_refused(_: Request, error: Exception) -> Response:
    return JSONResponse({"code": 400, "message": str(error)}, 400)
