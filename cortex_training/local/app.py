"""The HTTP surface: routes, bodies, headers. What a call means is decided behind it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortex_training.local.bodies import read_body
from cortex_training.local.jobs import Job
from cortex_training.local.pages import PUBLIC_PATHS, page_routes
from cortex_training.local.refusals import Refusal
from cortex_training.local.service import Service
from cortex_training.local.status import Status
from cortex_training.local.weather_http import WeatherDoor

_log = logging.getLogger("cortex_training.local")
_JSON_BODY_BYTES = 8 * 1024 * 1024
_OPERATION_BODY_BYTES = 82 * 1024 * 1024
"""The operation `forward` carries a frame of up to 60 MiB in base64."""
_SMALL_JSON_BYTES = 256 * 1024
"""Up to this size JSON is read in the event loop; more would keep it from everyone else."""
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    calls, status = Calls(service), Status(service)
    prefix = f"/api/v2/databases/{{database}}/schemas/{{schema}}/{service.settings.endpoint}"
    job = prefix + "/{job_id}"

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, handler, methods=[method])

    routes = [
        # First, because routes are tried in turn, and most calls are polls.
        route(job + "/requests/{request_id}", "GET", calls.poll),
        route(prefix, "POST", calls.create_job),
        route(prefix + "/", "POST", calls.create_job),
        route(prefix, "GET", calls.list_jobs),
        route(prefix + "/", "GET", calls.list_jobs),
        route(prefix + "/capacity", "GET", calls.capacity),
        route(prefix + "/{job_id}:cancel", "POST", calls.cancel_job),
        route(job, "GET", calls.get_job),
        route(job + "/experiment-run", "GET", calls.experiment_run),
        route(job + "/checkpoints", "GET", calls.list_checkpoints),
        route(job + "/checkpoints/{checkpoint_id}:export", "POST", calls.export_checkpoint),
        route(job + "/checkpoints/{checkpoint_id}", "DELETE", calls.delete_checkpoint),
        route(job + "/forward-backward", "POST", calls.forward_backward),
        route(job + "/forward", "POST", calls.forward),
        route(job + "/generate", "POST", calls.generate),
        route(job + "/generate-stream", "POST", calls.generate_stream),
        route(job + "/step", "POST", calls.step),
        route(job + "/save", "POST", calls.save),
        route(job + "/load", "POST", calls.load),
        route(job + "/operation", "POST", calls.operation),
        route("/exports/{token}/{name:path}", "GET", calls.exported_file),
        *service.snowflake_routes,
        *page_routes(service, status),
    ]

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        service.start()
        watching = asyncio.create_task(status.watch())
        try:
            yield
        finally:
            watching.cancel()
            service.stop()

    app = Starlette(
        routes=routes,
        lifespan=running,
        exception_handlers={Refusal: _refused, HTTPException: _http_exception, Exception: _unexpected},
    )
    # A redirect would turn a client's POST into a GET.
    app.router.redirect_slashes = False
    if service.settings.faults is None:
        return _FrontDoor(app, service)
    longest = max(service.settings.max_body_bytes, _OPERATION_BODY_BYTES)
    return _FrontDoor(WeatherDoor(app, routes, service.job_weather, longest), service)


class _Json(JSONResponse):
    """JSON in ASCII: a text that a caller sent may hold what UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return _ENCODER.encode(content).encode()


