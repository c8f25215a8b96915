"""The manifest of a dataset: what is in its shards, and the hashes that prove it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.paths import safe_relative

VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """One shard file: its name beside the manifest, its size in bytes, the SHA-256 of its bytes, and what it holds."""

    name: str
    size: int
    sha256: str
    sequences: int
    tokens: int


@dataclass(frozen=True)
class Manifest:
    """A dataset in numbers. Two datasets with one `content_sha256` give the same frames, however they are cut into
    shards.

    `rows` were read, of which `truncated_rows` were cut and `skipped_rows` left out because they were longer than
    `max_seq_len`; the others are the `documents`, packed into `sequences` of at most `max_seq_len` tokens
    (`longest_sequence` at most is used). `loss_tokens` of the `tokens` are learned. `tokenizer_sha256` names the
    tokenizer, `seed` the shuffle before packing, `frame_version` the layout of frames, `source` the caller's words
    for where the rows came from.
    """

    content_sha256: str
    sequences: int
    documents: int
    rows: int
    truncated_rows: int
    skipped_rows: int
    tokens: int
    loss_tokens: int
    max_seq_len: int
    longest_sequence: int
    pad_token_id: int
    tokenizer_sha256: str
    seed: int
    frame_version: int
    source: str | None
    shards: tuple[Shard, ...]
    v: int = VERSION

    def to_json(self) -> bytes:
        """The manifest as a file; the same manifest is the same bytes."""
        return (json.dumps(asdict(self), indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read a manifest file. Raises ConfigurationError when it is missing, not a manifest, or of a newer version."""
        path = Path(path)
        if path.is_dir():
            raise ConfigurationError(f"dataset manifest: {path} is a folder; pass {path / MANIFEST_NAME}")
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigurationError(
                f"dataset manifest: {path} does not exist; a build writes it last, so build the dataset (again), or "
                "check that this machine sees the same path"
            ) from None
        except PermissionError:
            raise ConfigurationError(
                f"dataset manifest: {path} may not be read by this process; give its user the right to"
            ) from None
        try:
            record = json.loads(data)
        except ValueError as error:
            raise ConfigurationError(
                f"dataset manifest: {path} is not JSON ({error}); build the dataset again"
            ) from error
        return cls._from_record(record, path)

    @classmethod
    def _from_record(cls, record: Any, path: Path) -> Manifest:
        version = record.get("v") if isinstance(record, dict) else None
        if not isinstance(version, int):
            raise ConfigurationError(f"dataset manifest: {path} is not a dataset manifest (it has no version `v`)")
        if version > VERSION:
            raise ConfigurationError(
                f"dataset manifest: {path} has version {version} and this release reads up to {VERSION}; upgrade "
                "cortex-training-client, or build the dataset again with this release"
            )
        # Fields that a later release adds without a new version are left aside.
        known = {field.name for field in fields(cls)}
        try:
            shards = tuple(
                Shard(**{field.name: item[field.name] for field in fields(Shard)}) for item in record["shards"]
            )
            for shard in shards:
                safe_relative(shard.name)
            return cls(**{key: value for key, value in record.items() if key in known} | {"shards": shards})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"dataset manifest: {path} is unusable ({error}); it was edited or cut off, build the dataset again"
            ) from error


def check_window(manifest: Manifest, max_seq_len: int) -> None:
    """Raise ConfigurationError when the dataset holds a sequence longer than a model's window of `max_seq_len`
    tokens."""
    if manifest.longest_sequence > max_seq_len:
        raise ConfigurationError(
            f"max_seq_len: the model's window is {max_seq_len} tokens and the dataset's longest sequence is "
            f"{manifest.longest_sequence} (packed up to {manifest.max_seq_len}); build the dataset with "
            f"max_seq_len={max_seq_len}, or "
            f"give the training sub-job a max_seq_len of {manifest.longest_sequence} or more",
            field="max_seq_len",
        )
