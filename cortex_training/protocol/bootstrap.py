"""Creating the database and schema of a client that was told to, when the service misses them."""

from __future__ import annotations

import re

from cortex_training.errors import ApiError, DatabaseNotCreated
from cortex_training.protocol import calls
from cortex_training.protocol.context import Policy
from cortex_training.protocol.messages import JSON_CONTENT, Kind, Request, Response
from cortex_training.protocol.urls import STATEMENTS_PATH

_STATEMENT_TIMEOUT_S = 60
_MISSING = ("not found or not authorized", "does not exist or not authorized")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")


def says_database_missing(error: ApiError) -> bool:
    """Whether a refusal may be about the database. It has no code of its own, and other objects are missed in the same
    words, which is harmless: what exists already is not created."""
    return error.status in (400, 404, 422) and any(text in str(error).lower() for text in _MISSING)


def statements(database: str, schema: str) -> list[str]:
    """What creates them. PUBLIC comes with its database."""
    wanted = [f"CREATE DATABASE IF NOT EXISTS {_identifier(database)}"]
    if schema.upper() != "PUBLIC":
        wanted.append(f"CREATE SCHEMA IF NOT EXISTS {_identifier(database)}.{_identifier(schema)}")
    return wanted


def _identifier(name: str) -> str:
    # A plain name is left unquoted, so that it means the same as in the address of the service, whatever its case.
    return name if _PLAIN_NAME.fullmatch(name) else '"' + name.replace('"', '""') + '"'


def statement_request(policy: Policy, statement: str) -> Request:
    body = calls.json_bytes("statement", {"statement": statement, "timeout": _STATEMENT_TIMEOUT_S})
    return Request(
        "POST",
        STATEMENTS_PATH,
        Kind.IDEMPOTENT,
        "create-database",
        policy.timeouts,
        body=body,
        content_type=JSON_CONTENT,
    )


def check_executed(statement: str, response: Response) -> None:
    """Raise `DatabaseNotCreated` for a statement that was only accepted."""
    if response.status == 202:
        raise not_created(statement, "the statement was accepted but has not completed")


def not_created(statement: str, reason: str) -> DatabaseNotCreated:
    return DatabaseNotCreated(
        f"{statement!r} failed: {reason.rstrip('.')}. Run it with a role that may create databases, or give a "
        "database and schema that exist."
    )
