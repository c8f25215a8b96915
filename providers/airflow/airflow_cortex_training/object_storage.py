"""Files by path or URL: a URL is opened with Airflow's own object storage, and its connections, a path is a local file.

``s3://aws_default@bucket/key`` names connection, bucket and key; which schemes there are depends on the providers that
are installed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from airflow.sdk import ObjectStoragePath

_FILE = "file://"


def is_url(place: str) -> bool:
    """Whether `place` is object storage; a ``file://`` URL is a path."""
    return "://" in place and not place.startswith(_FILE)


def local_path(place: str) -> str:
    return os.path.abspath(place.removeprefix(_FILE))


def opened(field: str, url: str) -> ObjectStoragePath:
    """The place that `url` names. Raises `ConfigurationError` naming `field` when its scheme or connection is unknown.

    Secrets don't belong into a URL; one with a password is refused without being shown.
    """
    from airflow.sdk import ObjectStoragePath
    from airflow.sdk.exceptions import AirflowNotFoundException

    if urlsplit(url).password:
        raise ConfigurationError(
            f"{field}: its URL holds a password; put it into an Airflow connection and write scheme://CONN_ID@bucket/key",
            field=field,
        )
    try:
        path = ObjectStoragePath(url)
        _ = path.fs
    except (ValueError, ImportError) as error:
        raise ConfigurationError.of(
            field, url, f"{error}; install the Airflow provider of that storage, or give a path"
        ) from error
    except AirflowNotFoundException as error:
        raise ConfigurationError.of(field, url, f"its connection does not exist: {error}") from error
    return path


def read_bytes(field: str, place: str) -> bytes:
    """The content of a file. Raises `ConfigurationError` naming `field` when it is not there or can't be read."""
    try:
        if is_url(place):
            return bytes(opened(field, place).read_bytes())
        with open(local_path(place), "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError.of(field, place, str(error)) from error


def check_writable_place(field: str, place: str) -> None:
    """Raise `ConfigurationError` when nothing can be written at `place`, as far as that shows without writing."""
    if is_url(place):
        opened(field, place)
        return
    folder = os.path.dirname(local_path(place))
    if not os.path.isdir(folder):
        raise ConfigurationError.of(field, place, f"folder {folder} does not exist")


def write_bytes(field: str, place: str, data: bytes) -> None:
    """Put a file in place whole; on a local path it is durable on return."""
    if is_url(place):
        path = opened(field, place)
        _put(path.fs, path.path, data)
        return
    from cortex_training.publication import durable

    target = local_path(place)
    durable.replace_whole(target, data)
    durable.sync_folder(os.path.dirname(target))


class ObjectFolder:
    """A folder in object storage, with what an export asks of a store. Names are relative and safe."""

    def __init__(self, field: str, url: str) -> None:
        self._root = opened(field, url)

    def locate(self, name: str) -> str:
        return str(self._at(name))

    def size(self, name: str) -> int | None:
        path = self._at(name)
        # Listings are cached by the file system; what another try wrote must be seen.
        path.fs.invalidate_cache()
        try:
            return int(path.fs.size(path.path))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        path = self._at(name)
        return bytes(path.fs.cat_file(path.path))

    def write(self, name: str, data: bytes) -> None:
        path = self._at(name)
        _put(path.fs, path.path, data)

    def remove(self, name: str) -> None:
        path = self._at(name)
        with contextlib.suppress(FileNotFoundError):
            path.fs.rm_file(path.path)

    @contextlib.contextmanager
    def staged(self, save: str) -> Iterator[str]:
        """A local folder; on a clean way out its files are in the storage, under `save`, and their sizes compared."""
        with tempfile.TemporaryDirectory(prefix="cortex-export-") as folder:
            yield folder
            for found, _, leaves in os.walk(folder):
                for leaf in sorted(leaves):
                    source = os.path.join(found, leaf)
                    name = os.path.relpath(source, folder).replace(os.sep, "/")
                    self._upload(source, f"{save}/{name}" if save else name)

    def _upload(self, source: str, name: str) -> None:
        from cortex_training.publication import StoreError

        path = self._at(name)
        try:
            path.fs.put_file(source, path.path)
        except FileNotFoundError:
            # Storage with real folders. Asked for only then: in a bucket it would need the right to look at buckets.
            path.fs.makedirs(path.fs._parent(path.path), exist_ok=True)
            path.fs.put_file(source, path.path)
        size, wanted = self.size(name), os.path.getsize(source)
        if size != wanted:
            raise StoreError(f"upload {self.locate(name)}: {size or 0} bytes are there, {wanted} were sent; try again")

    def _at(self, name: str) -> ObjectStoragePath:
        from cortex_training.publication.store import checked_name

        return self._root.joinpath(checked_name(name))


def _put(fs: Any, path: str, data: bytes) -> None:
    try:
        fs.pipe_file(path, data)
    except FileNotFoundError:
        fs.makedirs(fs._parent(path), exist_ok=True)
        fs.pipe_file(path, data)
