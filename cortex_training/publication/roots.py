"""Open the store that a root names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from cortex_training.errors import ConfigurationError
from cortex_training.publication.credentials import Source, parse_sources
from cortex_training.publication.store import PosixStore, Store
from cortex_training.publication.urls import parse_proxy, parse_root

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_CONFLICT_SENDS = 4


def open_store(
    root: str | os.PathLike[str],
    credentials: str | Sequence[Source] | None = None,
    *,
    proxy: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    renews: bool = True,
    conflict_sends: float = DEFAULT_CONFLICT_SENDS,
    notes: Callable[[str], None] = lambda line: None,
) -> Store:
    """Open a directory, or ``s3://BUCKET/PREFIX``, as a store.

    `credentials` (S3 only, and required there) is the list ``kind:location,…`` or sources; they are resolved here.
    `proxy` is ``http(s)://host[:port]``. Every call is sent again until `timeout_s` when the store may have missed it.
    A put that conflicts with another one of the same key is sent at most `conflict_sends` times; ``math.inf`` leaves it
    to the time limit too. With `renews`, credentials the store stops taking (ExpiredToken, InvalidAccessKeyId) are
    resolved again, once per request. `notes` is called with lines for a person.

    Raises RootError, ConfigurationError (an option the root does not take), CredentialsError, StoreError.
    """
    place = parse_root(root)
    if isinstance(place, str):
        if credentials is not None or proxy is not None:
            raise ConfigurationError(f"root {place}: credentials and a proxy are for s3:// roots; leave them out")
        return PosixStore(place)
    if credentials is None:
        raise ConfigurationError(
            f"root {place.url}: an s3:// root needs credentials, a list of kind:location (secret:, file:, vault:)"
        )
    from cortex_training.publication.s3 import S3Store
    from cortex_training.publication.s3_connection import Connection

    if proxy is not None:
        parse_proxy(proxy)
    sources = parse_sources(credentials) if isinstance(credentials, str) else list(credentials)
    connection = Connection(sources, proxy, renews=renews, read_timeout_s=min(60.0, timeout_s), notes=notes)
    return S3Store(place, connection, timeout_s, conflict_sends)
