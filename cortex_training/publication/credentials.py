"""Where the credentials of a store are found: an ordered list of sources, the first that answers is used.

A source that is absent from this node (no directory, no Vault in reach) does not answer, and the next one is tried. A
source that is present but wrong stops the search: passing over it would use the wrong credentials.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cortex_training.errors import ConfigurationError
from cortex_training.publication.errors import CredentialsError
from cortex_training.publication.urls import parse_endpoint

REQUIRED_FIELDS = ("access_key_id", "secret_access_key")
OPTIONAL_FIELDS = ("session_token", "endpoint", "region")
DEFAULT_REGION = "us-east-1"

# A mounted file of credentials is a line. Whatever is longer is something else.
_MAX_FIELD_BYTES = 64 * 1024
_REGION = re.compile(r"[A-Za-z0-9-]+", re.ASCII)
_WORD = re.compile(r"[a-z]{1,12}", re.ASCII)


@dataclass(frozen=True)
class Credentials:
    """What a store is reached with. `endpoint` is ``http(s)://host[:port]``, None for the region's own of AWS."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    region: str = DEFAULT_REGION


class NoAnswer(Exception):
    """The source is absent from this node; the text says what is."""


class Source(Protocol):
    """One place credentials may come from."""

    @property
    def name(self) -> str:
        """As the user spelled it, ``kind:location``; holds no secret."""

    def fields(self) -> Mapping[str, str]:
        """The fields found there. Raises NoAnswer, or CredentialsError when the source is there but wrong."""


_kinds_of_hosts: dict[str, Callable[[str], Source]] = {}


def add_kind(kind: str, source: Callable[[str], Source]) -> None:
    """Let a host that keeps credentials itself (Airflow's connections) be named in every list of this process.

    `source` makes the source from its location. What is resolved later, in a training run for example, finds it too.
    """
    _kinds_of_hosts[kind] = source


def parse_sources(text: str) -> list[Source]:
    """Read a list ``kind:location,kind:location``. Raises CredentialsError naming the part that is refused.

    By its number, and its kind where that can be no key: somebody may have put the credentials themselves here.
    """
    sources: list[Source] = []
    kinds = ", ".join(("secret", "file", "vault", *_kinds_of_hosts))
    for number, spelled in enumerate(text.split(","), 1):
        kind, colon, location = spelled.partition(":")
        if not colon or not location or spelled != spelled.strip():
            raise CredentialsError(f"credentials: part {number} of the list is not kind:location; kinds are {kinds}")
        if kind == "secret":
            sources.append(MountedSecret(location))
        elif kind == "file":
            sources.append(UserDirectory(location))
        elif kind == "vault":
            from cortex_training.publication.vault import parse_vault_location

            sources.append(parse_vault_location(location))
        elif kind in _kinds_of_hosts:
            sources.append(_kinds_of_hosts[kind](location))
        else:
            unknown = f"kind {kind!r} of part {number}" if _WORD.fullmatch(kind) else f"the kind of part {number}"
            raise CredentialsError(f"credentials: {unknown} of the list is unknown; kinds are {kinds}")
    return sources


def resolve(sources: Sequence[Source]) -> tuple[Credentials, str]:
    """The credentials of the first source that answers, and its name.

    Raises CredentialsError naming the source that is wrong, or each source and why it did not answer.
    """
    silent = []
    for source in sources:
        try:
            found = source.fields()
        except NoAnswer as reason:
            silent.append(f"{source.name}: {reason}")
            continue
        return _credentials(found, source.name), source.name
    raise CredentialsError("credentials: no source answered: " + "; ".join(silent or ["the list is empty"]))


@dataclass(frozen=True)
class MountedSecret:
    """``secret:DIR``: a mounted Kubernetes Secret, one file per field. Modes are the kubelet's, and not checked."""

    directory: str

    @property
    def name(self) -> str:
        return f"secret:{self.directory}"

    def fields(self) -> Mapping[str, str]:
        with _opened_directory(self.name, self.directory) as folder:
            # The kubelet's own links (..data, ..2026_01_01) are not fields.
            names = [name for name in os.listdir(folder) if not name.startswith("..")]
            return {name: _read_field(self.name, folder, name, os.O_RDONLY) for name in sorted(names)}


