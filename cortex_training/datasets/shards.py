"""Shard files: packed sequences as flat arrays in safetensors.

A shard holds four tensors: ``tokens`` int32 ``[tokens]``, ``loss`` uint8 ``[tokens]`` (1: learned),
``document_offsets`` int64 ``[documents + 1]`` into the tokens, and ``sequence_offsets`` int64 ``[sequences + 1]``
into the documents; and ``rows`` int64 ``[documents]``, the source's row numbers, so that a batch can be traced back
to the table.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cortex_training.datasets.manifest import Manifest, Shard
from cortex_training.datasets.tokens import Document
from cortex_training.errors import ConfigurationError

SHARD_TOKENS = 1 << 22
"""Tokens after which a shard is written: 20 MiB of arrays, which is what a build holds in memory."""

_HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Sequence:
    """One packed sequence. `tokens` int32 and `loss` bool ``[length]``; `lengths` int64 ``[documents]`` adds up to
    `length`."""

    tokens: npt.NDArray[np.int32]
    loss: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]


class ContentHash:
    """SHA-256 over what frames are made of: window, padding, and every sequence in order; not over how files are
    cut."""

    def __init__(self, max_seq_len: int, pad_token_id: int) -> None:
        self._hash = hashlib.sha256(f"cortex-training dataset 1\n{max_seq_len}\n{pad_token_id}\n".encode())

    def add(self, sequence: Sequence) -> None:
        self._hash.update(np.array([len(sequence.lengths), *sequence.lengths], dtype="<u4").tobytes())
        self._hash.update(sequence.tokens.astype("<i4").tobytes())
        self._hash.update(sequence.loss.astype("u1").tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def write_shards(
    sequences: Iterable[list[Document]], folder: Path, content: ContentHash, shard_tokens: int = SHARD_TOKENS
) -> Iterator[Shard]:
    """Write ``shard-00000.safetensors`` and so on into `folder`, each durable when it is yielded, and add them to
    `content`."""
    number, held, tokens = 0, [], 0
    for documents in sequences:
        content.add(
            Sequence(
                np.concatenate([document.tokens for document in documents]),
                np.concatenate([document.loss for document in documents]),
                np.array([len(document.tokens) for document in documents], dtype=np.int64),
            )
        )
        held.append(documents)
        tokens += sum(len(document.tokens) for document in documents)
        if tokens >= shard_tokens:
            yield _write_shard(folder, number, held)
            number, held, tokens = number + 1, [], 0
    if held:
        yield _write_shard(folder, number, held)


def _write_shard(folder: Path, number: int, sequences: list[list[Document]]) -> Shard:
    documents = [document for sequence in sequences for document in sequence]
    arrays = {
        "tokens": np.concatenate([document.tokens for document in documents]),
        "loss": np.concatenate([document.loss for document in documents]).astype(np.uint8),
        "document_offsets": np.cumsum([0, *(len(document.tokens) for document in documents)], dtype=np.int64),
        "sequence_offsets": np.cumsum([0, *(len(sequence) for sequence in sequences)], dtype=np.int64),
        "rows": np.array([document.row for document in documents], dtype=np.int64),
    }
    data = save(arrays)
    name = f"shard-{number:05d}.safetensors"
    write_durably(folder / name, data)
    return Shard(name, len(data), hashlib.sha256(data).hexdigest(), len(sequences), len(arrays["tokens"]))


class ShardReader:
    """The sequences of a dataset's shards by number, read from disk as they are asked for; safe to use from several
    threads."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._shards = [_OpenShard(folder / shard.name) for shard in manifest.shards]
        self._first = list(accumulate((len(shard) for shard in self._shards), initial=0))

    def __len__(self) -> int:
        return self._first[-1]

    def sequence(self, index: int) -> Sequence:
        shard = bisect_right(self._first, index) - 1
        return self._shards[shard].sequence(index - self._first[shard])


class _OpenShard:
    def __init__(self, path: Path) -> None:
        file: Any = safe_open(path, framework="numpy")
        self._tokens = file.get_slice("tokens")
        self._loss = file.get_slice("loss")
        self._documents: npt.NDArray[np.int64] = file.get_tensor("document_offsets")
        self._sequences: npt.NDArray[np.int64] = file.get_tensor("sequence_offsets")

    def __len__(self) -> int:
        return len(self._sequences) - 1

    def sequence(self, index: int) -> Sequence:
        first, last = self._sequences[index], self._sequences[index + 1]
        offsets = self._documents[first : last + 1]
        span = slice(int(offsets[0]), int(offsets[-1]))
        return Sequence(self._tokens[span], self._loss[span].astype(np.bool_), np.diff(offsets))


def open_shards(folder: Path, manifest: Manifest, *, verify: bool) -> ShardReader:
    """Open the shards that `manifest` names in `folder`.

    The size of every file is checked, and with `verify` its SHA-256 and the hash of the whole content. Raises
    ConfigurationError that names the shard, what was expected and what was found.
    """
    for shard in manifest.shards:
        _check_file(folder / shard.name, shard, verify)
    try:
        reader = ShardReader(folder, manifest)
    except SafetensorError as error:
        raise ConfigurationError(
            f"dataset {folder}: a shard cannot be read ({error}); build the dataset again"
        ) from error
    if verify:
        _check_content(folder, manifest, reader)
    return reader


def _check_file(path: Path, shard: Shard, verify: bool) -> None:
    fix = "copy the shard again from where the dataset was built, or build the dataset again"
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ConfigurationError(f"dataset shard {path} is missing; {fix}") from None
    if size != shard.size:
        raise ConfigurationError(f"dataset shard {path} is {size} bytes and the manifest says {shard.size}; {fix}")
    if not verify:
        return
    found = _file_sha256(path)
    if found != shard.sha256:
        raise ConfigurationError(
            f"dataset shard {path} does not match its manifest: expected sha256 {shard.sha256}, found {found}; {fix}"
        )


def _check_content(folder: Path, manifest: Manifest, reader: ShardReader) -> None:
    content = ContentHash(manifest.max_seq_len, manifest.pad_token_id)
    for index in range(len(reader)):
        content.add(reader.sequence(index))
    if content.hexdigest() != manifest.content_sha256:
        raise ConfigurationError(
            f"dataset {folder}: the manifest's content_sha256 is {manifest.content_sha256} and its shards hold "
            f"{content.hexdigest()}; the manifest was edited or belongs to another dataset, build the dataset again"
        )


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file whose bytes survive a power cut once this returns; the name is made durable by `sync_folder`."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, on systems where a folder can be opened."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
