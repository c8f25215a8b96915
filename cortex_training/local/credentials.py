"""Who may call: the service's own token, or the token of a Snowflake session."""

from __future__ import annotations

import hmac
import re

from cortex_training.local.refusals import Refusal
from cortex_training.local.sessions import Sessions, SessionState

_HEADER = re.compile(r'(?:Bearer\s+(?P<bearer>\S+)|Snowflake\s+Token="(?P<session>[^"]*)")', re.IGNORECASE)
_OPEN_PATHS = ("/exports/",)
"""Links are credentials of their own."""
SNOWFLAKE_PATHS = ("/session", "/queries/", "/monitoring/", "/telemetry/", "/fs_bucket/", "/stage-files/")
"""What the connector calls: a login has no token yet, and the others answer in the connector's own way."""

SESSION_EXPIRED = "390112"
"""The code that says that a session's token may be renewed."""


class Credentials:
    """Without a token, every bearer token is let in, and no token too. A session's token must be one that a login gave
    out; without `sessions` there are none, and it counts as a bearer token.
    """

    def __init__(self, token: str | None, sessions: Sessions | None) -> None:
        self._token = token
        self._sessions = sessions

    def allows_login(self, secret: str) -> bool:
        """Whether a password or programmatic access token opens a session."""
        return self._token is None or hmac.compare_digest(secret.encode(), self._token.encode())

    def refusal(self, path: str, authorization: str) -> Refusal | None:
        """What to answer a call to `path` with this Authorization header instead of letting it in."""
        if path.startswith(_OPEN_PATHS) or (self._sessions is not None and path.startswith(SNOWFLAKE_PATHS)):
            return None
        match = _HEADER.fullmatch(authorization.strip())
        bearer, session = (match["bearer"], match["session"]) if match else (None, None)
        given = bearer or session or ""
        if self._token is not None and hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        if self._sessions is not None and session is not None:
            return _session_refusal(self._sessions.state(session))
        if self._token is None:
            return None
        return Refusal(401, "the token is missing or is not the one this service was started with", code="390100")


def session_token(authorization: str) -> str:
    """The token in a ``Snowflake Token="…"`` header, or an empty string."""
    match = _HEADER.fullmatch(authorization.strip())
    return (match["session"] or "") if match else ""


def _session_refusal(state: SessionState) -> Refusal | None:
    if state == SessionState.OPEN:
        return None
    if state == SessionState.EXPIRED:
        return Refusal(401, "Your session has expired. Please re-authenticate.", code=SESSION_EXPIRED)
    return Refusal(401, "Session no longer exists. New login required to access the service.", code="390111")
