"""Paths of the service. An id from outside is one path segment, whatever characters it holds."""

from __future__ import annotations

from urllib.parse import quote

from cortex_training.errors import ConfigurationError

STATEMENTS_PATH = "/api/v2/statements"


def segment(field: str, value: object) -> str:
    """`value` quoted as one path segment.

    Raises `ConfigurationError` for what would name another resource: an empty id lists jobs, a dot walks up the path.
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError.of(field, value, "must be a non-empty string")
    if value in (".", ".."):
        raise ConfigurationError.of(field, value, "is not an id")
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ConfigurationError.of(field, value, "holds a control character")
    try:
        return quote(value, safe="")
    except UnicodeEncodeError:
        raise ConfigurationError.of(field, value, "is not valid Unicode") from None


def service_prefix(database: str, schema: str, endpoint: str) -> str:
    """The path under which all job calls live."""
    return (
        f"/api/v2/databases/{segment('database', database)}/schemas/{segment('schema', schema)}"
        f"/{segment('endpoint', endpoint)}"
    )
