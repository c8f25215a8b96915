"""Paths of the service. An id from outside is one path segment, whatever characters it holds."""

from __future__ import annotations

import functools
import re
from urllib.parse import quote

from cortex_training.errors import ConfigurationError

STATEMENTS_PATH = "/api/v2/statements"
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def segment(field: str, value: object) -> str:
    """`value` quoted as one path segment.

    Raises `ConfigurationError` for what would name another resource: an empty id lists jobs, a dot walks up the path.
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError.of(field, value, "must be a non-empty string")
    if value in (".", ".."):
        raise ConfigurationError.of(field, value, "is not an id")
    if _CONTROL_CHARACTER.search(value):
        raise ConfigurationError.of(field, value, "holds a control character")
    try:
        return _quoted(value)
    except UnicodeEncodeError:
        raise ConfigurationError.of(field, value, "is not valid Unicode") from None


@functools.lru_cache(maxsize=4096)
def _quoted(value: str) -> str:
    """Kept, because a wait asks with the same two ids each time."""
    return quote(value, safe="")


def service_prefix(database: str, schema: str, endpoint: str) -> str:
    """The path under which all job calls live."""
    return (
        f"/api/v2/databases/{segment('database', database)}/schemas/{segment('schema', schema)}"
        f"/{segment('endpoint', endpoint)}"
    )
