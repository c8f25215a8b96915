"""A root in an S3-compatible bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cortex_training.publication.errors import StoreError
from cortex_training.publication.quiet import quiet_libraries
from cortex_training.publication.s3_connection import RENEWED_ON, Connection
from cortex_training.publication.store import MAX_RECORD_BYTES, Listing, checked_name
from cortex_training.publication.urls import S3Location

_KEY_BYTES = 1024
_PART_BYTES = 64 * 1024 * 1024
_DELETE_PAGE = 1000
_TRANSIENT_STATUS = frozenset({429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset({"SlowDown", "Throttling", "RequestTimeout", "InternalError", "ServiceUnavailable"})
#: First waits in seconds, at most: behind a fault of the store or the network, and behind a put that another put of
#: the same key is in flight with, which is over sooner. Each further wait is twice as long.
_FAULT_WAIT_S = 0.2
_CONFLICT_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


class Refused(StoreError):
    """The store answered a request with an error. `code` is S3's own, or the status when there was no body."""

    def __init__(self, message: str, *, code: str, status: int) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(frozen=True)
class S3Store:
    """Records under ``s3://bucket/prefix``. Raises StoreError (Refused when the store answered), CredentialsError.

    Requests the store may have missed are sent again until `timeout_s` after the call began, or until `deadline`
    (monotonic) where that is set; after it, no request is sent at all. A put that conflicts with another one of the
    same key is sent `conflict_sends` times at most.
    """

    location: S3Location
    connection: Connection = field(repr=False)
    timeout_s: float
    conflict_sends: float
    deadline: float | None = None

    @property
    def root(self) -> str:
        return self.location.url

    @property
    def opened_with(self) -> str:
        return self.connection.source

    def until(self, deadline: float) -> S3Store:
        return dataclasses.replace(self, deadline=deadline)

    def locate(self, name: str) -> str:
        return f"{self.root}/{checked_name(name)}"

    def longest_name(self, folder: str) -> int:
        return _KEY_BYTES - len(self._key(folder).encode()) - 1

    def create(self, name: str, data: bytes = b"") -> bool:
        try:
            self._request("put_object", name, Body=data, IfNoneMatch="*")
            return True
        except Refused as refusal:
            # Also the answer to a put that is sent again because the reply to the first, which landed, was lost.
            if refusal.status == 412:
                return False
            raise

    def write(self, name: str, data: bytes) -> None:
        self._request("put_object", name, Body=data)

    def read(self, name: str) -> bytes:
        try:
            return bytes(self._request("get_object", name)["Body"])
        except Refused as refusal:
            if refusal.code == "NoSuchKey":
                raise FileNotFoundError(self.locate(name)) from None
            raise

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        try:
            return int(self._request("head_object", name)["ContentLength"])
        except Refused as refusal:
            if refusal.status == 404:
                return None
            # A refused HEAD has no body, so no code: ask so that the store can say why, and credentials be renewed.
            if refusal.status not in (400, 403):
                raise
        try:
            first_byte = self._request("get_object", name, Range="bytes=0-0")
            return int(str(first_byte["ContentRange"]).rpartition("/")[2])
        except Refused as refusal:
            if refusal.code == "NoSuchKey":
                return None
            # An empty object has no first byte.
            if refusal.status == 416:
                return 0
            raise

    def listing(self, folder: str) -> Listing:
        prefix = f"{self._key(folder)}/"
        files: list[str] = []
        folders: list[str] = []
        for page in self._pages(prefix, Delimiter="/"):
            files += [item["Key"].removeprefix(prefix) for item in page.get("Contents", ())]
            folders += [item["Prefix"].removeprefix(prefix)[:-1] for item in page.get("CommonPrefixes", ())]
        # Consoles make an empty object of the folder's own name.
        return Listing(sorted(name for name in files if name), sorted(folders))

    def names(self, folder: str) -> list[str]:
        return self.listing(folder).files

    def holds_save(self, name: str) -> bool:
        page = self._request("list_objects_v2", None, Prefix=f"{self._key(name)}/", MaxKeys=1)
        return bool(page.get("Contents"))

    def remove(self, name: str) -> None:
        self._request("delete_object", name)

    def remove_folder(self, name: str, first: Sequence[str] = ()) -> str | None:
        prefix = f"{self._key(name)}/"
        for leaf in first:
            self.remove(f"{name}/{leaf}")
        for page in self._pages(prefix):
            keys = [item["Key"] for item in page.get("Contents", ())]
            for start in range(0, len(keys), _DELETE_PAGE):
                self._delete(keys[start : start + _DELETE_PAGE])
        return None

    @contextlib.contextmanager
    def staged(self, save: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="cortex-save-") as folder:
            yield folder
            for path, _, leaves in os.walk(folder):
                for leaf in sorted(leaves):
                    source = os.path.join(path, leaf)
                    relative = os.path.relpath(source, folder).replace(os.sep, "/")
                    self._upload(f"{save}/{relative}", source)

    def _key(self, name: str) -> str:
        checked_name(name)
        return f"{self.location.path}/{name}" if self.location.path else name

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        while True:
            page = self._request("list_objects_v2", None, Prefix=prefix, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            if "NextContinuationToken" not in page:
                raise StoreError(f"store: list {self.root}: the answer is cut short and does not say where to go on")
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            reply = self._request(
                "delete_objects", None, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
        except Refused as refusal:
            if refusal.status not in (501, 405):
                raise
            # A store without batches.
            for key in keys:
                self._send("delete_object", {"Key": key}, f"s3://{self.location.bucket}/{key}")
            return
        for fault in reply.get("Errors", ()):
            if fault.get("Code") in _TRANSIENT_CODES:
                # A batch that succeeded may hold keys that did not; each of these has a time limit of its own.
                self._send("delete_object", {"Key": fault["Key"]}, f"s3://{self.location.bucket}/{fault['Key']}")
                continue
            raise StoreError(
                f"store: delete s3://{self.location.bucket}/{fault.get('Key')}: "
                f"{fault.get('Code')} {fault.get('Message')}"
            )

    def _upload(self, name: str, path: str) -> None:
        """Put a file of any size; each of its parts is a request of its own that may be sent again."""
        if os.path.getsize(path) <= _PART_BYTES:
            with open(path, "rb") as file:
                self._request("put_object", name, Body=file.read())
            return
        upload = self._request("create_multipart_upload", name)["UploadId"]
        parts: list[dict[str, Any]] = []
        try:
            with open(path, "rb") as file:
                while data := file.read(_PART_BYTES):
                    number = len(parts) + 1
                    reply = self._request("upload_part", name, UploadId=upload, PartNumber=number, Body=data)
                    parts.append({"ETag": reply["ETag"], "PartNumber": number})
            self._request("complete_multipart_upload", name, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            # Parts of an upload that never completes are invisible, and billed.
            with contextlib.suppress(StoreError):
                self._request("abort_multipart_upload", name, UploadId=upload)
            raise

    def _request(self, operation: str, name: str | None, **arguments: Any) -> Mapping[str, Any]:
        if name is None:
            return self._send(operation, arguments, f"s3://{self.location.bucket}/{arguments.get('Prefix', '')}")
        return self._send(operation, {"Key": self._key(name), **arguments}, self.locate(name))

    def _send(self, operation: str, arguments: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        """Send one request until it is answered, refused for good, or out of time. Credentials are renewed once."""
        ends = self.deadline if self.deadline is not None else time.monotonic() + self.timeout_s
        doing = f"store: {operation.replace('_', ' ')} {what}"
        # A prune is thousands of requests, and none of them need fail for its time to be over.
        if time.monotonic() >= ends:
            raise StoreError(f"{doing}: not sent, as the time limit has passed")
        renewed = False
        conflicts = 0
        for attempt in itertools.count():
            client = self.connection.client
            try:
                return self._perform(client, operation, arguments, doing)
            except Refused as refusal:
                if refusal.code in RENEWED_ON and not renewed and self.connection.renewed(client, refusal.code):
                    renewed = True
                    continue
                if refusal.status == 409:
                    # Another put of this key is in flight: neither "exists" nor "ours" until it settled.
                    conflicts += 1
                    if conflicts >= self.conflict_sends:
                        raise
                    wait = _wait_s(_CONFLICT_WAIT_S, conflicts - 1)
                elif refusal.status in _TRANSIENT_STATUS or refusal.code in _TRANSIENT_CODES:
                    wait = _wait_s(_FAULT_WAIT_S, attempt - conflicts)
                else:
                    raise
                problem: StoreError = refusal
            except _NoReply as fault:
                problem = StoreError(f"{doing}: {fault}")
                wait = _wait_s(_FAULT_WAIT_S, attempt - conflicts)
            if time.monotonic() + wait >= ends:
                raise StoreError(f"{problem}; gave up after {attempt + 1} tries, at the time limit") from None
            if attempt == 2:
                self.connection.notes(f"{problem}; trying on until the time limit")
            time.sleep(wait)
        raise AssertionError("the time limit ends the loop")

    def _perform(self, client: Any, operation: str, arguments: Mapping[str, Any], doing: str) -> Mapping[str, Any]:
        from botocore import exceptions
        from botocore.parsers import ResponseParserError

        with quiet_libraries():
            try:
                reply: dict[str, Any] = getattr(client, operation)(Bucket=self.location.bucket, **arguments)
                if operation == "get_object":
                    reply["Body"] = _read_body(reply, doing)
                return reply
            except exceptions.ClientError as fault:
                raise _refusal(fault.response, doing) from None
            except exceptions.SSLError as fault:
                if _was_cut_off(fault):
                    raise _NoReply("no reply (the connection was closed while TLS began)") from None
                raise StoreError(f"{doing}: TLS failed: {fault}") from None
            except (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError) as fault:
                raise _NoReply(f"no reply ({type(fault).__name__})") from None
            except ResponseParserError:
                raise StoreError(f"{doing}: the answer is not S3's; check the endpoint") from None
            except exceptions.BotoCoreError as fault:
                raise StoreError(f"{doing}: {fault}") from None


class _NoReply(Exception):
    """A request without an answer: it may or may not have been carried out."""


def _wait_s(first: float, repetition: int) -> float:
    return random.uniform(0.5, 1.0) * min(first * 2.0 ** min(repetition, 10), _LONGEST_WAIT_S)


def _was_cut_off(fault: Any) -> bool:
    """Whether TLS failed because the other end went away, and not by what it said."""
    causes = getattr(fault.kwargs.get("error"), "args", ())
    return any(isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError) for cause in causes)


def _read_body(reply: Mapping[str, Any], doing: str) -> bytes:
    with contextlib.closing(reply["Body"]) as body:
        # A store may announce no length, so what comes is counted too.
        announced = reply.get("ContentLength") or 0
        data = b"" if announced > MAX_RECORD_BYTES else bytes(body.read(MAX_RECORD_BYTES + 1))
        if max(announced, len(data)) > MAX_RECORD_BYTES:
            raise StoreError(f"{doing}: it is larger than {MAX_RECORD_BYTES} bytes; a record is never that large")
        # At its end the body is compared with the length that was announced: a torn one is no record.
        body.read()
        return data


def _refusal(response: Mapping[str, Any], doing: str) -> Refused:
    error = response.get("Error", {})
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(error.get("Code", status))
    advice = {
        "NoSuchBucket": "; create the bucket or correct the root",
        "AccessDenied": "; these credentials may not do this",
        "PermanentRedirect": "; the bucket is in another region than the credentials name",
        "AuthorizationHeaderMalformed": "; the bucket is in another region than the credentials name",
        "NotImplemented": "; the store does not know this request: conditional writes are needed",
        "ConditionalRequestConflict": "; other writers kept this key busy",
    }.get(code, "")
    return Refused(
        f"{doing}: {code} ({status}): {error.get('Message', 'no message')}{advice}", code=code, status=status
    )
