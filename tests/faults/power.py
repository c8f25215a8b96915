"""A simulated power loss: after it a folder holds what was synced, and nothing else that anybody may rely on.

A killed process loses nothing that it wrote, because the kernel still has it. So a driver that is to meet a power loss
notes down what each of its fsyncs made durable (:func:`note_syncs`): the bytes of a file, the names in a folder. When
the power is lost, :class:`Disk` lays the folder anew from these notes. Of what was not synced everything is lost, or,
as a disk may also have it, each file, name and removal by chance.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOST = {"lost": True}
"""The note of a driver that takes the power with it."""


@dataclass
class File:
    """What is durable of a file."""

    data: bytes = b""


@dataclass
class Folder:
    """The durable names of a folder, each with its inode and what is behind it."""

    names: dict[str, tuple[int, File | Folder]] = field(default_factory=dict)


Tree = dict[str, "bytes | Tree"]


class Disk:
    """The disk that a run's root is on. `chance` decides what survives of what was not synced; None: nothing does."""

    def __init__(self, root: Path, notes: Path, chance: random.Random | None = None) -> None:
        self.root = root
        self.notes = notes
        self._chance = chance
        self._begin()

    def lose_what_was_lost(self) -> None:
        """Lay the root anew if the last driver took the power with it."""
        notes = [json.loads(line) for line in self.notes.read_text().splitlines()]
        if LOST not in notes:
            return
        known = _replay(notes)
        above = known[self.root.parent.stat().st_ino]
        kept = self._kept_names(self.root.parent, above, known, only=self.root.name)
        shutil.rmtree(self.root, ignore_errors=True)
        _lay(self.root.parent, kept)
        self._begin()

    def _begin(self) -> None:
        """What is there now is durable. Emptied in place: a driver that is asleep goes on to write to it."""
        self.notes.write_text("")
        with self.notes.open("a") as notes:
            for path in _below(self.root):
                notes.write(json.dumps(_note_of(path, path)) + "\n")

    def _luck(self) -> bool:
        return self._chance is not None and self._chance.random() < 0.5

    def _kept_names(self, path: Path, folder: Folder, known: dict[int, Any], only: str | None = None) -> Tree:
        seen = {item.name: item for item in os.scandir(path)} if path.is_dir() else {}
        kept: Tree = {}
        for name in sorted({only} if only else {*seen, *folder.names}):
            item, durable = seen.get(name), folder.names.get(name)
            same = item is not None and durable is not None and item.inode() == durable[0]
            if item is not None and (same or self._luck()):
                default = Folder() if item.is_dir() else File()
                kept[name] = self._kept(path / name, known.get(item.inode(), default), known)
            elif durable is not None and (item is not None or not self._luck()):
                kept[name] = self._kept(path / name if same else Path(os.devnull), durable[1], known)
        return kept

    def _kept(self, path: Path, durable: File | Folder, known: dict[int, Any]) -> bytes | Tree:
        if isinstance(durable, Folder):
            return self._kept_names(path, durable, known)
        return path.read_bytes() if path.is_file() and self._luck() else durable.data


def note_syncs(root: str, notes: str) -> None:
    """In a driver: from here on, note what each fsync of something at or below `root`, or of its folder, keeps."""
    fsync, above = os.fsync, os.path.dirname(root)
    out = os.open(notes, os.O_WRONLY | os.O_APPEND)
    # Whatever a note tells of stays open, so that the number of its inode is not given to another file. What is gone
    # already is forgotten for the same reason.
    held = [os.open(path, os.O_RDONLY) for path in _below(Path(root))]
    os.write(out, json.dumps({"alive": [os.fstat(handle).st_ino for handle in held]}).encode() + b"\n")

    def noting(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        # Before the sync: what comes during it may be too late for it.
        note = _note_of(Path(f"/proc/self/fd/{handle}"), Path(path)) if f"{path}/".startswith(f"{above}/") else None
        fsync(handle)
        if note is not None:
            held.append(os.dup(handle))
            os.write(out, json.dumps(note).encode() + b"\n")

    os.fsync = noting


def note_loss(notes: str) -> None:
    with open(notes, "a", encoding="utf-8") as out:
        out.write(json.dumps(LOST) + "\n")


def _note_of(readable: Path, path: Path) -> dict[str, Any]:
    found = os.stat(readable)
    if stat.S_ISDIR(found.st_mode):
        names = {item.name: [item.inode(), item.is_dir()] for item in os.scandir(path)}
        return {"folder": found.st_ino, "names": names}
    return {"file": found.st_ino, "data": base64.b64encode(readable.read_bytes()).decode()}


def _below(root: Path) -> list[Path]:
    """The folder of the root, the root, and all in it."""
    return [root.parent, *([root, *root.rglob("*")] if root.exists() else [])]


def _replay(notes: list[dict[str, Any]]) -> dict[int, Any]:
    """What is durable, by inode, behind notes."""
    known: dict[int, Any] = {}
    for note in notes:
        if "alive" in note:
            known = {inode: thing for inode, thing in known.items() if inode in note["alive"]}
        elif "file" in note:
            known.setdefault(note["file"], File()).data = base64.b64decode(note["data"])
        elif "folder" in note:
            known.setdefault(note["folder"], Folder()).names = {
                name: (inode, known.setdefault(inode, Folder() if is_folder else File()))
                for name, (inode, is_folder) in note["names"].items()
            }
    return known


def _lay(path: Path, tree: Tree) -> None:
    for name, content in tree.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            (path / name).mkdir()
            _lay(path / name, content)
