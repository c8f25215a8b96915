"""The one way in which a name from outside (a server's reply, a manifest, a user) becomes a path."""

from __future__ import annotations

import re

# Control characters end lines in logs and names in listings; none is ever part of an honest name.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE = re.compile(r"[A-Za-z]:")


def safe_relative(name: str) -> str:
    """Return `name` if it is a plain relative path: components joined by ``/``, each of them a real name.

    Raises ValueError naming it when it is empty or absolute, has an empty, ``.`` or ``..`` component, a backslash, a
    drive letter, a control character, or text that is not valid Unicode. Joined to a folder, the result never leaves it
    (as long as nothing in the folder is a symbolic link).
    """
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not text, so it is not a relative path")
    if not name:
        raise ValueError("'' is not a relative path: it is empty")
    if _CONTROL.search(name):
        raise ValueError(f"{name!r} is not a relative path: it holds a control character")
    if "\\" in name:
        raise ValueError(f"{name!r} is not a relative path: it holds a backslash")
    if name.startswith("/") or _DRIVE.match(name):
        raise ValueError(f"{name!r} is not a relative path: it is absolute")
    for component in name.split("/"):
        if component in ("", ".", ".."):
            raise ValueError(f"{name!r} is not a relative path: it has an empty, '.' or '..' component")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} is not a relative path: it is not valid Unicode") from None
    return name
