"""What one connection may cost before it has asked for anything, and how many connections there may be."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEAD_BYTES = 64 * 1024


def bounded_protocol() -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which hangs up on a request whose headers have no end.

    With h11 it has such a limit of its own; with httptools it would keep header after header in memory.
    """
    base: Any = AutoHTTPProtocol
    if not hasattr(base, "on_headers_complete"):
        return AutoHTTPProtocol

    class BoundedProtocol(base):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            self._in_head, self._began_in_this_piece, self._head_bytes = True, False, 0
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            self._began_in_this_piece = False
            super().data_received(data)
            # A piece in which a head begins may hold a whole request and its body before it, so it can't be counted;
            # it is no longer than one read from the socket.
            if not self._in_head or self._began_in_this_piece:
                self._head_bytes = 0
                return
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request line and headers are longer than {MAX_HEAD_BYTES} bytes.")

        def on_message_begin(self) -> None:
            self._in_head = self._began_in_this_piece = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

    return BoundedProtocol


def allow_many_connections() -> None:
    """Let this process have as many files open as it is allowed to: the usual 1024 are fewer than some pollers hold."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS says that there is no limit, and takes no number above its own.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
