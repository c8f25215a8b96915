"""Snowflake sessions: tokens that a login gives out, that expire, and that a master token renews."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MASTER_LIFETIMES = 4
"""A master token lives this many times as long as a session token, as with the real service's hour and four hours."""


class SessionState(StrEnum):
    OPEN = "open"
    EXPIRED = "expired"
    """It may be renewed with its master token."""
    UNKNOWN = "unknown"
    """Never given out, logged out, replaced, or expired together with its master token."""


@dataclass
class Session:
    """One login. Times are monotonic seconds."""

    session_id: int
    token: str
    master_token: str
    expires: float
    master_expires: float
    user: str
    connection: Any
    """What executes the session's SQL."""

    def __repr__(self) -> str:
        return f"Session({self.session_id}, user={self.user!r})"


class Sessions:
    """All logins of this process. Safe to use from any thread.

    `ended` is called with a session that nobody can use any more.
    """

    def __init__(self, lifetime_s: float, ended: Callable[[Session], None] = lambda session: None) -> None:
        self.lifetime_s = lifetime_s
        self._ended = ended
        self._lock = threading.Lock()
        self._by_token: dict[str, Session] = {}
        self._opened = 0

    @property
    def master_lifetime_s(self) -> float:
        return self.lifetime_s * MASTER_LIFETIMES

    def open(self, user: str, connection: Any) -> Session:
        now = time.monotonic()
        with self._lock:
            self._opened += 1
            session = Session(
                self._opened,
                secrets.token_urlsafe(32),
                secrets.token_urlsafe(32),
                now + self.lifetime_s,
                now + self.master_lifetime_s,
                user,
                connection,
            )
            self._by_token[session.token] = session
            gone = [one for one in self._by_token.values() if one.master_expires <= now]
            for one in gone:
                del self._by_token[one.token]
        for one in gone:
            self._ended(one)
        return session

    def state(self, token: str) -> SessionState:
        now = time.monotonic()
        with self._lock:
            session = self._by_token.get(token)
            if session is None or session.master_expires <= now:
                return SessionState.UNKNOWN
            return SessionState.OPEN if session.expires > now else SessionState.EXPIRED

    def find(self, token: str) -> Session | None:
        """The session of a token that is open."""
        with self._lock:
            session = self._by_token.get(token)
            return session if session is not None and session.expires > time.monotonic() else None

    def renew(self, master_token: str) -> tuple[str, Session] | None:
        """Give a session another token. Returns the old one, unknown from now on, and the session; None for a master
        token that is none.
        """
        now = time.monotonic()
        with self._lock:
            session = next(
                (
                    one
                    for one in self._by_token.values()
                    if secrets.compare_digest(one.master_token.encode(), master_token.encode())
                ),
                None,
            )
            if session is None or session.master_expires <= now:
                return None
            old = session.token
            del self._by_token[old]
            session.token, session.expires = secrets.token_urlsafe(32), now + self.lifetime_s
            session.master_expires = now + self.master_lifetime_s
            self._by_token[session.token] = session
            return old, session

    def expire(self, token: str | None) -> None:
        """Let a session token, or all of them, be over now; master tokens still renew them."""
        with self._lock:
            for session in self._by_token.values():
                if token in (None, session.token):
                    session.expires = time.monotonic()

    def close(self, token: str) -> None:
        """Log out, expired or not."""
        with self._lock:
            session = self._by_token.pop(token, None)
        if session is not None:
            self._ended(session)
