"""Rows -> a dataset on disk, one window of rows in memory at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cortex_training.datasets.batches import FRAME_VERSION
from cortex_training.datasets.manifest import MANIFEST_NAME, Manifest, Shard
from cortex_training.datasets.packing import pack
from cortex_training.datasets.rows import Row, read_rows
from cortex_training.datasets.shards import SHARD_TOKENS, ContentHash, sync_folder, write_durably, write_shards
from cortex_training.datasets.tokenizer import load_tokenizer
from cortex_training.datasets.tokens import Document, document_encoder
from cortex_training.errors import ConfigurationError

Overlong = Literal["error", "truncate", "skip"]

_PROGRESS_EVERY_ROWS = 1000


def build_dataset(
    rows: Any,
    out: str | Path,
    *,
    tokenizer: str | Path,
    max_seq_len: int,
    seed: int = 0,
    source: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    overlong: Overlong = "error",
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Tokenize `rows`, pack them into sequences of at most `max_seq_len` tokens, and write shards and manifest into
    `out`.

    `rows` is an iterable of mappings, a DB-API cursor that has executed a query, or Arrow tables or record batches; a
    row has `prompt` and `completion`, or `messages`, or `text` (see `rows.read_rows` and `tokens.document_encoder`).
    `tokenizer` is a folder with ``tokenizer.json``. `seed` shuffles neighbouring rows before they are packed.
    `source` is put in the manifest; it must not hold a credential. `progress` is called with the numbers of rows and
    tokens so far.

    `overlong` says what becomes of a row of more than `max_seq_len` tokens: "error" (the default, because a cut
    answer teaches the model to stop in the middle), "truncate" to its first `max_seq_len` tokens, or "skip". A
    truncated row of which nothing to learn remains is skipped. The manifest counts both.

    A dataset that is already in `out` stays whole until every new row was read, and is then replaced. Raises
    ConfigurationError for bad rows, an empty source, an unusable tokenizer or an impossible argument.
    """
    _check_arguments(max_seq_len, seed, overlong)
    vocabulary = load_tokenizer(tokenizer)
    counts = _Counts()
    content = ContentHash(max_seq_len, vocabulary.pad_token_id)
    documents = _fitting(read_rows(rows), document_encoder(vocabulary), max_seq_len, overlong, counts, progress)

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    # Built aside, so that a bad row or a crash leaves neither half a dataset nor a mix of an old and a new one.
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    try:
        sequences = counts.sequences(pack(documents, max_seq_len=max_seq_len, seed=seed))
        shards = tuple(write_shards(sequences, building, content, shard_tokens))
        _check_not_empty(counts, source)
        manifest = Manifest(
            content_sha256=content.hexdigest(),
            sequences=sum(shard.sequences for shard in shards),
            documents=counts.documents,
            rows=counts.rows,
            truncated_rows=counts.truncated,
            skipped_rows=counts.skipped,
            tokens=counts.tokens,
            loss_tokens=counts.loss_tokens,
            max_seq_len=max_seq_len,
            longest_sequence=counts.longest_sequence,
            pad_token_id=vocabulary.pad_token_id,
            tokenizer_sha256=vocabulary.sha256,
            seed=seed,
            frame_version=FRAME_VERSION,
            source=source,
            shards=shards,
        )
        write_durably(building / MANIFEST_NAME, manifest.to_json())
        _install(building, folder, shards)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if progress is not None:
        progress(counts.rows, counts.tokens)
    return manifest


@dataclass
class _Counts:
    rows: int = 0
    documents: int = 0
    truncated: int = 0
    skipped: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    longest_sequence: int = 0

    def sequences(self, packed: Iterator[list[Document]]) -> Iterator[list[Document]]:
        for sequence in packed:
            length = sum(len(document.tokens) for document in sequence)
            self.longest_sequence = max(self.longest_sequence, length)
            yield sequence


def _fitting(
    rows: Iterator[Row],
    encode: Callable[[Row], Document],
    max_seq_len: int,
    overlong: Overlong,
    counts: _Counts,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Document]:
    for row in rows:
        counts.rows += 1
        if progress is not None and counts.rows % _PROGRESS_EVERY_ROWS == 0:
            progress(counts.rows, counts.tokens)
        document = encode(row)
        length = len(document.tokens)
        if length > max_seq_len:
            if overlong == "error":
                raise ConfigurationError(
                    f"rows: row {row.number} is {length} tokens long and max_seq_len is {max_seq_len}; raise "
                    "max_seq_len if the model's window permits, shorten the row in the query, or pass "
                    "overlong='truncate' "
                    "or overlong='skip'",
                    field="max_seq_len",
                )
            document = replace(document, tokens=document.tokens[:max_seq_len], loss=document.loss[:max_seq_len])
            if overlong == "skip" or not document.loss.any():
                counts.skipped += 1
                continue
            counts.truncated += 1
        counts.documents += 1
        counts.tokens += len(document.tokens)
        counts.loss_tokens += int(document.loss.sum())
        yield document


def _check_arguments(max_seq_len: int, seed: int, overlong: str) -> None:
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 2:
        raise ConfigurationError.of(
            "max_seq_len", max_seq_len, "pass the longest sequence in tokens, a whole number from 2"
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigurationError.of("seed", seed, "pass a whole number")
    if overlong not in get_args(Overlong):
        raise ConfigurationError.of("overlong", overlong, 'pass "error", "truncate" or "skip"')


def _check_not_empty(counts: _Counts, source: str | None) -> None:
    origin = f" of {source}" if source else ""
    if counts.rows == 0:
        raise ConfigurationError(
            f"rows: the source{origin} gave no rows, so there is nothing to train on; check the query, its filters and "
            "the role's "
            "rights on the table",
            field="rows",
        )
    if counts.documents == 0:
        raise ConfigurationError(
            f"rows: all {counts.rows} rows{origin} were skipped, being longer than max_seq_len; raise max_seq_len, or "
            "pass "
            'overlong="truncate"',
            field="max_seq_len",
        )


def _install(building: Path, folder: Path, shards: tuple[Shard, ...]) -> None:
    """Put the new files in the place of the old. Without a manifest there is no dataset: it goes first and comes
    last."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    sync_folder(folder)
    wanted = {shard.name for shard in shards}
    for name in wanted:
        os.replace(building / name, folder / name)
    for old in folder.glob("shard-*.safetensors"):
        if old.name not in wanted:
            old.unlink(missing_ok=True)
    sync_folder(folder)
    os.replace(building / MANIFEST_NAME, folder / MANIFEST_NAME)
    sync_folder(folder)
