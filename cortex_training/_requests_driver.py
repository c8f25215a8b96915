"""Carries out flows with `requests` and blocking sleeps."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, TypeVar
from urllib.parse import urlencode

import requests
from requests import exceptions as http
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError as Urllib3Error
from urllib3.exceptions import MaxRetryError, NewConnectionError

from cortex_training._network import ca_file, proxy_for
from cortex_training._sending import SendGuard, request_headers
from cortex_training.errors import ConfigurationError
from cortex_training.protocol.messages import Compute, Event, Flow, Request, Response, Sleep, TransportFault
from cortex_training.settings import ClientSettings

T = TypeVar("T")

KEEP_ALIVE_S = 15.0
"""Idle connections older than this are not used again: the other end may have closed one just now, and a step written
into a closing connection is a step whose outcome nobody knows."""
_READ_BYTES = 1024 * 1024


class RequestsDriver:
    """One session for all threads of a process; a forked process gets its own."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._session: requests.Session | None = None
        self._pid = os.getpid()

    def run(self, flow: Flow[T]) -> T:
        """The result of `flow`; raises what it raises."""
        try:
            event = next(flow)
            while True:
                try:
                    answer = self._perform(event)
                except BaseException as error:
                    event = flow.throw(error)
                else:
                    event = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _perform(self, event: Event) -> Any:
        if isinstance(event, Sleep):
            return time.sleep(event.seconds)
        if isinstance(event, Compute):
            return event.function()
        return self._send(event)

    def _send(self, request: Request) -> Response | TransportFault:
        auth = self._settings.auth
        if request.rejected is not None:
            auth.refresh(request.rejected)
        credential = dict(auth.headers())
        url = self._settings.base_url + request.path
        guard = SendGuard(request)
        try:
            with self._opened_session().send(
                _prepared(request, url, credential, guard),
                stream=True,
                allow_redirects=False,
                timeout=(request.timeouts.connect_s, request.timeouts.read_s),
                verify=ca_file(self._settings) or self._settings.verify_ssl,
                proxies=_proxies(proxy_for(self._settings, url)),
            ) as answer:
                body = _read(answer, time.monotonic() + request.timeouts.total_s)
        except (http.InvalidURL, http.InvalidSchema, http.MissingSchema, http.InvalidHeader) as error:
            # Not the library's own words: they hold the proxy's URL, with its password, or the header with the token.
            raise ConfigurationError(
                f"base_url, proxy or HTTPS_PROXY, HTTP_PROXY, ALL_PROXY: requests cannot use {url} with them "
                f"({type(error).__name__})"
            ) from None
        except (OSError, Urllib3Error) as error:
            if guard.refusal is not None:
                raise guard.refusal from None
            return TransportFault(guard.sent(_connection_failed(error)), _reason(error))
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Response(answer.status_code, headers, body, credential, auth.can_refresh)

    def _opened_session(self) -> requests.Session:
        with self._lock:
            if self._session is None or self._pid != os.getpid():
                # The inherited sockets of a fork are the parent's; they are left alone, not closed.
                self._pid = os.getpid()
                self._session = _new_session(self._settings.pool_maxsize)
            return self._session


def _new_session(pool_maxsize: int) -> requests.Session:
    session = requests.Session()
    # With trust_env a netrc entry for the host would replace the token, and REQUESTS_CA_BUNDLE would override verify.
    session.trust_env = False
    adapter = _ShortKeepAlive(pool_maxsize=pool_maxsize, max_retries=0)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def _prepared(request: Request, url: str, credential: dict[str, str], guard: SendGuard) -> requests.PreparedRequest:
    if request.query:
        url = f"{url}?{urlencode(request.query)}"
    headers = request_headers(request, credential)
    data: Any = guard if request.body is not None else None
    return requests.Request(request.method, url, headers=headers, data=data).prepare()


def _proxies(proxy: str | None) -> dict[str, str]:
    return {"http": proxy, "https": proxy} if proxy is not None else {}


def _read(answer: requests.Response, until: float) -> bytes:
    """The whole body, decompressed.

    The socket's timeout starts anew with every byte, so pieces are taken as they come and the time is looked at
    between them: an answer that trickles for ever is cut off.
    """
    pieces = []
    while piece := answer.raw.read1(_READ_BYTES, decode_content=True):
        pieces.append(piece)
        if time.monotonic() > until:
            raise http.ReadTimeout("the answer was not complete in time")
    return b"".join(pieces)


def _connection_failed(error: Exception) -> bool:
    """True when no connection came to be: refused, no such host, TLS, proxy, or too slow to connect."""
    if isinstance(error, http.ConnectTimeout | http.SSLError | http.ProxyError):
        return True
    cause = error.args[0] if error.args else None
    reason = cause.reason if isinstance(cause, MaxRetryError) else cause
    return isinstance(reason, NewConnectionError)


def _reason(error: BaseException) -> str:
    """The innermost cause, without the layers that requests and urllib3 wrap around it."""
    for _ in range(6):
        inner = [getattr(error, "reason", None), *reversed(error.args)]
        cause = next((part for part in inner if isinstance(part, BaseException)), None)
        if cause is None:
            break
        error = cause
    return f"{type(error).__name__}: {error}"[:400]


class _FreshConnections:
    """Mixed into urllib3's pools: a connection that lay idle for too long is opened anew."""

    def _get_conn(self, timeout: float | None = None) -> Any:
        connection = super()._get_conn(timeout)  # type: ignore[misc]
        idle_since = getattr(connection, "idle_since", None)
        if idle_since is not None and time.monotonic() - idle_since > KEEP_ALIVE_S:
            connection.close()
        return connection

    def _put_conn(self, connection: Any) -> None:
        if connection is not None:
            connection.idle_since = time.monotonic()
        super()._put_conn(connection)  # type: ignore[misc]


class _HttpPool(_FreshConnections, HTTPConnectionPool):
    pass


class _HttpsPool(_FreshConnections, HTTPSConnectionPool):
    pass


_POOLS = {"http": _HttpPool, "https": _HttpsPool}


class _ShortKeepAlive(HTTPAdapter):
    """The adapter whose pools are those above, with and without a proxy."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager
