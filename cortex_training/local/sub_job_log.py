"""What a sub-job says of itself, read page by page with tail-logs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cortex_training.local.refusals import bad_field
from cortex_training.local.requests import timestamp

_KEPT_LINES = 20_000
DEFAULT_LINES, MAX_LINES = 100, 2000


class SubJobLog:
    """The newest lines; a cursor is the number of lines before it since the beginning, as text.

    `keep` gets each line too, for the log that stays when the job is gone.
    """

    def __init__(self, keep: Callable[[dict[str, Any]], None] = lambda entry: None) -> None:
        self._keep = keep
        self._entries: deque[dict[str, Any]] = deque(maxlen=_KEPT_LINES)
        self._written = 0

    def add(self, message: str, *, level: str = "INFO", at: float | None = None, **fields: Any) -> None:
        """Add a line; `at` is when it happened in Unix seconds, if not now."""
        moment = timestamp(time.time() if at is None else at)
        entry = {"ts": moment, "level": level, "logger": "cortex_training.local", "message": message, **fields}
        self._entries.append(entry)
        self._written += 1
        self._keep(entry)

    def page(self, cursor: object, max_lines: object) -> dict[str, Any]:
        """Entries after `cursor`; without one, from the oldest that is kept. Raises Refusal (400)."""
        count = DEFAULT_LINES if max_lines is None else max_lines
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise bad_field("payload.max_lines", max_lines, "must be a whole number of at least 1")
        count = min(count, MAX_LINES)
        oldest = self._written - len(self._entries)
        if cursor is None or cursor == "":
            first = oldest
        elif isinstance(cursor, str) and cursor.isascii() and cursor.isdigit() and int(cursor) <= self._written:
            first = max(oldest, int(cursor))
        else:
            raise bad_field("payload.cursor", cursor, "must be a next_cursor of this sub-job")
        entries = list(self._entries)[first - oldest :][:count]
        following = first + len(entries)
        return {"entries": entries, "next_cursor": str(following), "eof": following == self._written}
