"""What both transports send, and the last moment before they send it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cortex_training import __version__
from cortex_training.protocol.messages import Request

_PIECE_BYTES = 1024 * 1024


def request_headers(request: Request, credential: Mapping[str, str]) -> dict[str, str]:
    headers = {
        "User-Agent": f"cortex-training-client/{__version__}",
        "Accept": "application/json",
        "Accept-Encoding": "gzip, deflate",
        **credential,
    }
    if request.content_type is not None:
        headers["Content-Type"] = request.content_type
    return headers


class SendGuard:
    """Watches one attempt to send one request.

    `permit` is asked when the connection stands and the first byte of the body is about to be written. That moment
    also divides "provably not executed" from "may have been": a request whose body was never begun is incomplete, so
    the service cannot have acted on it.
    """

    def __init__(self, request: Request) -> None:
        self._permit = request.permit
        self._body = request.body
        self.begun = False
        self.refusal: BaseException | None = None

    def __len__(self) -> int:
        return len(self._body or b"")

    def __iter__(self) -> Iterator[memoryview]:
        """The body in pieces. A socket's timeout is for one piece, so that a slow line has time for a large body."""
        self._ask()
        self.begun = True
        view = memoryview(self._body or b"")
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]

    def _ask(self) -> None:
        if self._permit is None:
            return
        try:
            self._permit()
        except BaseException as refusal:
            # HTTP libraries wrap what is raised while they send; the driver raises this one instead of their wrapping.
            self.refusal = refusal
            raise

    def sent(self, connection_failed: bool) -> bool | None:
        """Whether a failed attempt may have been executed; `connection_failed` when no connection came to be."""
        if self.begun:
            return None
        return False if connection_failed or self._body is not None else None