class Calls:
    """One method a route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create_job(self, request: Request) -> Response:
        body = await self._json_body(request)
        return _Json(self._service.create_job(*_scope_of(request), body))

    async def list_jobs(self, request: Request) -> Response:
        return _Json(self._service.list_jobs(*_scope_of(request), request.query_params.get("status")))

    async def get_job(self, request: Request) -> Response:
        return _Json(self._service.describe(self._job(request)))

    async def cancel_job(self, request: Request) -> Response:
        return _Json(self._service.cancel_job(self._job(request)))

    async def capacity(self, request: Request) -> Response:
        return _Json(self._service.capacity(request.query_params.get("hardware")))

    async def experiment_run(self, request: Request) -> Response:
        return _Json(self._service.experiment_run(self._job(request)))

    async def list_checkpoints(self, request: Request) -> Response:
        saved = self._service.checkpoints.of_job(self._job(request).job_id)
        return _Json({"checkpoints": [checkpoint.summary() for checkpoint in saved]})

    async def export_checkpoint(self, request: Request) -> Response:
        job_id, checkpoint_id = self._job(request).job_id, request.path_params["checkpoint_id"]
        checkpoint = self._service.checkpoints.find(job_id, checkpoint_id)
        base_url = f"{request.url.scheme}://{request.url.netloc}"
        return _Json(self._service.export_links.create(checkpoint, base_url))

    async def delete_checkpoint(self, request: Request) -> Response:
        await self._service.delete_checkpoint(self._job(request).job_id, request.path_params["checkpoint_id"])
        return Response(status_code=204)

    async def forward_backward(self, request: Request) -> Response:
        job = self._job(request)
        return _Json(await self._service.data_plane.forward_backward(job, await self._frame_body(request)))

    async def generate(self, request: Request) -> Response:
        job = self._job(request)
        return _Json(await self._service.generation.generate(job, await self._frame_body(request)))

    async def generate_stream(self, request: Request) -> Response:
        job = self._job(request)
        return _Json(await self._service.generation.generate_stream(job, await self._frame_body(request)))

    async def forward(self, request: Request) -> Response:
        job = self._job(request)
        return _Json(await self._service.data_plane.forward(job, None, await self._frame_body(request)))

    async def step(self, request: Request) -> Response:
        job = self._job(request)
        return _Json(self._service.data_plane.step(job, await self._json_object(request)))

    async def save(self, request: Request) -> Response:
        job = self._job(request)
        return _Json(self._service.data_plane.save(job, await self._json_object(request)))

    async def load(self, request: Request) -> Response:
        job = self._job(request)
        return _Json(self._service.data_plane.load(job, await self._json_object(request)))

    async def operation(self, request: Request) -> Response:
        job = self._job(request)
        body = await self._json_object(request, _OPERATION_BODY_BYTES)
        return _Json(await self._service.generic_operation.run(job, body))

    async def poll(self, request: Request) -> Response:
        cursor, max_events = request.query_params.get("cursor"), request.query_params.get("max_events")
        return _Json(self._service.poll(self._job(request), request.path_params["request_id"], cursor, max_events))

    async def exported_file(self, request: Request) -> Response:
        """Asks for no credentials: the link is the credential."""
        path = self._service.export_links.open(request.path_params["token"], request.path_params["name"])
        return FileResponse(path, media_type="application/octet-stream")

    def _job(self, request: Request) -> Job:
        return self._service.job(*_scope_of(request), request.path_params["job_id"])

    async def _json_object(self, request: Request, limit: int = _JSON_BODY_BYTES) -> dict[str, Any]:
        body = await self._json_body(request, limit)
        if not isinstance(body, dict):
            raise Refusal(400, f"the body must be a JSON object, got {type(body).__name__}")
        return body

    async def _json_body(self, request: Request, limit: int = _JSON_BODY_BYTES) -> Any:
        raw = await read_body(request, limit)
        if not raw:
            return {}
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A web page can make a browser send anything but this type to another site unasked.
            raise Refusal(415, "the body must be application/json")
        try:
            if len(raw) > _SMALL_JSON_BYTES:
                return await asyncio.to_thread(_parse, raw)
            return _parse(raw)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {error}") from None

    async def _frame_body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("application/octet-stream", "application/json"):
            raise Refusal(415, f"the body must be application/octet-stream, got {kind!r:.100}")
        raw = await read_body(request, self._service.settings.max_body_bytes)
        if not raw:
            raise Refusal(400, "the body is empty; a DSSST1 frame was expected")
        return raw


class _FrontDoor:
    """Before and after every call: the request id header, the Host check, the credentials."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._credentials = service.credentials
        own = service.settings.host
        # Told to listen beyond this machine, it cannot know the names it is reached by.
        self._hosts = _LOOPBACK if own in _LOOPBACK else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-snowflake-request-id", str(uuid.uuid4()).encode())]
            await send(message)

        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await _json_of(refusal)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _refusal(self, request: Request) -> Refusal | None:
        host = request.headers.get("host", "")
        name = (
            host[: host.rindex("]") + 1].strip("[]") if host.startswith("[") and "]" in host else host.partition(":")[0]
        )
        if self._hosts is not None and name.lower() not in self._hosts:
            # A page of another site whose name was made to point here would arrive with its own name.
            return Refusal(421, f"this service does not answer for the host {name!r:.100}")
        # The path that is routed. That of `request.url` is parsed out of a text which begins with the caller's Host.
        path = request.scope["path"]
        if path in PUBLIC_PATHS:
            return None
        return self._credentials.refusal(path, request.headers.get("authorization", ""))


def _scope_of(request: Request) -> tuple[str, str]:
    return request.path_params["database"], request.path_params["schema"]


def _parse(raw: bytes) -> Any:
    return json.loads(raw, parse_constant=_no_constant, parse_float=_finite_number)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_of(refusal: Refusal) -> _Json:
    headers = {"connection": "close"} if refusal.status == 413 else None
    return _Json(refusal.body(), refusal.status, headers=headers)


def _finite_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large a number")
    return number


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, Refusal):
        raise error
    return _json_of(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _Json({"code": error.status_code, "message": message}, error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _Json({"code": 500, "message": f"the service failed: {type(error).__name__}: {error}"}, 500)
