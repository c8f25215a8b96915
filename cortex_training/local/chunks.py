"""Chunked requests: groups of chunks that become one frame, and one execution however often they are sent."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

from cortex_training import wire
from cortex_training.local.refusals import Refusal, chunk_group_refusal
from cortex_training.local.requests import Execution

_MAX_CHUNKS = 100_000


@dataclass(frozen=True)
class Chunk:
    """One chunk as it arrived."""

    frame: bytes = field(repr=False)
    group_id: str
    index: int
    total: int
    logical_sha256: str
    logical_bytes: int
    operation: str | None
    content_sha256: str
    """Of this chunk's own bytes, to notice another payload under the same index."""

    @property
    def is_last(self) -> bool:
        return self.index == self.total - 1

    @property
    def identity(self) -> tuple[str, int, int, str | None]:
        """What all chunks of a group agree on."""
        return self.logical_sha256, self.logical_bytes, self.total, self.operation


@dataclass
class ChunkGroup:
    """Everything that is known of one group id."""

    group_id: str
    identity: tuple[str, int, int, str | None]
    content_sha256: dict[int, str] = field(default_factory=dict)
    frames: dict[int, bytes] = field(default_factory=dict, repr=False)
    """Chunks that wait for the others; empty once the group runs."""
    execution: Execution | None = None
    touched: float = 0.0
    """Monotonic seconds of the newest chunk."""
    joining: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the chunks become a frame, so that a repeated last chunk waits and starts no second execution."""

    @property
    def retained_bytes(self) -> int:
        return sum(len(frame) for frame in self.frames.values())


def read_chunk(frame: bytes, *, max_frame_bytes: int) -> Chunk | None:
    """Read a chunk's descriptor; None for a frame that is no chunk. Raises Refusal (400, 413)."""
    try:
        described = wire.read_byte_chunk_metadata(frame)
    except wire.WireError as error:
        raise Refusal(400, f"the body is not a DSSST1 frame: {error}") from None
    if described is None:
        return None
    if described["kind"] != "request":
        raise Refusal(400, f"the body is a {described['kind']} chunk, and requests are sent in request chunks")
    group_id, sha256 = described.get("chunk_group_id"), described.get("frame_sha256")
    operation = described.get("operation")
    if not isinstance(group_id, str) or not 0 < len(group_id) <= 256:
        raise Refusal(400, f"chunk_group_id must be a text of 1 to 256 characters, got {group_id!r:.300}")
    if not isinstance(sha256, str) or len(sha256) != 64:
        raise Refusal(400, f"frame_sha256 must be 64 hexadecimal digits, got {sha256!r:.100}")
    if operation is not None and not isinstance(operation, str):
        raise Refusal(400, f"operation must be a text, got {operation!r:.100}")
    total, index = _count(described, "total_chunks"), _count(described, "chunk_idx")
    size = _count(described, "frame_size_bytes")
    if not 0 <= index < total <= _MAX_CHUNKS:
        raise Refusal(
            400, f"chunk_idx {index} of total_chunks {total} is not possible; at most {_MAX_CHUNKS} chunks are taken"
        )
    if size > max_frame_bytes:
        raise Refusal(413, f"the whole frame has {size} bytes; at most {max_frame_bytes} are taken")
    return Chunk(frame, group_id, index, total, sha256.lower(), size, operation, hashlib.sha256(frame).hexdigest())


class ChunkGroups:
    """The groups of one sub-job, remembered as long as it runs, or (`evict_completed`) until they were executed."""

    def __init__(self, *, evict_completed: bool = False) -> None:
        self._evict_completed = evict_completed
        self._groups: dict[str, ChunkGroup] = {}
        self._partial: dict[str, ChunkGroup] = {}

    @property
    def partial(self) -> list[ChunkGroup]:
        """The groups that hold chunks and wait for more."""
        return list(self._partial.values())

    def accept(self, chunk: Chunk) -> ChunkGroup:
        """Add a chunk to its group. Raises Refusal (409) when it cannot belong to it."""
        group = self._groups.get(chunk.group_id)
        if self._evict_completed and group is not None and group.execution is not None and group.execution.is_over:
            self.forget(chunk.group_id)
            group = None
        if group is None:
            if chunk.index != 0:
                raise chunk_group_refusal(
                    "chunk_group_restart_required",
                    f"chunk group {chunk.group_id} is not known here; restart from chunk 0",
                    chunk.group_id,
                    received_chunk=chunk.index,
                    expected_start_chunk=0,
                )
            group = self._groups[chunk.group_id] = ChunkGroup(chunk.group_id, chunk.identity)
        known = group.content_sha256.get(chunk.index)
        if group.identity != chunk.identity or known not in (None, chunk.content_sha256):
            raise chunk_group_refusal(
                "chunk_group_conflict",
                f"chunk group {chunk.group_id} was first sent with another frame, chunk count or chunk {chunk.index}",
                chunk.group_id,
                received_chunk=chunk.index,
            )
        missing = sum(index not in group.content_sha256 for index in range(chunk.total)) - (known is None)
        if chunk.is_last and missing:
            raise chunk_group_refusal(
                "chunk_group_missing_chunks",
                "request chunk group is missing chunks",
                chunk.group_id,
                received_chunk=chunk.index,
                missing_chunks=missing,
            )
        if known is None:
            group.content_sha256[chunk.index] = chunk.content_sha256
            group.frames[chunk.index] = chunk.frame
            self._partial[chunk.group_id] = group
        group.touched = time.monotonic()
        return group

    def release(self, group: ChunkGroup) -> None:
        """Let go of the chunks of a group that runs; what they were is remembered."""
        group.frames.clear()
        self._partial.pop(group.group_id, None)

    def lose(self, which: str) -> None:
        """Forget `all` groups, those still `partial`, or the `completed` ones, which were sent whole."""
        for group_id, group in list(self._groups.items()):
            if which == "all" or (which == "partial") is (group.execution is None):
                self.forget(group_id)

    def forget(self, group_id: str) -> None:
        """The next chunk of this group has to be chunk 0 again."""
        self._groups.pop(group_id, None)
        self._partial.pop(group_id, None)


def _count(described: dict[str, object], name: str) -> int:
    value = described.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refusal(400, f"{name} must be a whole number of at least 0, got {value!r:.100}")
    return value
