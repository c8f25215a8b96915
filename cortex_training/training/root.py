"""The directory, or the place in a bucket, that a run lives in: who the run is, who drives it, what was sent.

::

    <root>/run.json                  the identity fields and their hash; created once
    <root>/epochs/<20 digits>        one per driver start
    <root>/journal/<20 digits>       one record each
    <root>/journal/packed/<...>      old records put together
    <root>/exec/<attempt>/...        saves, metrics.jsonl
    <root>/pub/<epoch>-<step>-...    publications
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.publication.durable import make_folder
from cortex_training.publication.probe import probe
from cortex_training.publication.roots import open_store
from cortex_training.publication.store import PosixStore, Store
from cortex_training.publication.urls import S3_SCHEME
from cortex_training.training.plan import canonical_sha256

RUN_FILE = "run.json"
RUN_VERSION = 1


def open_root(root: str, credentials: str | None = None) -> Store:
    """The root's store; a folder is made when its parent is there, a bucket must honour conditional writes.

    A missing parent is refused: an unmounted file system must not look like a run that has not begun. Before a run
    begins in a bucket, `probe` asks whether of two writers one wins: without that, two drivers would both own the run.

    Raises ConfigurationError, CredentialsError or StoreError.
    """
    if is_bucket(root):
        store = open_existing_root(root, credentials)
        if not store.exists(RUN_FILE):
            probe(store)
        return store
    path = os.path.abspath(root)
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            raise ConfigurationError.of(
                "plan.root", root, f"its folder {parent} does not exist; create it or mount its file system first"
            )
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError:
            raise ConfigurationError.of("plan.root", root, "is not a folder; name one that is, or a new one") from None
        except PermissionError:
            raise ConfigurationError.of(
                "plan.root", root, f"this process may not make a folder in {parent}; give its user the right to"
            ) from None
    posix = PosixStore(path)
    if not posix.exists(RUN_FILE):
        # Its name, too: a power loss would take the run with it, and its job would belong to nobody.
        make_folder(path)
    return posix


def open_existing_root(root: str, credentials: str | None = None) -> Store:
    """The store of a root that a run was begun in; `credentials` as for `publication.open_store`, for buckets only.

    A bucket that keeps settling other writes is waited for like one that throttles: it must not end a run.

    Raises RootError when the directory does not exist, CredentialsError, StoreError.
    """
    return open_store(root, credentials, conflict_sends=math.inf) if is_bucket(root) else PosixStore(root)


def is_bucket(root: str) -> bool:
    return root.startswith(S3_SCHEME)


def claim_identity(store: Store, identity: Mapping[str, Any]) -> None:
    """Write ``run.json``, or compare with the one that is there; raises `ConfigurationError` naming the field that
    differs.

    A field that one side does not tell is not compared: an older release did not write it, or the service does not say
    it of somebody else's job.
    """
    document = {"v": RUN_VERSION, "identity": dict(identity), "identity_sha256": canonical_sha256(identity)}
    if store.create(RUN_FILE, json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"):
        return
    known = read_identity(store)
    for name in sorted({*identity} & {*known}):
        mine, theirs = identity[name], known[name]
        if mine is None or theirs is None or canonical_sha256(mine) == canonical_sha256(theirs):
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            inner = next(
                key
                for key in sorted({*mine, *theirs})
                if canonical_sha256(mine.get(key)) != canonical_sha256(theirs.get(key))
            )
            name, mine, theirs = f"{name}.{inner}", mine.get(inner), theirs.get(inner)
        raise ConfigurationError.of(
            f"plan ({name})", mine, f"the run in {store.root} was begun with {theirs!r}; use another root, or that plan"
        )


def read_identity(store: Store) -> dict[str, Any]:
    where = store.locate(RUN_FILE)
    try:
        document = json.loads(store.read(RUN_FILE))
        version, identity = document["v"], dict(document["identity"])
    except (ValueError, KeyError, TypeError) as problem:
        raise ConfigurationError(f"{where} is not a run's identity: {problem}", field="plan.root") from None
    if version != RUN_VERSION:
        raise ConfigurationError.of(f"{where} v", version, f"this release reads version {RUN_VERSION}")
    return identity
