"""What publication asks of a store, and the store that is a directory.

A store holds small records under safe relative names. A record is either there, whole and durable, or not there: every
rule of the log and of the training journal rests on :meth:`Store.create` having exactly one winner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol, Self

from cortex_training.errors import ConfigurationError
from cortex_training.paths import safe_relative
from cortex_training.publication import durable
from cortex_training.publication.errors import RootError, StoreError
from cortex_training.publication.removal import remove_tree

#: A marker or a manifest larger than this is refused rather than read into memory (bytes).
MAX_RECORD_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Listing:
    """What is directly in one folder, sorted by name."""

    files: list[str]
    folders: list[str]


class Store(Protocol):
    """Records under one root. Names are relative, with ``/`` between components; a root is spelled by :attr:`root`."""

    @property
    def root(self) -> str:
        """The absolute path or the ``s3://`` URL of the root."""

    @property
    def opened_with(self) -> str:
        """The source of the credentials in use, ``kind:location``; "" for a store that needs none."""

    def create(self, name: str, data: bytes = b"") -> bool:
        """Create a record if there is none. True: it is ours and durable. False: the name exists, untouched."""

    def write(self, name: str, data: bytes) -> None:
        """Put a record in place whole, replacing what is there; durable on return."""

    def read(self, name: str) -> bytes:
        """The bytes of a record. Raises FileNotFoundError, or StoreError when it is over :data:`MAX_RECORD_BYTES`."""

    def exists(self, name: str) -> bool:
        """Whether there is a record of this name."""

    def size(self, name: str) -> int | None:
        """How many bytes a record, or a file of a save, has; None when it is not there."""

    def listing(self, folder: str) -> Listing:
        """Everything directly in a folder; empty when the folder is not there."""

    def names(self, folder: str) -> list[str]:
        """The records directly in a folder, as leaf names in order; without those that are being written."""

    def holds_save(self, name: str) -> bool:
        """Whether the folder `name` is there (a store without folders: holds at least one object)."""

    def locate(self, name: str) -> str:
        """The absolute path or ``s3://`` URL of a name."""

    def longest_name(self, folder: str) -> int:
        """How many bytes the name of a record in `folder` may have."""

    def remove(self, name: str) -> None:
        """Remove a record, durably; it is no error when it is not there."""

    def remove_folder(self, name: str, first: Sequence[str] = ()) -> str | None:
        """Remove a folder and all in it, the files `first` before everything else. None, or why it was left in place.

        It is no error when it, or something in it, is not there (any more).
        """

    def staged(self, save: str) -> AbstractContextManager[str]:
        """A local folder to write a save's files in; on a clean way out they are in the store, under `save`."""

    def until(self, deadline: float) -> Self:
        """The same store with a limit: no request is sent (again) after `deadline`, in monotonic seconds."""


