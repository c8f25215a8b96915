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
            self._in_head, self._head_bytes = True, 0
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            # A head that begins in the middle of `data`, behind a body, is counted from the next piece on.
            self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
            super().data_received(data)
            if not self._in_head:
                self._head_bytes = 0
            elif self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request line and headers are longer than {MAX_HEAD_BYTES} bytes.")

        def on_message_begin(self) -> None:
            self._in_head = True
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
