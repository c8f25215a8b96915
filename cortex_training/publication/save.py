"""The manifest of a save: what a folder below the root holds, and which checkpoint of which job it is.

The manifest is put in place last, whole. A folder that has one is a complete save; that is also how ``watch`` sees it.
A *reference* save has a manifest and no files: the weights stay with the service, under job id and checkpoint id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.paths import safe_relative
from cortex_training.publication.errors import SaveError
from cortex_training.publication.store import Store

MANIFEST_NAME = ".cortex-save.json"
VERSION = 1
RESUMABLE = "resumable"
WEIGHTS_ONLY = "weights-only"

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class SavedFile:
    """One file of a save: path below the save's folder, size in bytes, SHA-256 in lower-case hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class SaveManifest:
    """What is known of a save. `created_at` is the service's own time of the checkpoint, as the service writes it.

    `segment` and `created_at` tell apart two checkpoints of one name, when the service lets a replay overwrite one.
    """

    job_id: str
    checkpoint_id: str
    checkpoint_type: str
    global_steps: int
    segment: int = 0
    created_at: str | None = None
    files: Sequence[SavedFile] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The manifest as JSON. Raises ConfigurationError naming a field that cannot be written."""
        problem = _problem(asdict(self))
        if problem:
            raise ConfigurationError(f"save manifest: {problem}")
        try:
            text = json.dumps({"v": VERSION, **asdict(self)}, sort_keys=True, indent=1, allow_nan=False)
        except (TypeError, ValueError) as fault:
            raise ConfigurationError(
                f"save manifest: metrics {dict(self.metrics)!r} are not plain JSON: {fault}"
            ) from None
        return text.encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SaveManifest:
        """Read a manifest found at `where`. Raises SaveError naming the place and the field at fault."""
        try:
            document = json.loads(data)
        except ValueError as fault:
            raise SaveError(f"{where}: not a save manifest: {fault}") from None
        if not isinstance(document, dict):
            raise SaveError(f"{where}: not a save manifest: the document is not an object")
        version = document.get("v")
        if version != VERSION or isinstance(version, bool):
            raise SaveError(
                f"{where}: version {version!r} of the save manifest is unknown here; this release reads v={VERSION}"
            )
        problem = _problem(document)
        if problem:
            raise SaveError(f"{where}: broken save manifest: {problem}")
        return cls(
            job_id=document["job_id"],
            checkpoint_id=document["checkpoint_id"],
            checkpoint_type=document["checkpoint_type"],
            global_steps=document["global_steps"],
            segment=document["segment"],
            created_at=document["created_at"],
            files=tuple(SavedFile(file["path"], file["size"], file["sha256"]) for file in document["files"]),
            metrics=document["metrics"],
        )

    def write(self, store: Store, save: str) -> None:
        """Put the manifest in the folder `save` below the root: the last file of a save, durable on return."""
        store.write(f"{save}/{MANIFEST_NAME}", self.to_bytes())

    @classmethod
    def read(cls, store: Store, save: str) -> SaveManifest:
        """The manifest in the folder `save`. Raises SaveError when there is none or it is broken."""
        name = f"{save}/{MANIFEST_NAME}"
        try:
            data = store.read(name)
        except FileNotFoundError:
            raise SaveError(f"{store.locate(name)}: no such file; the save is gone, or was never complete") from None
        return cls.from_bytes(data, store.locate(name))


def _problem(document: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields of a manifest, naming the first one; None when nothing is."""
    for name, holds in _FIELDS.items():
        if name not in document:
            return f"no field {name}"
        if not holds(document[name]):
            return f"{name} is {document[name]!r}"
    seen: set[str] = set()
    for file in document["files"]:
        problem = _file_problem(file)
        if problem:
            return problem
        if file["path"] in seen:
            return f"file {file['path']!r} is listed twice"
        seen.add(file["path"])
    return None


def _file_problem(file: Any) -> str | None:
    if not isinstance(file, Mapping) or not isinstance(file.get("path"), str):
        return f"files holds {file!r}, which has no path"
    try:
        safe_relative(file["path"])
    except ValueError as fault:
        return f"file {file['path']!r}: {fault}"
    if not _is_count(file.get("size")):
        return f"file {file['path']!r} has size {file.get('size')!r}"
    if not isinstance(file.get("sha256"), str) or _SHA256.fullmatch(file["sha256"]) is None:
        return f"file {file['path']!r} has sha256 {file.get('sha256')!r}"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "job_id": _is_text,
    "checkpoint_id": _is_text,
    "checkpoint_type": lambda value: value in (RESUMABLE, WEIGHTS_ONLY),
    "global_steps": _is_count,
    "segment": _is_count,
    "created_at": lambda value: value is None or _is_text(value),
    "files": lambda value: isinstance(value, (list, tuple)),
    "metrics": lambda value: isinstance(value, Mapping),
}
