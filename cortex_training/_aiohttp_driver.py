"""Carries out flows with aiohttp on the running event loop."""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
from aiohttp import payload
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from yarl import URL

from cortex_training._network import ca_file, proxy_for
from cortex_training._sending import SendGuard, request_headers
from cortex_training.errors import ConfigurationError
from cortex_training.protocol.messages import Compute, Event, Flow, Request, Response, Sleep, TransportFault
from cortex_training.settings import ClientSettings

T = TypeVar("T")

KEEP_ALIVE_S = 15.0
"""As in the blocking driver: an older idle connection may be closing, and a step written into it is an open question.
"""
_INLINE_COMPUTE_BYTES = 128 * 1024
"""Work on less than this takes well under a millisecond, which is less than handing it to a thread."""


class AiohttpDriver:
    """One session and one TLS context; the session is made inside the loop that first uses it."""

    def __init__(self, settings: ClientSettings, shared: aiohttp.ClientSession | None) -> None:
        if shared is not None and shared.trust_env:
            raise ConfigurationError(
                "session: make it with trust_env=False. A netrc entry would replace the credential; proxies from the "
                "environment are found by the client itself.",
                field="session",
            )
        self._settings = settings
        self._shared = shared
        self._own: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, flow: Flow[T]) -> T:
        """The result of `flow`; raises what it raises."""
        try:
            event = next(flow)
            while True:
                try:
                    answer = await self._perform(event)
                except BaseException as error:
                    event = flow.throw(error)
                else:
                    event = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def aclose(self) -> None:
        own, self._own = self._own, None
        if own is not None and self._loop is asyncio.get_running_loop():
            await own.close()

    async def _perform(self, event: Event) -> Any:
        if isinstance(event, Sleep):
            return await asyncio.sleep(event.seconds)
        if isinstance(event, Compute):
            if event.size < _INLINE_COMPUTE_BYTES:
                return event.function()
            return await asyncio.to_thread(event.function)
        return await self._send(event)

    async def _send(self, request: Request) -> Response | TransportFault:
        auth = self._settings.auth
        if request.rejected is not None:
            await asyncio.to_thread(auth.refresh, request.rejected)
        credential = dict(auth.headers())
        url = self._settings.base_url + request.path
        guard = SendGuard(request)
        try:
            async with self._session().request(
                request.method,
                URL(f"{url}?{urlencode(request.query)}" if request.query else url, encoded=True),
                data=_GuardedBody(guard) if request.body is not None else None,
                headers=request_headers(request, credential),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=request.timeouts.total_s,
                    sock_connect=request.timeouts.connect_s,
                    sock_read=request.timeouts.read_s,
                ),
                ssl=_tls_context(self._settings.verify_ssl, ca_file(self._settings))
                if url.startswith("https")
                else True,
                proxy=proxy_for(self._settings, url),
                middlewares=(_send_once,),
            ) as answer:
                body = await answer.read()
        except aiohttp.InvalidURL as error:
            # Not the library's own words: they hold the proxy's URL, with its password, or the header with the token.
            raise ConfigurationError(
                f"base_url, proxy or HTTPS_PROXY, HTTP_PROXY, ALL_PROXY: aiohttp cannot use {url} with them "
                f"({type(error).__name__})"
            ) from None
        except (aiohttp.ClientError, OSError, _NoReply) as error:
            if guard.refusal is not None:
                raise guard.refusal from None
            return TransportFault(guard.sent(_connection_failed(error)), _reason(error))
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Response(answer.status, headers, body, credential, auth.can_refresh)

    def _session(self) -> aiohttp.ClientSession:
        if self._shared is not None:
            return self._shared
        loop = asyncio.get_running_loop()
        if self._own is None or self._loop is not loop:
            # Sockets belong to their loop: another loop (or a fork, which needs a new loop too) gets its own.
            self._loop = loop
            self._own = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._settings.pool_maxsize, keepalive_timeout=KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._own


@functools.lru_cache(maxsize=16)
def _tls_context(verify: bool, bundle: str | None) -> ssl.SSLContext:
    if bundle is None:
        context = ssl.create_default_context(cafile=DEFAULT_CA_BUNDLE_PATH)
    elif os.path.isdir(bundle):
        context = ssl.create_default_context(capath=bundle)
    else:
        context = ssl.create_default_context(cafile=bundle)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _GuardedBody(payload.Payload):
    """A body whose first byte asks the guard. aiohttp writes the headers together with it, so nothing goes out
    before.
    """

    def __init__(self, guard: SendGuard) -> None:
        super().__init__(guard)
        self._guard = guard
        self._size = len(guard)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a request body is binary")

    async def write(self, writer: Any) -> None:
        if writer.transport is None or writer.transport.is_closing():
            # Known before anything is written, so this attempt provably did nothing and a new connection may try.
            raise aiohttp.ClientConnectionResetError("the kept connection was closed by the other end")
        for piece in self._guard:
            await writer.write(piece)

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        await self.write(writer)


class _NoReply(Exception):
    """The connection ended without an answer."""


async def _send_once(
    request: aiohttp.ClientRequest, handler: Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]
) -> aiohttp.ClientResponse:
    """Keep aiohttp from sending GET and DELETE again behind our back: a delete repeated unseen answers 404."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _NoReply(f"{type(error).__name__}: {error}") from error


def _connection_failed(error: Exception) -> bool:
    """True when no connection came to be: refused, no such host, TLS, proxy, or too slow to connect."""
    return isinstance(
        error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.ClientHttpProxyError
    )


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        # Its own text holds the proxy's URL, with the password.
        return f"the proxy answered {error.status} {error.message}"[:400]
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{error.host}:{error.port}: {error.os_error}"[:400]
    return str(error) if isinstance(error, _NoReply) else f"{type(error).__name__}: {error}"[:400]
