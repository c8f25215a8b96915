"""What a finished request returned."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cortex_training import wire
from cortex_training.errors import ProtocolError

_CHECKPOINT_SEGMENT = re.compile(r"^cp_[0-9A-Za-z_-]+$")
_STEP_SEGMENT = re.compile(r"^global_step\d+$")


def checkpoint_id(save_result: Mapping[str, Any]) -> str | None:
    """The id of the checkpoint that a save made, or None.

    The result carries it as ``checkpoint_id``, or only a ``stage_path`` that ends in ``checkpoints/<id>/…``.
    """
    given = save_result.get("checkpoint_id")
    if isinstance(given, str) and given:
        return given
    for key in ("stage_path", "checkpoint_path"):
        path = save_result.get(key)
        segments = path.split("/") if isinstance(path, str) else []
        for part in reversed(segments):
            if _CHECKPOINT_SEGMENT.match(part):
                return part
        for before, part in pairwise(segments):
            if key == "stage_path" and before == "checkpoints" and _STEP_SEGMENT.match(part):
                return part
    return None


@dataclass
class ResultChunks:
    """Chunks of one result as they arrive, in any order and perhaps more than once."""

    frames: dict[int, bytes] = field(default_factory=dict, repr=False)
    total: int | None = None
    _hashes: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def complete(self) -> bool:
        return self.total is not None and len(self.frames) >= self.total

    @property
    def size(self) -> int:
        return sum(map(len, self.frames.values()))

    def add(self, event: Mapping[str, Any]) -> bool:
        """Take one ``result_chunk`` event; True if it is new.

        Raises `CorruptChunk` when the page is damaged (asking for it again may help) and `ProtocolError` when two
        different chunks claim one place.
        """
        frame = decoded_payload(event, "a result chunk")
        digest = hashlib.sha256(frame).hexdigest()
        announced = event.get("payload_sha256")
        if isinstance(announced, str) and announced and announced.lower() != digest:
            raise CorruptChunk(f"a result chunk has SHA-256 {digest}, the service announced {announced}")
        index, total = _place(frame)
        if self.total is not None and total != self.total:
            raise ProtocolError(f"result chunk {index} is one of {total}, earlier chunks were of {self.total}")
        if index in self.frames:
            if self._hashes[index] != digest:
                raise ProtocolError(f"result chunk {index} arrived twice with different content")
            return False
        self.total = total
        self.frames[index] = frame
        self._hashes[index] = digest
        return True

    def value(self) -> Any:
        """The reassembled result. Raises `ProtocolError`."""
        try:
            return wire.decode_result_chunks(list(self.frames.values()))
        except wire.WireError as error:
            raise ProtocolError(f"the {len(self.frames)} chunks of a result do not make a frame: {error}") from error


class CorruptChunk(ProtocolError):
    """A result chunk whose bytes are not those that the service hashed."""


def _place(frame: bytes) -> tuple[int, int]:
    try:
        described = wire.read_byte_chunk_metadata(frame)
    except wire.WireError as error:
        raise ProtocolError(f"a result chunk is not a chunk: {error}") from error
    if described is None:
        return 0, 1
    try:
        return int(described["chunk_idx"]), int(described["total_chunks"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"a result chunk does not say which one it is: {described!r:.200}") from None


def decoded_payload(envelope: Mapping[str, Any], what: str) -> bytes:
    """The bytes of ``payload_b64``. Raises `ProtocolError`."""
    text = envelope.get("payload_b64")
    if not isinstance(text, str) or not text:
        raise ProtocolError(f"{what} has no payload_b64 (keys: {', '.join(sorted(map(str, envelope)))})")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"{what} has a payload_b64 that is not base64: {error}") from None


def is_envelope(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("wire_format") == wire.WIRE_FORMAT_VERSION


def opened(value: object) -> Any:
    """`value` with a DSSST1 envelope opened; its ``metrics`` win over those inside, since the service adds to them."""
    if not isinstance(value, Mapping) or not is_envelope(value):
        return value
    if value.get("encoding") != "base64":
        raise ProtocolError(f"a DSSST1 result is encoded as {value.get('encoding')!r}, only base64 is known")
    frame = decoded_payload(value, "a DSSST1 result")
    try:
        decoded = wire.loads(frame)
    except wire.WireError as error:
        raise ProtocolError(f"a DSSST1 result cannot be read: {error}") from error
    if not isinstance(decoded, dict):
        raise ProtocolError(f"a DSSST1 result holds a {type(decoded).__name__}, not an object")
    return with_metrics(decoded, value)


def with_metrics(decoded: Any, envelope: object) -> Any:
    extra = envelope.get("metrics") if isinstance(envelope, Mapping) else None
    if not isinstance(decoded, dict) or not isinstance(extra, Mapping):
        return decoded
    inner = decoded.get("metrics")
    return {**decoded, "metrics": {**(inner if isinstance(inner, Mapping) else {}), **extra}}


def final(value: object) -> Any:
    """A result as callers get it: ``{}`` for nothing, and generated samples as lists rather than tensors.

    Which requests were generations is read from the result itself, so another client or a second poll sees the same.
    """
    if not value:
        return {}
    if isinstance(value, dict) and isinstance(value.get("results"), list):
        return {**value, "results": as_lists(value["results"])}
    return value


def as_lists(value: Any) -> Any:
    """`value` with every tensor below it as (nested) lists; tuples stay tuples."""
    if isinstance(value, dict):
        return {key: as_lists(part) for key, part in value.items()}
    if isinstance(value, list):
        return [as_lists(part) for part in value]
    if isinstance(value, tuple):
        return tuple(as_lists(part) for part in value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, wire.RawTensor):
        import numpy as np

        return np.asarray(value).tolist()
    return value


def event_opened(event: Any) -> Any:
    """A stream's ``result`` event with its envelope opened, tensors as lists; any other event as it is."""
    if isinstance(event, dict) and event.get("type") == "result" and is_envelope(event.get("result")):
        return {**event, "result": as_lists(opened(event["result"]))}
    return event
