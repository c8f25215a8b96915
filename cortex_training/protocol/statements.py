"""One row from Snowflake's SQL API, which lies beside the service on the same host."""

from __future__ import annotations

from typing import Any

from cortex_training.errors import ProtocolError
from cortex_training.protocol import calls
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import exchange_json
from cortex_training.protocol.messages import JSON_CONTENT, Flow, Kind, Request
from cortex_training.protocol.urls import STATEMENTS_PATH


def first_row(context: Context, query: str, database: str, schema: str) -> Flow[list[Any]]:
    """The first row of a query that changes nothing, so that it may be repeated. Raises `ProtocolError` without one."""
    body = calls.json_bytes("statement", {"statement": query, "database": database, "schema": schema})
    request = Request(
        "POST",
        STATEMENTS_PATH,
        Kind.IDEMPOTENT,
        "statement",
        context.policy.timeouts,
        body=body,
        content_type=JSON_CONTENT,
    )
    reply = yield from exchange_json(context, request)
    data = reply.get("data")
    if not isinstance(data, list) or not data or not isinstance(data[0], list) or not data[0]:
        raise ProtocolError(f"the SQL API answered {query!r} without a row")
    return data[0]
