"""Keep what libraries log while they handle secrets out of the logs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

# With level DEBUG, which a person sets to look for something else, urllib3 logs request paths (a link's signature) and
# botocore logs headers, canonical requests (the session token) and bodies. Filters work for the very logger they are
# added to, not for its children; hence the list.
_TALKATIVE = (
    "urllib3.connectionpool",
    "urllib3.connection",
    "urllib3.util.retry",
    "botocore.auth",
    "botocore.awsrequest",
    "botocore.client",
    "botocore.credentials",
    "botocore.endpoint",
    "botocore.handlers",
    "botocore.hooks",
    "botocore.httpchecksum",
    "botocore.httpsession",
    "botocore.parsers",
    "botocore.regions",
    "botocore.retries.standard",
    "botocore.retryhandler",
    "botocore.session",
    "botocore.utils",
)

_here = threading.local()


class _Hush(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_here, "depth", 0)


_HUSH = _Hush()


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """While this thread is inside, what those libraries log in it is dropped. Other threads keep logging."""
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(_HUSH)
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
