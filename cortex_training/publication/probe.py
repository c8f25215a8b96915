"""Find out, before a job depends on it, that a store takes, gives back, refuses, lists and removes records."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

from cortex_training.publication.errors import StoreError
from cortex_training.publication.log import PUBLICATIONS
from cortex_training.publication.store import Store
from cortex_training.publication.time_limit import OutOfTime

# What a probe that failed, perhaps for being out of time, still has to remove its object.
_TIDY_UP_S = 5.0


def probe(store: Store) -> None:
    """Try every kind of request on an object of a random name beside ``pub/``, and remove it again.

    Raises StoreError ``store: probe: <write|read|conditional write|list|delete>: …`` for the first that fails, and
    CredentialsError.
    """
    name = f".cortex-probe-{secrets.token_hex(12)}"
    data = secrets.token_bytes(32)
    try:
        with _step("write"):
            store.write(name, data)
        with _step("read"):
            _read_back(store, name, data)
        with _step("conditional write"):
            if store.create(name, data):
                raise StoreError(
                    f"{store.locate(name)} was there, and a put with If-None-Match: * was accepted all the same; "
                    "this store can't tell who came first, so two jobs would overwrite each other. Use another store"
                )
        with _step("list"):
            store.listing(PUBLICATIONS)
    except BaseException:
        with contextlib.suppress(StoreError, OutOfTime):
            store.until(time.monotonic() + _TIDY_UP_S).remove(name)
        raise
    with _step("delete"):
        store.remove(name)


def _read_back(store: Store, name: str, data: bytes) -> None:
    try:
        found = store.read(name)
    except FileNotFoundError:
        raise StoreError(f"{store.locate(name)} was written, and is not there") from None
    if found != data:
        raise StoreError(f"{store.locate(name)} was read back as other bytes than were written")


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except StoreError as problem:
        raise StoreError(f"store: probe: {name}: {str(problem).removeprefix('store: ')}") from None
    except OutOfTime:
        raise StoreError(f"store: probe: {name}: no end of it within the time limit") from None
