"""The weather as it is now: rules, how often each was met and fired, and the replies that are held back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cortex_training.local.weather_rules import (
    EXECUTIONS,
    REQUESTS,
    SUBMISSIONS,
    Faults,
    Rule,
    RuleError,
    read_rules,
)


@dataclass(frozen=True)
class Meeting:
    """What a rule is asked about: an HTTP request, or an execution in a sub-job."""

    names: tuple[str, ...]
    """The route's name and, for ``POST /operation``, what it is asked for."""
    line: str = ""
    """``METHOD /path?query``; empty for executions."""
    job_id: str | None = None
    global_steps: int | None = None
    """The step counter after an execution."""


@dataclass
class Active:
    """A rule and its counts."""

    rule: Rule
    chance: random.Random
    seen: int = 0
    fired: int = 0
    holding: list[asyncio.Future[None]] = field(default_factory=list)
    removed: bool = False

    def fires(self, meeting: Meeting) -> bool:
        """Count the meeting if it is one of the rule's, and say whether it is hit."""
        rule = self.rule
        if rule.on and not set(rule.on).intersection(meeting.names):
            return False
        if rule.job_id is not None and rule.job_id != meeting.job_id:
            return False
        if rule.at_step is not None and rule.at_step != meeting.global_steps:
            return False
        if rule.path is not None and not re.search(rule.path, meeting.line):
            return False
        self.seen += 1
        if self.seen <= rule.skip or (rule.times and self.seen > rule.skip + rule.times):
            return False
        if rule.probability < 1.0 and self.chance.random() >= rule.probability:
            return False
        self.fired += 1
        return True

    def seconds(self) -> float:
        """How long it takes this time."""
        span = self.rule.act["seconds"]
        return self.chance.uniform(*span) if isinstance(span, list) else float(span)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.rule.name,
            "seen": self.seen,
            "fired": self.fired,
            "holding": len(self.holding),
            "rule": self.rule.describe(),
        }


class Weather:
    """Belongs to the event loop. Every rule counts every meeting of its own; all that fire take effect, in order."""

    def __init__(self, faults: Faults) -> None:
        self._seed = faults.seed
        self._active: dict[str, Active] = {}
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced by another."""
        self._put(faults.rules)

    @property
    def rules(self) -> list[Active]:
        return list(self._active.values())

    def add(self, documents: Sequence[Any]) -> list[Active]:
        """Add rules, all or none. Raises RuleError."""
        added = read_rules(list(documents), taken=tuple(self._active))
        self._put(added)
        return [self._active[rule.name] for rule in added]

    def find(self, name: str) -> Active:
        """Raises RuleError when there is no such rule."""
        if name not in self._active:
            raise RuleError(f"name: there is no rule {name!r:.120}; there are {', '.join(self._active) or 'none'}")
        return self._active[name]

    def remove(self, name: str) -> None:
        """Remove a rule and let go of what it holds. Raises RuleError."""
        self.find(name).removed = True
        self.release(name)
        del self._active[name]

    def clear(self) -> None:
        for name in list(self._active):
            self.remove(name)

    def release(self, name: str) -> int:
        """Let go of the replies that the rule holds back now. Returns how many. Raises RuleError."""
        held = self.find(name).holding
        let_go = [one for one in held if not one.done()]
        for one in let_go:
            one.set_result(None)
        return len(let_go)

    def requested(self, meeting: Meeting) -> list[Active]:
        """The rules that hit an HTTP request."""
        return self._fired(REQUESTS, meeting)

    def submitted(self, meeting: Meeting) -> list[Active]:
        """The rules that hit an operation which is put into its sub-job's queue."""
        return self._fired(SUBMISSIONS, meeting)

    def executed(self, meeting: Meeting) -> list[Active]:
        """The rules that are hit by an operation that was executed."""
        return self._fired(EXECUTIONS, meeting)

    async def hold(self, active: Active) -> None:
        """Return when the rule is released; at once when it was removed since it fired."""
        if active.removed:
            return
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        active.holding.append(held)
        self._tell()
        try:
            await held
        finally:
            active.holding.remove(held)
            self._tell()

    async def wait(self, name: str, enough: Callable[[Active], bool], timeout_s: float) -> Active:
        """Return the rule when it is `enough`, or when the time is over. Raises RuleError."""
        active = self.find(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not enough(active):
                    await self._changed.wait()
        return active

    def _put(self, rules: Sequence[Rule]) -> None:
        for rule in rules:
            digest = hashlib.sha256(f"{self._seed}/{rule.name}".encode()).digest()
            self._active[rule.name] = Active(rule, random.Random(int.from_bytes(digest[:8], "big")))

    def _fired(self, counted: str, meeting: Meeting) -> list[Active]:
        fired = [one for one in self._active.values() if one.rule.counts == counted and one.fires(meeting)]
        if fired:
            self._tell()
        return fired

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
