"""Remove a folder below a root without ever leaving the root, whoever swaps links in meanwhile.

Each folder is opened relative to the one above it, and never through a link; what is removed is named relative to a
folder that is open. A path that is resolved twice could be another one the second time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class _Link(Exception):
    """A name on the way to the folder is a symbolic link."""


def remove_tree(root: str, name: str, first: Sequence[str]) -> str | None:
    """Remove the folder `name` below `root`, the files `first` in it before the rest.

    Returns None, or the path of the symbolic link that was met on the way; nothing is removed then. The root itself may
    be a link. Links inside the folder are removed, not followed. Raises OSError; a missing folder or file is no error.
    """
    *above, leaf = name.split("/")
    walked = root
    with contextlib.ExitStack() as opened:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, folder)
        try:
            for part in above:
                walked = os.path.join(walked, part)
                folder = opened.enter_context(_open_folder(part, folder))
            walked = os.path.join(walked, leaf)
            with _open_folder(leaf, folder) as doomed:
                _remove_markers(doomed, first)
                _empty(doomed)
            # A link that took the folder's place is not a directory, and stays.
            os.rmdir(leaf, dir_fd=folder)
            os.fsync(folder)
        except _Link:
            return walked
        except FileNotFoundError:
            # Somebody else, a second prune, was faster.
            return None
        except NotADirectoryError:
            if _is_link(leaf, folder):
                return walked
            raise
    return None


@contextlib.contextmanager
def _open_folder(name: str, above: int) -> Iterator[int]:
    try:
        folder = os.open(name, _FOLDER, dir_fd=above)
    except OSError as problem:
        # Systems differ in what they call a link that was to be a directory.
        if problem.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK) and _is_link(name, above):
            raise _Link from None
        raise
    try:
        yield folder
    finally:
        os.close(folder)


def _remove_markers(folder: int, names: Sequence[str]) -> None:
    removed = False
    for name in names:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=folder)
            removed = True
    # A marker that outlived a crash would call the half-removed rest a complete save.
    if removed:
        os.fsync(folder)


def _empty(folder: int) -> None:
    with os.scandir(folder) as found:
        items = [(item.name, item.is_dir(follow_symlinks=False)) for item in found]
    for name, is_folder in items:
        with contextlib.suppress(FileNotFoundError):
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            try:
                with _open_folder(name, folder) as inner:
                    _empty(inner)
            except _Link:
                # It was a folder when it was listed. Inside the folder that goes, links go too.
                os.unlink(name, dir_fd=folder)
            else:
                os.rmdir(name, dir_fd=folder)


def _is_link(name: str, above: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
