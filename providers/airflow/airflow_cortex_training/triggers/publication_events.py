"""Watching a publication log for an asset: every new entry becomes one event, over restarts of the triggerer.

What was reported is remembered in the asset's state store. It is written one look *after* the events were handed over:
Airflow takes an event out of the trigger's process about once a second, and a process that dies in between must report
it again. An event can so come twice and is never lost; its `entry` says which publication it is about.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_cortex_training.assets import DEFAULT_POLL_S, about
from airflow_cortex_training.roots import open_log
from airflow_cortex_training.triggers.stored import StoredArguments
from cortex_training.errors import ConfigurationError, CortexTrainingError
from cortex_training.publication import Entry, PublicationLog, RootError
from cortex_training.publication.credentials import parse_sources
from cortex_training.publication.errors import CredentialsError

CURSOR_KEY = "cortex_training_publications"
CURSOR_VERSION = 1
MAX_SEEN = 2000
_COMPLAIN_EVERY_S = 300.0


class CortexTrainingPublicationEventTrigger(StoredArguments, BaseEventTrigger):
    """Fires for each entry that appears in the publication log at `root`. Made by `assets.watched_publications`.

    Args:
        root: an absolute path or ``s3://bucket/prefix``, as triggerers see it.
        asset: name of the asset it reports to; two assets on one root are two triggers with a memory each.
        credentials: where those of an ``s3://`` root are found, ``kind:location,...``, e.g. ``airflow:CONN_ID``.
        poll_s: seconds between two looks.
        v: version of these arguments.
    """

    def __init__(
        self,
        *,
        root: str,
        asset: str,
        credentials: str | None = None,
        poll_s: float = DEFAULT_POLL_S,
        v: int = 2,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.root = root
        self.asset = asset
        self.credentials = credentials
        self.poll_s = poll_s
        self.v = v
        self.unknown = unknown

    def check(self) -> None:
        """Raise `ConfigurationError` for arguments that can't be watched. Called when a DAG file is parsed."""
        if self.poll_s <= 0:
            raise ConfigurationError.of("poll_s", self.poll_s, "give the seconds between two looks")
        if self.root.startswith("s3://") != bool(self.credentials):
            fix = "an s3:// root needs kind:location, e.g. airflow:CONN_ID, and no other root has credentials"
            raise ConfigurationError.of("credentials", self.credentials, fix)
        if self.credentials:
            try:
                parse_sources(self.credentials)
            except CredentialsError as problem:
                raise ConfigurationError(str(problem), field="credentials") from None

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.check_version()
        self.check()
        remembered = cursor = await self._read_cursor()
        complained = -_COMPLAIN_EVERY_S
        while True:
            if cursor is not None and cursor != remembered:
                # What the look before this one fired has left the process by now.
                await self._write_cursor(cursor)
                remembered = cursor
            try:
                entries = await asyncio.to_thread(self._entries, cursor)
            except CortexTrainingError as error:
                if time.monotonic() - complained >= _COMPLAIN_EVERY_S:
                    self.log.warning("could not look for publications in %s, trying on: %s", self.root, error)
                    complained = time.monotonic()
                await asyncio.sleep(self.poll_s)
                continue
            if cursor is None:
                # Nothing is reported of the first look, so nothing needs to leave the process first.
                remembered = cursor = Cursor().after(entries)
                await self._write_cursor(cursor)
            for entry in cursor.new_among(entries):
                yield TriggerEvent(await asyncio.to_thread(self._event, entry))
            cursor = cursor.after(entries)
            await asyncio.sleep(self.poll_s)

    def _publications(self) -> PublicationLog:
        return open_log(self.root, self.credentials)

    def _entries(self, cursor: Cursor | None) -> list[Entry]:
        try:
            return self._publications().entries()
        except RootError:
            # Made by the first who publishes. Later a missing root is one that is not mounted.
            if (cursor is None or cursor.is_empty) and os.path.isdir(os.path.dirname(os.path.abspath(self.root))):
                return []
            raise

    def _event(self, entry: Entry) -> dict[str, Any]:
        return {"v": 1, "root": self.root, **about(entry, self._publications().store)}

    async def _read_cursor(self) -> Cursor | None:
        stored = await self._store().aget(CURSOR_KEY)
        return None if stored is None else Cursor.from_json(stored, self.asset)

    async def _write_cursor(self, cursor: Cursor) -> None:
        await self._store().aset(CURSOR_KEY, cursor.to_json())

    def _store(self) -> Any:
        if self.asset_state_store is None:
            raise RuntimeError(
                f"the trigger of asset {self.asset!r} was given no asset state store, so it can't remember what it "
                "reported; it needs Airflow 3.3 or newer, and to belong to an AssetWatcher"
            )
        return self.asset_state_store


class Cursor:
    """Which entries of a log were reported.

    A set, not a high-water mark: of two exports that run at once the one of the older epoch may publish last. Entries
    that were pruned are forgotten; beyond `MAX_SEEN` the lowest are folded into a floor, below which nothing is new.
    """

    def __init__(self, seen: frozenset[str] = frozenset(), floor: str = "") -> None:
        self._seen = seen
        self._floor = floor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cursor) and (self._seen, self._floor) == (other._seen, other._floor)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_empty(self) -> bool:
        return not self._seen and not self._floor

    def new_among(self, entries: Sequence[Entry]) -> list[Entry]:
        """Entries that were not reported, in the order of the log."""
        return [e for e in entries if e.name > self._floor and _digest(e.name) not in self._seen]

    def after(self, entries: Sequence[Entry]) -> Cursor:
        """The cursor when all of `entries`, which is the whole log, were reported."""
        if not entries:
            # Pruning keeps the latest, so an empty log is a file system that went away: it will be back.
            return self
        names = sorted(entry.name for entry in entries if entry.name > self._floor)
        folded, kept = names[:-MAX_SEEN], names[-MAX_SEEN:]
        return Cursor(frozenset(map(_digest, kept)), folded[-1] if folded else self._floor)

    def to_json(self) -> dict[str, Any]:
        return {"v": CURSOR_VERSION, "floor": self._floor, "seen": sorted(self._seen)}

    @classmethod
    def from_json(cls, stored: Any, asset: str) -> Cursor:
        if not isinstance(stored, dict) or stored.get("v") != CURSOR_VERSION:
            version = stored.get("v") if isinstance(stored, dict) else stored
            raise RuntimeError(
                f"the state of asset {asset!r} has version {version!r} under {CURSOR_KEY!r}, this release reads "
                f"{CURSOR_VERSION}: upgrade airflow-provider-cortex-training where triggerers run, or delete the key"
            )
        return cls(frozenset(stored["seen"]), str(stored["floor"]))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]
