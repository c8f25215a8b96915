"""The directory a run lives in: who the run is, who drives it, what was sent.

::

    <root>/run.json                  the identity fields and their hash; created once
    <root>/epochs/<20 digits>        one per driver start
    <root>/journal/<20 digits>       one record each
    <root>/exec/<attempt>/...        saves, metrics.jsonl
    <root>/pub/<epoch>-<step>-...    publications
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.publication.store import PosixStore, Store
from cortex_training.training.plan import canonical_sha256

RUN_FILE = "run.json"
RUN_VERSION = 1


def open_root(root: str) -> PosixStore:
    """The root's store; the folder is made when its parent is there.

    A missing parent is refused: an unmounted file system must not look like a run that has not begun.
    """
    path = os.path.abspath(root)
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            raise ConfigurationError.of(
                "plan.root", root, f"its folder {parent} does not exist; create it or mount its file system first"
            )
        os.makedirs(path, exist_ok=True)
    return PosixStore(path)


def claim_identity(store: Store, identity: Mapping[str, Any]) -> None:
    """Write ``run.json``, or compare with the one that is there; raises `ConfigurationError` naming the field that
    differs.
    """
    document = {"v": RUN_VERSION, "identity": dict(identity), "identity_sha256": canonical_sha256(identity)}
    if store.create(RUN_FILE, json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"):
        return
    known = read_identity(store)
    for name in sorted({*identity, *known}):
        if canonical_sha256(identity.get(name)) != canonical_sha256(known.get(name)):
            raise ConfigurationError.of(
                f"plan ({name})",
                identity.get(name),
                f"the run in {store.root} was begun with {known.get(name)!r}; use another root, or that plan",
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