class PosixStore:
    """A directory: local disk, NFSv3 and later, Lustre, GPFS. The root must exist; it may itself be a link.

    Raises RootError when the root is not a directory, StoreError (naming the path) when the file system refuses.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._made: set[str] = set()
        self._require_root()

    @property
    def root(self) -> str:
        return self._root

    @property
    def opened_with(self) -> str:
        return ""

    def __repr__(self) -> str:
        return f"PosixStore({self._root!r})"

    def locate(self, name: str) -> str:
        return os.path.join(self._root, checked_name(name))

    def create(self, name: str, data: bytes = b"") -> bool:
        path = self.locate(name)
        with _refusals("create", path):
            self._make_parents(path)
            # An empty record cannot be seen half-written, so its name alone is the record. One with content is
            # written aside first: a crash or a reader must never meet a torn record under the final name.
            created = durable.create_whole(path, data) if data else durable.create_empty(path)
            # Also when we lost: the winner may not have reached its own sync of the directory, and the caller acts
            # on the record being there.
            durable.sync_folder(os.path.dirname(path))
            return created

    def write(self, name: str, data: bytes) -> None:
        path = self.locate(name)
        with _refusals("write", path):
            self._make_parents(path)
            durable.replace_whole(path, data)
            durable.sync_folder(os.path.dirname(path))

    def read(self, name: str) -> bytes:
        path = self.locate(name)
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_RECORD_BYTES + 1)
        except FileNotFoundError:
            self._require_root()
            raise
        except OSError as problem:
            _refused("read", path, problem)
        if len(data) > MAX_RECORD_BYTES:
            raise StoreError(f"read {path}: it is larger than {MAX_RECORD_BYTES} bytes; a record is never that large")
        return data

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        found = self._found(self.locate(name))
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def listing(self, folder: str) -> Listing:
        path = self.locate(folder)
        files: list[str] = []
        folders: list[str] = []
        try:
            with os.scandir(path) as found:
                for item in found:
                    (folders if item.is_dir() else files).append(item.name)
        except FileNotFoundError:
            # A folder is made by the first record in it. A root that is gone is something else: an unmounted file
            # system read as an empty log would restart training from step 0.
            self._require_root()
        except OSError as problem:
            _refused("list", path, problem)
        return Listing(sorted(files), sorted(folders))

    def names(self, folder: str) -> list[str]:
        return [name for name in self.listing(folder).files if not name.startswith(durable.TEMPORARY)]

    def holds_save(self, name: str) -> bool:
        found = self._found(self.locate(name))
        return found is not None and stat.S_ISDIR(found.st_mode)

    def longest_name(self, folder: str) -> int:
        return 255

    def remove(self, name: str) -> None:
        path = self.locate(name)
        with _refusals("remove", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            durable.sync_folder(os.path.dirname(path))

    def remove_folder(self, name: str, first: Sequence[str] = ()) -> str | None:
        path = self.locate(name)
        self._require_root()
        with _refusals("remove", path):
            link = remove_tree(self._root, name, first)
        return f"{link} is a symbolic link" if link else None

    @contextlib.contextmanager
    def staged(self, save: str) -> Iterator[str]:
        # In place, so that what was written before a crash is there to go on with.
        path = self.locate(save)
        with _refusals("create", path):
            self._require_root()
            self._make_folder(path)
        yield path

    def until(self, deadline: float) -> Self:
        # Calls of the file system can't be given a limit.
        return self

    def _found(self, path: str) -> os.stat_result | None:
        """What is at a path, None for nothing. A disk that does not answer is an error and not "nothing"."""
        try:
            return os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            self._require_root()
            return None
        except OSError as problem:
            _refused("look at", path, problem)

    def _require_root(self) -> None:
        if not os.path.isdir(self._root):
            raise RootError(
                f"the root {self._root} is not an existing directory; create it, mount its file system, or correct "
                "the path (a missing root is never read as an empty log)"
            )

    def _make_parents(self, path: str) -> None:
        # A root that vanished must not be made anew: an empty root would look like a run that never started.
        self._require_root()
        self._make_folder(os.path.dirname(path))

    def _make_folder(self, path: str) -> None:
        if path == self._root or (path in self._made and os.path.isdir(path)):
            return
        # Each folder on the way, also those that are there: a killed driver may have made them.
        self._make_folder(os.path.dirname(path))
        durable.make_folder(path)
        self._made.add(path)


def checked_name(name: str) -> str:
    """A name that is a path below the root. Raises ConfigurationError naming it when it is not."""
    try:
        return safe_relative(name)
    except ValueError as problem:
        raise ConfigurationError(f"name {name!r} is not a path below the root: {problem}") from None


@contextlib.contextmanager
def _refusals(verb: str, path: str) -> Iterator[None]:
    """Turn what the file system refuses into a StoreError naming the path."""
    try:
        yield
    except OSError as problem:
        _refused(verb, path, problem)


def _refused(verb: str, path: str, problem: OSError) -> NoReturn:
    advice = {
        errno.ENOSPC: "; free some space and try again",
        errno.EDQUOT: "; the quota is used up",
        errno.EROFS: "; the file system is mounted read-only",
        errno.EACCES: "; check owner and mode",
        errno.ENAMETOOLONG: "; shorten the name",
    }.get(problem.errno or 0, "")
    raise StoreError(f"{verb} {path}: {problem.strerror or problem}{advice}") from problem
