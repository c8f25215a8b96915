"""What a flow needs of the world: a clock, chance, the client's policy and its bounded memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cortex_training.protocol.durations import Durations
from cortex_training.protocol.memory import Bounded
from cortex_training.protocol.messages import Timeouts
from cortex_training.protocol.pace import Bounds, Pace

FRESH_S = 20.0
"""How long a 404 for an id that this client just received is taken for the service's replication delay."""


@dataclass(frozen=True)
class Policy:
    """How a client behaves. Times in seconds; None means that the caller did not say."""

    prefix: str
    poll_interval: float | None = None
    poll_timeout: float = 1800.0
    poll_backoff_multiplier: float | None = None
    poll_max_interval: float | None = None
    max_retries: int | None = None
    retry_budget_s: float = 120.0
    request_timeout: tuple[float, float] = (30.0, 600.0)
    token_prompts: str = "json"
    database_to_create: tuple[str, str] | None = None
    """Database and schema to create when the service misses them."""

    @property
    def timeouts(self) -> Timeouts:
        connect_s, read_s = self.request_timeout
        return Timeouts(connect_s, read_s, connect_s + read_s)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.poll_interval, self.poll_max_interval, self.poll_backoff_multiplier)


@dataclass(frozen=True)
class Submitted:
    """A request this client scheduled: what kind of work, and when (monotonic)."""

    operation: str
    at: float


@dataclass
class Context:
    """Shared by all calls of one client, from any thread."""

    policy: Policy
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    random: random.Random = field(default_factory=random.Random)
    fresh: Bounded[str, float] = field(default_factory=lambda: Bounded(1024))
    submitted: Bounded[tuple[str, str], Submitted] = field(default_factory=lambda: Bounded(8192))
    durations: Bounded[tuple[str, str], Durations] = field(default_factory=lambda: Bounded(8192))
    windows: Bounded[str, tuple[int | None]] = field(default_factory=lambda: Bounded(256))
    database_created: bool = False
    job_ids_honoured: bool | None = None
    """Whether the service keeps the job id a caller sends; None until a create answered."""

    def remember_id(self, created: str) -> None:
        self.fresh.put(created, self.clock())

    def saw_ids(self, names: Iterable[str]) -> None:
        """The service answered a call about these ids, so it knows them: a 404 from now on is not its delay."""
        for name in names:
            self.fresh.pop(name)

    def is_fresh(self, name: str) -> bool:
        created = self.fresh.get(name)
        return created is not None and self.clock() - created < FRESH_S

    def remember_request(self, job_id: str, request_id: str, operation: str) -> None:
        self.remember_id(request_id)
        self.submitted.put((job_id, request_id), Submitted(operation, self.clock()))

    def durations_of(self, job_id: str, operation: str) -> Durations:
        return self.durations.get_or_put((job_id, operation), Durations())

    def pace(self, durations: tuple[float, ...] = ()) -> Pace:
        return Pace(self.policy.bounds, self.random, durations)
