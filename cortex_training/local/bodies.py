"""Reading what callers send, never more than is allowed."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from cortex_training.local.refusals import Refusal


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body of at most `limit` bytes. Raises Refusal (413) as soon as it is known to be longer."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise Refusal(413, f"the body has {int(declared)} bytes; at most {limit} are taken here")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise Refusal(413, f"the body is longer than {limit} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise Refusal(400, "the caller went away before its body had arrived") from None
    return b"".join(parts)
