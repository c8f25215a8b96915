"""The hub's HTTP session: many waits, few connections, small replies. Imports aiohttp, which DAG files need not."""

from __future__ import annotations

import aiohttp

MAX_REPLY_BYTES = 64 * 1024
_PIECE_BYTES = 16 * 1024


class ReplyTooLarge(Exception):
    """A reply of more than `MAX_REPLY_BYTES`: it carries a result, which is not read here."""


class CappedResponse(aiohttp.ClientResponse):
    """An answer of which at most `MAX_REPLY_BYTES` are held in memory."""

    async def read(self) -> bytes:
        if self._body is None:
            data = bytearray()
            async for piece in self.content.iter_chunked(_PIECE_BYTES):
                data += piece
                if len(data) > MAX_REPLY_BYTES:
                    if self.status < 300:
                        raise ReplyTooLarge(f"{self.method} {self.url.path} answers more than {MAX_REPLY_BYTES} bytes")
                    # An error page: its beginning says enough.
                    self.close()
                    break
            self._body = bytes(data)
        return self._body


def open_session(connections: int) -> aiohttp.ClientSession:
    """A session for the running loop, without cookies and without netrc."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=15.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        response_class=CappedResponse,
        trust_env=False,
    )
