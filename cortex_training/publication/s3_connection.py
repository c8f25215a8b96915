"""The client of an S3-compatible store, configured by the credentials found and nothing else.

boto3's core would otherwise listen to some thirty environment variables and to files in the user's home: each of them
could send a job's checkpoints elsewhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cortex_training.publication.credentials import Credentials, Source, resolve
from cortex_training.publication.errors import CredentialsError, StoreNotInstalled
from cortex_training.publication.quiet import quiet_libraries

#: Refusals that new credentials may cure. Others (AccessDenied, SignatureDoesNotMatch) they don't.
RENEWED_ON = frozenset({"ExpiredToken", "InvalidAccessKeyId"})

#: Called with a line for a person who watches.
Notes = Callable[[str], None]


class Connection:
    """The client of one store, and how to make it anew when the store stops taking its credentials.

    Shared by every view of a store, and by threads.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        proxy: str | None,
        *,
        renews: bool,
        read_timeout_s: float,
        notes: Notes,
    ) -> None:
        self._sources = sources
        self._proxy = proxy
        self._renews = renews
        self._read_timeout_s = read_timeout_s
        self._lock = threading.Lock()
        self.notes = notes
        self._credentials, self.source = resolve(sources)
        self.client = self._make_client(self._credentials, self.source)

    def renewed(self, refused_client: Any, code: str) -> bool:
        """Resolve the sources again after a refusal; False when that is not to be done for this connection.

        Raises CredentialsError when no source answers, or the one that does names another endpoint or region.
        """
        if not self._renews:
            return False
        with self._lock:
            if self.client is not refused_client:
                return True  # Another thread was refused too, and did it.
            self.notes(f"the store rejected the credentials ({code}); resolving the sources again")
            fresh, source = resolve(self._sources)
            if (fresh.endpoint, fresh.region) != (self._credentials.endpoint, self._credentials.region):
                raise CredentialsError(
                    f"credentials: {source} now names endpoint {fresh.endpoint or 'of AWS'}, region {fresh.region}; "
                    f"this run began at {self._credentials.endpoint or 'AWS'}, region {self._credentials.region}"
                )
            self.client = self._make_client(fresh, source)
            self._credentials, self.source = fresh, source
            self.notes(f"credentials: using {source}")
            return True

    def _make_client(self, credentials: Credentials, source: str) -> Any:
        botocore_session, config_class = _import_botocore()
        config = config_class(
            signature_version="s3v4",
            s3={
                "addressing_style": "path",
                "us_east_1_regional_endpoint": "regional",
                "use_accelerate_endpoint": False,
                "use_dualstack_endpoint": False,
                "use_arn_region": False,
            },
            # An empty mapping means no proxy; None would mean the environment's.
            proxies={"http": self._proxy, "https": self._proxy} if self._proxy else {},
            # Once: `S3Store._request` knows which errors may be sent again, and until when.
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=min(10.0, self._read_timeout_s),
            read_timeout=self._read_timeout_s,
            ignore_configured_endpoint_urls=True,
            # The checksums newer clients add by default are unknown to many compatible stores.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        with quiet_libraries():
            try:
                client = _blind_session(botocore_session).create_client(
                    "s3",
                    region_name=credentials.region,
                    endpoint_url=credentials.endpoint,
                    aws_access_key_id=credentials.access_key_id,
                    aws_secret_access_key=credentials.secret_access_key,
                    aws_session_token=credentials.session_token,
                    verify=True,
                    config=config,
                )
            except ValueError as problem:
                # A host or a region that is spelled as the library will not have it, an underscore in a name for one.
                raise CredentialsError(f"credentials: {source}: endpoint or region: {problem}") from None
        client.meta.events.register("before-call.s3.DeleteObjects", _add_content_md5)
        client.meta.events.register_last("before-parameter-build.s3", _stay_in_region)
        return client


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    """A refused request would have the client look for the bucket in other regions. The credentials name the region."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _add_content_md5(params: dict[str, Any], **_: Any) -> None:
    """Stores that don't know the newer checksums refuse a batch of deletes without this header."""
    body = params["body"]
    digest = hashlib.md5(body if isinstance(body, bytes) else body.encode(), usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode("ascii")


def _import_botocore() -> tuple[Any, Any]:
    try:
        import botocore.session
        from botocore.config import Config
    except ImportError:
        raise StoreNotInstalled(
            "an s3:// root needs boto3; pip install 'cortex-training-client[s3]'", field="root"
        ) from None
    return botocore.session, Config


def _blind_session(botocore_session: Any) -> Any:
    """A session that sees no environment variable and no file of the user: not even a profile that does not exist."""
    blind = {
        name: (None, None, os.devnull if name in ("config_file", "credentials_file") else default, convert)
        for name, (_, _, default, convert) in botocore_session.Session.SESSION_VARIABLES.items()
    }
    session = botocore_session.Session(session_vars=blind)
    session.register_component("data_loader", _loader())
    return session


@functools.cache
def _loader() -> Any:
    """Reads the models of services that came with the library, once; by default ~/.aws would be searched too."""
    from botocore.loaders import Loader

    return Loader([Loader.BUILTIN_DATA_PATH], include_default_search_paths=False)
