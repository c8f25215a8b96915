"""What one client remembers between calls. Everything is bounded: a client may live for months and serve a million
requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A mapping that forgets the oldest entry beyond `capacity`. Safe to share between threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def get_or_put(self, key: K, value: V) -> V:
        """The entry of `key`, which becomes the newest; `value` if there was none."""
        with self._lock:
            found = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
            return found

    def pop(self, key: K) -> V | None:
        with self._lock:
            return self._entries.pop(key, None)
