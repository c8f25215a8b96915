"""Documents -> sequences: as many whole documents in each as fit, the same way on every machine."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from cortex_training.datasets.tokens import Document

WINDOW_TOKENS = 1 << 20
"""Documents are shuffled and packed in windows of this many tokens (or 64 sequences, if that is more), which bounds
memory."""


def pack(
    documents: Iterable[Document], *, max_seq_len: int, seed: int, window_tokens: int | None = None
) -> Iterator[list[Document]]:
    """Pack `documents`, none longer than `max_seq_len` tokens, into sequences of at most `max_seq_len` tokens.

    A document is never split. Within a window the documents are put in the order of SHA-256 of (`seed`, row number),
    so that neighbours in the source, which are often alike, part; each then goes where it leaves the least room, or
    opens a new sequence.
    """
    limit = window_tokens or max(WINDOW_TOKENS, 64 * max_seq_len)
    window: list[Document] = []
    held = 0
    for document in documents:
        window.append(document)
        held += len(document.tokens)
        if held >= limit:
            yield from _packed(window, max_seq_len, seed)
            window, held = [], 0
    yield from _packed(window, max_seq_len, seed)


def _packed(window: list[Document], max_seq_len: int, seed: int) -> list[list[Document]]:
    sequences: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # (tokens left, index of the sequence), ascending
    for document in sorted(window, key=lambda document: _shuffle_key(seed, document.row)):
        length = len(document.tokens)
        place = bisect_left(room, (length, 0))
        if place < len(room):
            left, index = room.pop(place)
            sequences[index].append(document)
        else:
            left, index = max_seq_len, len(sequences)
            sequences.append([document])
        if left > length:
            insort(room, (left - length, index))
    return sequences


def _shuffle_key(seed: int, row: int) -> bytes:
    return hashlib.sha256(f"{seed}:{row}".encode()).digest()