@dataclass(frozen=True)
class UserDirectory:
    """``file:DIR``: a directory of the user's own, closed to everybody else, one closed file per field; no links."""

    directory: str

    @property
    def name(self) -> str:
        return f"file:{self.directory}"

    def fields(self) -> Mapping[str, str]:
        return read_closed_directory(self.name, self.directory)


def read_closed_directory(source: str, directory: str) -> dict[str, str]:
    """Every file of a directory that only its owner, the caller, may use.

    Raises NoAnswer when there is no such directory, CredentialsError when it, or a file in it, is open to others.
    """
    with _opened_directory(source, directory) as folder:
        _require_closed(source, directory, os.fstat(folder))
        # O_NOFOLLOW and the check of what was opened, not of a name: a file swapped in between is not read.
        return {
            name: _read_field(source, folder, name, os.O_RDONLY | os.O_NOFOLLOW, closed=os.path.join(directory, name))
            for name in sorted(os.listdir(folder))
        }


def checked_value(source: str, name: str, value: str) -> str:
    """A field's value. Raises CredentialsError when it is empty or holds white space; never repeats it."""
    if not value:
        raise CredentialsError(f"credentials: {source}: {name} is empty")
    if any(character.isspace() or not character.isprintable() for character in value):
        raise CredentialsError(f"credentials: {source}: {name} holds white space or a control character")
    return value


def _credentials(found: Mapping[str, str], source: str) -> Credentials:
    for name in sorted(found):
        if name not in REQUIRED_FIELDS + OPTIONAL_FIELDS:
            known = ", ".join(REQUIRED_FIELDS + OPTIONAL_FIELDS)
            raise CredentialsError(f"credentials: {source}: unknown field {name!r}; fields are {known}")
    for name in REQUIRED_FIELDS:
        if name not in found:
            raise CredentialsError(f"credentials: {source}: no field {name}")
    values = {name: checked_value(source, name, value) for name, value in found.items()}
    for name in ("access_key_id", "session_token"):
        # Else the client could not send a single request, and would call each a fault of the network.
        if not values.get(name, "").isascii():
            raise CredentialsError(f"credentials: {source}: {name} holds a character that no header can (not ASCII)")
    try:
        endpoint = parse_endpoint(values["endpoint"]) if "endpoint" in values else None
    except ConfigurationError as problem:
        raise CredentialsError(f"credentials: {source}: {problem}") from None
    region = values.get("region", DEFAULT_REGION)
    if _REGION.fullmatch(region) is None:
        raise CredentialsError(f"credentials: {source}: region is not letters, digits and dashes")
    return Credentials(
        values["access_key_id"], values["secret_access_key"], values.get("session_token"), endpoint, region
    )


@contextlib.contextmanager
def _opened_directory(source: str, directory: str) -> Iterator[int]:
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NoAnswer(f"there is no directory {directory}") from None
    except (OSError, ValueError) as problem:
        raise CredentialsError(f"credentials: {source}: open {directory}: {_reason(problem)}") from None
    try:
        yield folder
    finally:
        os.close(folder)


def _read_field(source: str, folder: int, name: str, flags: int, closed: str | None = None) -> str:
    try:
        handle = os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError as problem:
        why = "it is a symbolic link" if problem.errno == errno.ELOOP else _reason(problem)
        raise CredentialsError(f"credentials: {source}: read {name}: {why}") from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise CredentialsError(f"credentials: {source}: {name} is not a file")
        if closed is not None:
            _require_closed(source, closed, found)
        data = os.read(handle, _MAX_FIELD_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > _MAX_FIELD_BYTES:
        raise CredentialsError(f"credentials: {source}: {name} is larger than {_MAX_FIELD_BYTES} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise CredentialsError(f"credentials: {source}: {name} is not UTF-8 text") from None


def _require_closed(source: str, path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise CredentialsError(f"credentials: {source}: {path} belongs to user {found.st_uid}, not to the caller")
    if found.st_mode & 0o077:
        raise CredentialsError(
            f"credentials: {source}: {path} is open to group or others (mode {found.st_mode & 0o777:04o}); "
            f"chmod go-rwx {path}"
        )


def _reason(problem: OSError | ValueError) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
