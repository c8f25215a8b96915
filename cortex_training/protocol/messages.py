"""What a flow and its driver say to each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from cortex_training.errors import ProtocolError

T = TypeVar("T")

JSON_CONTENT = "application/json"
FRAME_CONTENT = "application/octet-stream"


class Kind(Enum):
    """How often a call may be executed; the retry rule follows from it, not from the caller."""

    SAFE = "safe"
    IDEMPOTENT = "idempotent"
    AT_MOST_ONCE = "at most once"
    DRAINED = "drained"
    """A read whose answer the service forgets once it was delivered: a lost answer is lost, so it is not asked again.
    """


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, between two pieces of the answer, and for the whole attempt."""

    connect_s: float
    read_s: float
    total_s: float

    def capped(self, other: Timeouts) -> Timeouts:
        """Each of the three at most the other's."""
        return Timeouts(
            min(self.connect_s, other.connect_s), min(self.read_s, other.read_s), min(self.total_s, other.total_s)
        )

    def within(self, remaining_s: float) -> Timeouts:
        return self.capped(Timeouts(remaining_s, remaining_s, remaining_s))


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP exchange to attempt once. `path` is absolute on the host and already quoted."""

    method: str
    path: str
    kind: Kind
    operation: str
    timeouts: Timeouts
    query: tuple[tuple[str, str], ...] = ()
    body: bytes | None = field(default=None, repr=False)
    content_type: str | None = None
    job_id: str = ""
    names: tuple[str, ...] = ()
    """Ids the path refers to: a 404 for one that was created seconds ago is the service's delay, not an error."""
    permit: Callable[[], None] | None = field(default=None, repr=False)
    """Called right before the first byte of the body is written; raises to refuse, and then nothing was executed."""
    rejected: Mapping[str, str] | None = field(default=None, repr=False)
    """Credential headers that the service called expired: the driver has them renewed before it sends."""


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Compute:
    """CPU work on about `size` bytes. The async driver does it in a thread when it would hold up its event loop."""

    function: Callable[[], Any]
    size: int


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, whatever its status. Header names are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    credential: Mapping[str, str] | None = field(default=None, repr=False)
    """The credential headers it was asked with, so that an expired one can be told from its replacement."""
    renewable: bool = False
    """Whether that credential can be replaced when it has expired."""

    def __str__(self) -> str:
        return f"{self.status}, {len(self.body)} bytes, snowflake request id {self.request_id or 'none'}"

    @property
    def request_id(self) -> str:
        return self.headers.get("x-snowflake-request-id", "")

    def json_object(self, request: Request) -> dict[str, Any]:
        """The body as a JSON object. Raises `ProtocolError` with the beginning of what came instead."""
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            shown = self.body[:200].decode("utf-8", "replace")
            raise ProtocolError(
                f"{request.method} {request.path} was answered {self.status} with something that is not a JSON object "
                f"({self.headers.get('content-type', 'no content type')}): {shown!r}. Check that the address is the "
                "service's and that no proxy answers in its place."
            )
        return value


@dataclass(frozen=True, slots=True)
class TransportFault:
    """No answer. `sent` False: provably nothing was executed; True or None: it may have been."""

    sent: bool | None
    error: str


Event: TypeAlias = Request | Sleep | Compute
Flow: TypeAlias = Generator[Event, Any, T]


def computed(function: Callable[[], T], size: int) -> Flow[T]:
    """The value of `function()`, evaluated by the driver."""
    value: T = yield Compute(function, size)
    return value
