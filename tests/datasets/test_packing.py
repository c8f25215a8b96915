from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from cortex_training.datasets.packing import pack
from cortex_training.datasets.tokens import Document


def documents(lengths: list[int]) -> list[Document]:
    return [
        Document(row, np.full(length, row, dtype=np.int32), np.ones(length, dtype=np.bool_))
        for row, length in enumerate(lengths, start=1)
    ]


def rows_of(sequences: list[list[Document]]) -> list[list[int]]:
    return [[document.row for document in sequence] for sequence in sequences]


def test_every_document_is_placed_whole_and_once_within_the_limit() -> None:
    lengths = [random.Random(number).randint(1, 100) for number in range(2000)]
    sequences = list(pack(documents(lengths), max_seq_len=100, seed=3, window_tokens=5000))
    assert sorted(row for sequence in rows_of(sequences) for row in sequence) == list(range(1, len(lengths) + 1))
    assert max(sum(len(document.tokens) for document in sequence) for sequence in sequences) <= 100
    assert all(len(document.tokens) == lengths[document.row - 1] for sequence in sequences for document in sequence)


def test_little_room_is_wasted() -> None:
    lengths = [random.Random(number).randint(5, 60) for number in range(5000)]
    sequences = list(pack(documents(lengths), max_seq_len=256, seed=0))
    assert sum(lengths) / (len(sequences) * 256) > 0.97


def test_a_document_goes_where_it_leaves_the_least_room() -> None:
    # Whatever the shuffle: two of 60 cannot share 100 tokens, and the 40 fills one of them to the brim.
    for seed in range(20):
        sequences = list(pack(documents([60, 60, 40, 100]), max_seq_len=100, seed=seed))
        assert sorted(sum(len(document.tokens) for document in sequence) for sequence in sequences) == [60, 100, 100]


def test_the_result_follows_from_seed_and_rows_alone() -> None:
    lengths = [random.Random(number).randint(5, 60) for number in range(300)]
    first, again, other = (rows_of(list(pack(documents(lengths), max_seq_len=128, seed=seed))) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_neighbours_in_the_source_are_parted() -> None:
    sequences = rows_of(list(pack(documents([10] * 400), max_seq_len=100, seed=0)))
    neighbours = sum(abs(a - b) == 1 for sequence in sequences for a, b in pairwise(sequence))
    assert neighbours < 20


def test_only_one_window_is_held() -> None:
    taken = 0

    def source() -> object:
        nonlocal taken
        for document in documents([50] * 1000):
            taken += 1
            yield document

    sequences = pack(source(), max_seq_len=100, seed=0, window_tokens=1000)  # type: ignore[arg-type]
    next(sequences)
    assert taken == 20
