"""``cortex-training train PLAN.json`` with a misfortune planned for it, in a process of its own.

The environment variable ``FAULTS`` holds :class:`Orders` as JSON. The product knows nothing of this: its seams (the
store's writes, the transport's send) are wrapped here, and each passing of a wrapped seam is a *crash point* with a
name such as ``before record intent step`` or ``permitted send save``. At the one that was ordered, the process is
killed, asked to stop, frozen, or left without disk.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from typing import Any

KILL, TERMINATE, FREEZE, DISK_FULL, WRITE_FAILS = "kill", "terminate", "freeze", "disk-full", "write-fails"


@dataclass(frozen=True)
class Hit:
    """Do `action` at the `nth` passing of `point` while `step` is the step of the last intent."""

    point: str
    step: int
    action: str
    nth: int = 1


@dataclass(frozen=True)
class Orders:
    """What shall happen to one driver. `window_s` shortens the sending window, so that takeovers need less patience;
    `chunk_payload_bytes` makes a batch go out in chunks of so many bytes.
    """

    hits: tuple[Hit, ...] = ()
    trace: str | None = None
    window_s: float = 1.0
    mistake: str | None = None
    chunk_payload_bytes: int | None = None

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Orders:
        value = json.loads(os.environ["FAULTS"])
        return cls(**{**value, "hits": tuple(Hit(**hit) for hit in value["hits"])})


@dataclass
class Points:
    """Counts passings and strikes at the ordered ones."""

    orders: Orders
    step: int = 0
    failing_writes: int = 0
    _passed: dict[tuple[str, int], int] = field(default_factory=dict)

    def passes(self, point: str) -> None:
        key = (point, self.step)
        self._passed[key] = self._passed.get(key, 0) + 1
        if self.orders.trace is not None:
            with open(self.orders.trace, "a", encoding="utf-8") as trace:
                trace.write(json.dumps([point, self.step]) + "\n")
        for hit in self.orders.hits:
            if (hit.point, hit.step, hit.nth) == (*key, self._passed[key]):
                self._strike(hit.action)

    def _strike(self, action: str) -> None:
        if action == DISK_FULL:
            # The kernel's own refusal, from here to the end of the process: no file may grow. Pipes are not files.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif action == WRITE_FAILS:
            self.failing_writes += 1
        else:
            os.kill(os.getpid(), {KILL: signal.SIGKILL, TERMINATE: signal.SIGTERM, FREEZE: signal.SIGSTOP}[action])


def watch_the_store(points: Points) -> None:
    """Crash points before and after each record, claim, manifest and publication."""
    from cortex_training.publication import durable
    from cortex_training.publication.s3 import S3Store
    from cortex_training.publication.store import PosixStore

    def around(method: Callable[..., Any], verb: str) -> Callable[..., Any]:
        @wraps(method)
        def wrapped(store: Any, name: str, *rest: Any) -> Any:
            what, step = describe(store, verb, name, *rest)
            if step is not None:
                points.step = step
            points.passes(f"before {what}")
            done = method(store, name, *rest)
            points.passes(f"after {what}")
            return done

        return wrapped

    for kind in (PosixStore, S3Store):
        for verb in ("create", "write", "remove"):
            setattr(kind, verb, around(getattr(kind, verb), verb))

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*arguments: Any) -> Any:
            if points.failing_writes:
                points.failing_writes -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments)

        return wrapped

    for name in ("create_empty", "create_whole", "replace_whole"):
        setattr(durable, name, failing(getattr(durable, name)))


def describe(store: Any, verb: str, name: str, data: bytes = b"") -> tuple[str, int | None]:
    """What a write is in the words of the run, and the step it is about when it says so."""
    folder = name.partition("/")[0]
    if folder == "journal":
        record = json.loads(data)
        about = record if record["type"] == "intent" else {}
        if record["type"] in ("sent", "outcome"):
            about = json.loads(store.read(f"journal/{record['intent']:020d}"))
        words = [record["type"], about.get("op"), record.get("status")]
        return "record " + " ".join(word for word in words if word), about.get("step")
    if folder == "pub":
        return ("publish entry" if verb == "create" else "withdraw entry"), None
    known = {"epochs": "claim epoch", "run.json": "write identity", "exec": "write manifest"}
    return known.get(folder, f"{verb} {name}"), None


def watch_the_transport(points: Points) -> None:
    """Crash points around each request: before it, once it is permitted, once it is written, once it is answered."""
    from cortex_training import _aiohttp_driver as transport
    from cortex_training._sending import SendGuard

    send, ask, create, write = (
        transport.AiohttpDriver._send,
        SendGuard._ask,
        SendGuard.__init__,
        transport._GuardedBody.write,
    )

    async def sending(self: Any, request: Any) -> Any:
        points.passes(f"before send {request.operation}")
        answer = await send(self, request)
        points.passes(f"answered send {request.operation}")
        return answer

    def creating(self: Any, request: Any) -> None:
        create(self, request)
        self.operation = request.operation

    def asking(self: Any) -> None:
        ask(self)
        points.passes(f"permitted send {self.operation}")

    async def writing(self: Any, writer: Any) -> None:
        await write(self, writer)
        points.passes(f"written send {self._guard.operation}")

    transport.AiohttpDriver._send = sending
    SendGuard.__init__, SendGuard._ask = creating, asking
    transport._GuardedBody.write = writing


def send_small_chunks(payload_bytes: int) -> None:
    from cortex_training._chunks import CHUNK_OVERHEAD_BYTES
    from cortex_training.protocol import training

    training.ChunkedCall = partial(training.ChunkedCall, max_bytes=CHUNK_OVERHEAD_BYTES + payload_bytes)


def main() -> int:
    orders = Orders.from_environment()
    from cortex_training.cli import main as command
    from cortex_training.training import driver

    driver.SEND_WINDOW_S = orders.window_s
    points = Points(orders)
    if orders.mistake is not None:
        from tests.faults.mistakes import MISTAKES

        MISTAKES[orders.mistake].plant()
    if orders.chunk_payload_bytes is not None:
        send_small_chunks(orders.chunk_payload_bytes)
    watch_the_store(points)
    watch_the_transport(points)
    return command()
