"""``cortex-training train PLAN.json`` with a misfortune planned for it, in a process of its own.

The environment variable ``FAULTS`` holds :class:`Orders` as JSON. The product knows nothing of this: its seams (the
store's writes, the transport's send) are wrapped here, and each passing of a wrapped seam is a *crash point* with a
name such as ``before record intent step`` or ``permitted send save``. At the one that was ordered, the process is
killed, asked to stop, frozen, left without disk, or taken along by a power loss.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from typing import Any

from tests.faults import power

KILL, TERMINATE, FREEZE, DISK_FULL, WRITE_FAILS = "kill", "terminate", "freeze", "disk-full", "write-fails"
POWER = "power"


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
    `chunk_payload_bytes` makes a batch go out in chunks of so many bytes, `pack_records` makes packs of so many
    records. The batch whose frame has the SHA-256 `spoiled_frame` answers a loss that is no number, whoever sends it.
    `disk`: the root, and the file that takes the notes of what a power loss would leave of it.
    """

    hits: tuple[Hit, ...] = ()
    trace: str | None = None
    window_s: float = 1.0
    mistake: str | None = None
    chunk_payload_bytes: int | None = None
    pack_records: int | None = None
    spoiled_frame: str | None = None
    disk: tuple[str, str] | None = None

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

    def passes(self, point: str, step: int | None = None) -> None:
        key = (point, self.step if step is None else step)
        self._passed[key] = self._passed.get(key, 0) + 1
        if self.orders.trace is not None:
            with open(self.orders.trace, "a", encoding="utf-8") as trace:
                trace.write(json.dumps(key) + "\n")
        for hit in self.orders.hits:
            if (hit.point, hit.step, hit.nth) == (*key, self._passed[key]):
                self._strike(hit.action)

    def _strike(self, action: str) -> None:
        if action == DISK_FULL:
            # The kernel's own refusal, from here to the end of the process: no file may grow. Pipes are not files.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif action == WRITE_FAILS:
            self.failing_writes += 1
        elif action == POWER:
            assert self.orders.disk is not None, "a power loss needs a disk that is watched"
            power.note_loss(self.orders.disk[1])
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), {KILL: signal.SIGKILL, TERMINATE: signal.SIGTERM, FREEZE: signal.SIGSTOP}[action])


def watch_the_store(points: Points) -> None:
    """Crash points before and after each record, claim, manifest and publication; on a disk that is watched also in
    between, where its folder has just been made, and where it can be seen and its name is not durable yet.
    """
    from cortex_training.publication import durable
    from cortex_training.publication.s3 import S3Store
    from cortex_training.publication.store import PosixStore

    doing = threading.local()

    def around(method: Callable[..., Any], verb: str) -> Callable[..., Any]:
        @wraps(method)
        def wrapped(store: Any, name: str, *rest: Any) -> Any:
            if name.startswith("journal/packed/") or (verb, name.partition("/")[0]) == ("remove", "journal"):
                # Packing goes on beside the training, so it is at no step.
                doing.packing = True
                try:
                    points.passes(f"before {verb} packed", 0)
                    done = method(store, name, *rest)
                    points.passes(f"after {verb} packed", 0)
                finally:
                    doing.packing = False
                return done
            what, step = describe(store, verb, name, *rest)
            if step is not None:
                points.step = step
            points.passes(f"before {what}")
            doing.what = what if points.orders.disk is not None else None
            try:
                done = method(store, name, *rest)
            finally:
                doing.what = None
            points.passes(f"after {what}")
            return done

        return wrapped

    for kind in (PosixStore, S3Store):
        for verb in ("create", "write", "remove"):
            setattr(kind, verb, around(getattr(kind, verb), verb))

    def inside(name: str) -> None:
        call = getattr(os, name)

        @wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not getattr(doing, "packing", False):
                done = call(*arguments, **named)
                if name == "mkdir" and getattr(doing, "what", None):
                    points.passes(f"mkdir {doing.what}")
                return done
            points.passes(f"before {name} packed", 0)
            done = call(*arguments, **named)
            points.passes(f"after {name} packed", 0)
            return done

        setattr(os, name, wrapped)

    for name in ("mkdir", "fsync", "link", "unlink"):
        inside(name)

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*arguments: Any) -> Any:
            if points.failing_writes:
                points.failing_writes -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = function(*arguments)
            if getattr(doing, "what", None):
                points.passes(f"placed {doing.what}")
            return done

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
            about = read_intent(store, record["intent"])
        words = [record["type"], about.get("op"), record.get("status")]
        return "record " + " ".join(word for word in words if word), about.get("step")
    if folder == "pub":
        return ("publish entry" if verb == "create" else "withdraw entry"), None
    known = {"epochs": "claim epoch", "run.json": "write identity", "exec": "write manifest"}
    return known.get(folder, f"{verb} {name}"), None


def read_intent(store: Any, number: int) -> dict[str, Any]:
    """An intent, which may have been packed since."""
    try:
        return dict(json.loads(store.read(f"journal/{number:020d}")))
    except FileNotFoundError:
        packs = [json.loads(store.read(f"journal/packed/{name}")) for name in store.names("journal/packed")]
        return next(record for pack in packs for record in pack["records"] if record["number"] == number)


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


def spoil_a_batch(frame_sha256: str) -> None:
    from cortex_training.aio import AsyncCortexTrainingClient as Client

    send, poll = Client.forward_backward, Client.poll_request
    spoiled: set[str] = set()

    async def sending(self: Any, job_id: str, data: bytes, **options: Any) -> str:
        request_id = await send(self, job_id, data, **options)
        if hashlib.sha256(data).hexdigest() == frame_sha256:
            spoiled.add(request_id)
        return request_id

    async def polling(self: Any, job_id: str, request_id: str, **options: Any) -> Any:
        result = await poll(self, job_id, request_id, **options)
        return {**result, "avg_loss": math.nan} if request_id in spoiled else result

    Client.forward_backward, Client.poll_request = sending, polling


def main() -> int:
    orders = Orders.from_environment()
    from cortex_training.cli import main as command
    from cortex_training.training import driver, packs

    driver.SEND_WINDOW_S = orders.window_s
    points = Points(orders)
    if orders.disk is not None:
        # First: what a planted mistake leaves out must not be noted.
        power.note_syncs(*orders.disk)
    if orders.mistake is not None:
        from tests.faults.mistakes import MISTAKES

        MISTAKES[orders.mistake].plant()
    if orders.chunk_payload_bytes is not None:
        send_small_chunks(orders.chunk_payload_bytes)
    if orders.spoiled_frame is not None:
        spoil_a_batch(orders.spoiled_frame)
    if orders.pack_records is not None:
        packs.PACK_RECORDS, packs._REMOVED_AT_ONCE = orders.pack_records, 4
    watch_the_store(points)
    watch_the_transport(points)
    return command()
