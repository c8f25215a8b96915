"""Publish saves as training completes them, in step order, each once."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from cortex_training.publication.entries import Entry
from cortex_training.publication.errors import SaveError, SaveGone, StoreError
from cortex_training.publication.frameworks import Framework
from cortex_training.publication.log import PublicationLog
from cortex_training.publication.store import Store

#: Waits up to so many seconds; True as soon as the watch is to end. ``threading.Event().wait`` is one.
StopWait = Callable[[float], bool]
Published = Callable[[Entry], None]


class Watch:
    """Looks at the save folders in `saves` (a path below the root; it need not exist yet) of one execution."""

    def __init__(self, log: PublicationLog, framework: Framework, saves: str, epoch: int) -> None:
        self._log = log
        self._framework = framework
        self._saves = saves
        self._epoch = epoch
        self._seen_to: set[str] = set()

    def run(
        self,
        stop: StopWait,
        published: Published,
        *,
        interval_s: float,
        scan_timeout_s: float = math.inf,
        last_timeout_s: float = math.inf,
        bounded: Callable[[float], AbstractContextManager[None]] = lambda seconds: contextlib.nullcontext(),
    ) -> None:
        """Scan every `interval_s` until `stop` says so, then once more: the last save may just have been completed.

        Each scan is made in ``bounded(its time limit)``, for those who can stop one that hangs.
        """

        def scan(timeout_s: float) -> None:
            with bounded(timeout_s):
                self.scan(published, timeout_s)

        scan(scan_timeout_s)
        while not stop(interval_s):
            scan(scan_timeout_s)
        scan(last_timeout_s)

    def scan(self, published: Published, timeout_s: float = math.inf) -> None:
        """Look once: publish each complete save that is not published yet, and call `published` for every new entry.

        A save that is being written is passed over. Raises StoreError (the time limit included), and SaveError for a
        save that is broken or two folders of one step; the others are published first, as the fault is none of theirs.
        """
        deadline = time.monotonic() + timeout_s
        store = self._log.store if math.isinf(timeout_s) else self._log.store.until(deadline)
        log = PublicationLog(store)
        complete, fault = self._complete(store, deadline, timeout_s)
        for step, save in sorted(complete):
            _require_time(deadline, timeout_s, store)
            self._publish(log, save, step, published)
        if fault is not None:
            raise fault

    def _publish(self, log: PublicationLog, save: str, step: int, published: Published) -> None:
        try:
            entry, created = log.publish(save, self._epoch, step)
        except SaveGone:
            # A prune was faster; what it removed is not ours to publish.
            self._seen_to.add(save)
            return
        self._seen_to.add(save)
        if created:
            published(entry)

    def _complete(
        self, store: Store, deadline: float, timeout_s: float
    ) -> tuple[list[tuple[int, str]], SaveError | None]:
        """The complete saves that are not published yet, and the first fault found in another."""
        complete: list[tuple[int, str]] = []
        fault: SaveError | None = None
        folders_of_step: dict[int, str] = {}
        for folder in store.listing(self._saves).folders:
            save = f"{self._saves}/{folder}"
            if self._framework.named_step is not None:
                named = self._framework.named_step(folder)
                if named is None:
                    continue
                other = folders_of_step.setdefault(named, folder)
                if other != folder:
                    where = store.locate(self._saves)
                    fault = fault or SaveError(
                        f"{where}: {other} and {folder} are two saves of step {named}; remove one"
                    )
                    continue
            if save in self._seen_to:
                continue
            _require_time(deadline, timeout_s, store)
            try:
                step = self._framework.completed_step(store, save)
            except SaveError as problem:
                fault = fault or problem
                continue
            if step is not None:
                complete.append((step, save))
        return complete, fault


def _require_time(deadline: float, timeout_s: float, store: Store) -> None:
    if time.monotonic() > deadline:
        raise StoreError(f"store: scan {store.root}: not done within {timeout_s:g} s")
