"""How roots, endpoints and proxies are spelled. Each function reads one kind of text and says what is wrong with it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from cortex_training.errors import ConfigurationError
from cortex_training.paths import safe_relative
from cortex_training.publication.errors import RootError

S3_SCHEME = "s3://"

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")


@dataclass(frozen=True)
class S3Location:
    """A place in a bucket: ``s3://bucket/path``; `path` has no slash at either end and may be empty."""

    bucket: str
    path: str

    @property
    def url(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.path}" if self.path else f"{S3_SCHEME}{self.bucket}"


def parse_root(text: str | os.PathLike[str]) -> str | S3Location:
    """The root a user named: an absolute path, or a place in a bucket. Raises RootError.

    Nothing is looked up. A relative path becomes absolute against the working directory.
    """
    spelled = os.fspath(text)
    if spelled.startswith(S3_SCHEME):
        return parse_s3(spelled)
    first = spelled.split("/", 1)[0]
    if ":" in first:
        # A mistyped scheme must not become a relative path: an empty folder of that name reads as "nothing published".
        raise RootError(
            f"root {spelled!r}: {first.split(':', 1)[0]!r} is not a scheme that is known here; a root is a directory "
            "or s3://BUCKET/PREFIX (put ./ in front of a relative path whose first part holds a colon)"
        )
    if not spelled or "\x00" in spelled:
        raise RootError(f"root {spelled!r}: not a path; a root is a directory or s3://BUCKET/PREFIX")
    return absolute(spelled)


def absolute(path: str) -> str:
    """A path made absolute against the working directory. Raises RootError when that is gone."""
    try:
        return os.path.abspath(path)
    except OSError as problem:
        raise RootError(
            f"{path!r} is relative, and the working directory is not there ({problem.strerror}); give an absolute path"
        ) from None


def parse_s3(url: str) -> S3Location:
    """Read ``s3://BUCKET[/PATH]``; one slash at its end is dropped. Raises RootError naming the fault."""
    bucket, _, path = url.removeprefix(S3_SCHEME).partition("/")
    if not url.startswith(S3_SCHEME) or _BUCKET.fullmatch(bucket) is None:
        raise RootError(f"{url!r}: no bucket in it; spell it s3://BUCKET/PREFIX")
    path = path.removesuffix("/")
    if path:
        try:
            safe_relative(path)
        except ValueError as problem:
            raise RootError(f"{url!r}: bad prefix: {problem}") from None
    return S3Location(bucket, path)


def parse_proxy(text: str) -> str:
    """A proxy: ``http://`` or ``https://``, a host, an optional port, nothing else. Raises ConfigurationError.

    A user name or a password is refused, and not repeated in the error: it would sit in the job script.
    """
    return _plain_http_url(text, "proxy")


def parse_endpoint(text: str) -> str:
    """A store's endpoint: ``http(s)://host[:port]``. Raises ConfigurationError."""
    return _plain_http_url(text, "endpoint")


def _plain_http_url(text: str, what: str) -> str:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigurationError(f"{what}: not a URL; give http(s)://host[:port]") from None
    problem = None
    if _UNPRINTABLE.search(text):
        problem = "it holds a blank or a control character"
    elif parts.scheme not in ("http", "https") or not text.startswith(f"{parts.scheme}://"):
        problem = "it does not start with http:// or https://"
    elif "@" in parts.netloc:
        problem = "it holds a user name or a password"
    elif not host or parts.netloc.endswith(":") or port == 0:
        problem = "it has no host, or an empty or zero port"
    elif text != f"{parts.scheme}://{parts.netloc}":
        problem = "it has a path, a query or a fragment"
    if problem:
        raise ConfigurationError(f"{what}: {problem}; give http(s)://host[:port] and nothing else")
    return text
