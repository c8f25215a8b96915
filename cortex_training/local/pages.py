"""What a person opens in a browser: the status page with the JSON behind it, and the OpenAPI document."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.metadata import version
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from cortex_training.local.openapi import document
from cortex_training.local.service import Service
from cortex_training.local.status import Status

PUBLIC_PATHS = ("/",)
"""Answered without a token: the page holds no facts, and asks for a token itself before it fetches any."""


def page_routes(service: Service, status: Status) -> list[Route]:
    html = files("cortex_training.local").joinpath("status.html").read_text(encoding="utf-8")
    headers = {"content-security-policy": _policy(html), "cache-control": "no-store", "referrer-policy": "no-referrer"}
    described = document(service.settings.endpoint, version("cortex-training-client"))

    async def page(_: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def facts(request: Request) -> Response:
        overview = status.overview(request.query_params.get("job"))
        return JSONResponse(overview, headers={"cache-control": "no-store"})

    async def openapi(_: Request) -> Response:
        return JSONResponse(described)

    return [Route("/", page), Route("/status.json", facts), Route("/openapi.json", openapi)]


def _policy(html: str) -> str:
    """Only the page's own script and style run, and it talks to nobody but this service."""
    sources = {kind: _hash(html, kind) for kind in ("script", "style")}
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: str, kind: str) -> str:
    found = re.search(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
    if found is None:
        raise ValueError(f"status.html holds no <{kind}>")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
