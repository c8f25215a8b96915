"""Waiting for a publication that is new enough. All waits of a process on one root share its listings."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger

from airflow_cortex_training.roots import open_log
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.waiting import Outcome, Wait
from cortex_training.protocol.pace import Bounds

if TYPE_CHECKING:
    from cortex_training.publication import Entry, PublicationLog

_BOUNDS = Bounds(shortest_s=2.0, longest_s=30.0)

FRESH_S = 1.0
"""A listing that is not older than this answers everybody."""


class CortexTrainingPublicationTrigger(Wait, BaseTrigger):
    """Fires once when the latest publication of `root` is later than `after` and has `min_step` steps, or at the
    deadline.

    It only lists. A store that does not answer, or a root that nobody made yet, is waited for.

    Args:
        root, credentials: as in `roots.open_root`; no secrets.
        after: name of an entry, or None.
        started, not_before, deadline: UTC epoch seconds.
        v: version of these arguments.
    """

    def __init__(
        self,
        *,
        root: str,
        credentials: str | None,
        after: str | None,
        min_step: int,
        started: float,
        not_before: float,
        deadline: float,
        v: int = 2,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.root = root
        self.credentials = credentials
        self.after = after
        self.min_step = min_step
        self.started = started
        self.not_before = not_before
        self.deadline = deadline
        self.v = v
        self.unknown = unknown
        self._found: dict[str, Any] = {}

    async def outcome(self) -> Outcome:
        with shared_listing(self.root, self.credentials) as listing:
            return await self.wait(lambda: self._look(listing), f"a publication in {self.root}", _BOUNDS)

    def told(self, outcome: Outcome) -> dict[str, Any]:
        return {"root": self.root, **self._found}

    async def _look(self, listing: SharedListing) -> Outcome | None:
        entry = await listing.latest()
        if entry is None or not counts(entry, self.after, self.min_step):
            return None
        self._found = told(entry)
        return Outcome(Status.PUBLISHED)


class SharedListing:
    """The latest publication of one root, listed once for all who ask while it is under way or just was."""

    def __init__(self, root: str, credentials: str | None) -> None:
        self.users = 0
        self._root = root
        self._credentials = credentials
        self._log: PublicationLog | None = None
        self._listed: asyncio.Task[Entry | None] | None = None
        self._listed_at = 0.0

    async def latest(self) -> Entry | None:
        listed = self._listed
        if listed is None or (listed.done() and time.monotonic() - self._listed_at > FRESH_S):
            listed = self._listed = asyncio.ensure_future(self._list())
        # Shielded: the first who asks may be cancelled, the others still want the answer.
        return await asyncio.shield(listed)

    async def _list(self) -> Entry | None:
        try:
            return await asyncio.to_thread(self._list_here)
        finally:
            self._listed_at = time.monotonic()

    def _list_here(self) -> Entry | None:
        if self._log is None:
            self._log = open_log(self._root, self._credentials)
        return self._log.latest()


@contextlib.contextmanager
def shared_listing(root: str, credentials: str | None) -> Any:
    """The listing of this event loop for `root`; it is forgotten with its last user."""
    listings = _listings.setdefault(asyncio.get_running_loop(), {})
    key = (root, credentials)
    listing = listings.setdefault(key, SharedListing(root, credentials))
    listing.users += 1
    try:
        yield listing
    finally:
        listing.users -= 1
        if listing.users == 0 and listings.get(key) is listing:
            del listings[key]


_listings: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str | None], SharedListing]]
_listings = weakref.WeakKeyDictionary()


def counts(entry: Entry, after: str | None, min_step: int) -> bool:
    """Whether an entry is what a wait is for. Names sort as publications do."""
    return entry.step >= min_step and (not after or entry.name > after)


def told(entry: Entry) -> dict[str, Any]:
    """A publication, as events and XComs hold it."""
    return {
        "entry": entry.name,
        "location": entry.location,
        "save": entry.save,
        "epoch": entry.epoch,
        "step": entry.step,
    }
