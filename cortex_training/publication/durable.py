"""Files and folders that are still there, and whole, after the power went."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

#: How the names of records start that are being written. A crash leaves at most such a file behind.
TEMPORARY = ".tmp-"


def create_empty(path: str) -> bool:
    """Create an empty file exclusively; False when the name exists. An empty file cannot be seen half-written."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return True


def create_whole(path: str, data: bytes) -> bool:
    """Create a file that holds `data` exclusively; False when the name exists. No reader meets a torn file."""
    with _written_aside(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            # NFS may repeat a link whose reply was lost and answer "exists" to its own success.
            return os.stat(temporary).st_nlink == 2
        return True


def replace_whole(path: str, data: bytes) -> None:
    """Put a file that holds `data` in place of whatever has the name. No reader meets a torn file."""
    with _written_aside(path, data) as temporary:
        os.replace(temporary, path)


def make_folder(path: str) -> None:
    """Make a folder and those above it, each durable before anything is put in it.

    So is the name of one that is there: whoever made it may have been killed before it was. Not where the folder above
    may not be read, which is somebody else's then.
    """
    if os.path.isdir(path):
        with contextlib.suppress(PermissionError):
            sync_folder(os.path.dirname(path))
        return
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        sync_folder(os.path.dirname(folder))


def sync_folder(path: str) -> None:
    """Make the names in a folder durable: a synced file whose name is lost with the power is lost."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as problem:
        # Some network file systems don't sync folders and say so; their names are durable on reply.
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def _written_aside(path: str, data: bytes) -> Iterator[str]:
    """A temporary file beside `path` that holds `data`, synced; removed on the way out."""
    temporary = os.path.join(os.path.dirname(path), f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)
