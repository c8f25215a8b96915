"""Cutting frames into chunks: what is hashed, copied and held in memory, and the limits."""

from __future__ import annotations

import hashlib
import mmap
import tracemalloc
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex_training import _chunks, wire

MIB = 1024 * 1024


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    st.integers(8193, 30_000),
    st.sampled_from(["request", "result"]),
    st.randoms(use_true_random=False),
)
def test_chunks_of_any_frame_keep_the_limit_and_come_back(sizes, max_bytes, kind, random):
    buffers = wire.frame_buffers({str(n): np.full(size, n, np.uint8) for n, size in enumerate(sizes)})
    frame = b"".join(buffers)
    options = {"kind": kind, "operation": "fwd-bwd", "max_bytes": max_bytes, "chunk_group_id": "g"}
    chunks = wire.encode_byte_chunks(frame, **options)
    assert list(wire.iter_byte_chunks(buffers, **options)) == chunks
    assert max(map(len, chunks)) <= max_bytes
    assert len(chunks) == (1 if len(frame) <= max_bytes else -(-len(frame) // (max_bytes - wire.CHUNK_OVERHEAD_BYTES)))
    random.shuffle(chunks)
    assert wire.decode_byte_chunks(chunks) == frame


def test_request_chunks_share_one_random_group_and_result_chunks_have_none():
    frame = wire.dumps(np.zeros(20_000))
    groups = [
        {wire.read_byte_chunk_metadata(chunk)["chunk_group_id"] for chunk in chunks}
        for chunks in (wire.encode_byte_chunks(frame, kind="request", max_bytes=50_000) for _ in range(2))
    ]
    assert [len(group) for group in groups] == [1, 1]
    assert groups[0] != groups[1]
    assert uuid.UUID(groups[0].pop()).version == 4
    results = wire.encode_byte_chunks(frame, kind="result", max_bytes=50_000, chunk_group_id="ignored")
    assert all("chunk_group_id" not in wire.read_byte_chunk_metadata(chunk) for chunk in results)


def test_a_frame_that_fits_is_returned_as_it_is():
    frame = wire.dumps({"x": 1})
    for options in ({}, {"max_bytes": -1}, {"max_bytes": len(frame)}, {"kind": "not checked"}):
        assert wire.encode_byte_chunks(frame, **({"kind": "request"} | options))[0] is frame
    assert wire.encode_byte_chunks(bytearray(frame), kind="request") == [frame]
    assert wire.read_byte_chunk_metadata(frame) is None
    assert wire.decode_byte_chunks([frame], kind="result") is frame


def test_forced_without_a_limit_is_one_chunk():
    frame = wire.dumps(np.arange(1000))
    (chunk,) = wire.encode_byte_chunks(frame, kind="request", operation="generate", force_chunk=True)
    assert wire.read_byte_chunk_metadata(chunk)["total_chunks"] == 1
    assert wire.decode_byte_chunks([chunk], kind="request") == frame


def test_a_header_that_outgrows_its_reserve_halves_the_payload():
    frame = wire.dumps(np.zeros(4000))
    chunks = wire.encode_byte_chunks(frame, kind="request", operation="x" * 9000, max_bytes=20_000, chunk_group_id="g")
    assert max(map(len, chunks)) <= 20_000
    assert len(chunks) == -(-len(frame) // ((20_000 - 8192) // 2))
    assert wire.decode_byte_chunks(chunks) == frame
    with pytest.raises(wire.WireError, match="too small to hold one DSSST1 byte chunk frame"):
        wire.encode_byte_chunks(frame, kind="request", operation="x" * 30_000, max_bytes=20_000)


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (b"", {"force_chunk": True}, "cannot chunk an empty frame"),
        (b"abc", {"kind": "foo", "force_chunk": True}, "unknown byte chunk kind 'foo'"),
        (b"abc", {"force_chunk": True, "max_bytes": 8192}, "max_bytes must exceed 8192 bytes, got 8192"),
        (b"abc", {"max_bytes": 1}, "max_bytes must exceed 8192"),
        (b"abc", {"max_bytes": 1.5}, "max_bytes must be a whole number of bytes"),
        (b"abc", {"force_chunk": True, "chunk_group_id": 7}, "chunk_group_id must be text"),
        (b"abc", {"force_chunk": True, "operation": b"x"}, "operation must be text"),
        ("abc", {}, "expects bytes, got str"),
        (["abc"], {}, "expects bytes, got str"),
        (None, {}, "expects bytes, got NoneType"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_chunk(frame, options, message):
    with pytest.raises(wire.WireError, match=message):
        wire.iter_byte_chunks(frame, **({"kind": "request"} | options))


def test_numbers_that_went_through_text_or_floating_point_are_read():
    frame = wire.dumps(np.zeros(3000))
    rewritten = []
    for chunk in wire.encode_byte_chunks(frame, kind="request", max_bytes=20_000, chunk_group_id="g"):
        described = wire.read_byte_chunk_metadata(chunk)
        described.pop("kind")
        described |= {"chunk_idx": str(described["chunk_idx"]), "total_chunks": float(described["total_chunks"])}
        rewritten.append(wire.dumps(wire.loads(chunk, framework="numpy"), {"request_chunk": described}))
    assert wire.decode_byte_chunks(rewritten) == frame


@pytest.mark.parametrize("index", [True, None, "-1", "1e0", "", "9" * 5000, 0.5, float("nan"), [0], "٣"])
def test_other_numbers_are_refused(index):
    chunk = wire.dumps({"payload": np.zeros(1, np.uint8)}, {"request_chunk": {"chunk_idx": index, "total_chunks": 1}})
    with pytest.raises(wire.WireError, match="chunk_idx must be a whole number"):
        wire.decode_byte_chunks([chunk])


def test_a_descriptor_that_is_no_object_is_refused():
    with pytest.raises(wire.WireError, match="result_chunk descriptor must be an object"):
        wire.read_byte_chunk_metadata(wire.dumps({}, {"result_chunk": [1]}))


def test_results_round_trip_through_chunks():
    value = {"results": [{"logprobs": np.arange(9000, dtype=np.float32)}], "metrics": {"loss": 0.5}}
    for max_bytes in (0, 20_000):
        chunks = wire.encode_result_chunks(value, max_bytes)
        decoded = wire.decode_result_chunks(chunks, framework="numpy")
        assert decoded["metrics"] == value["metrics"]
        assert np.array_equal(decoded["results"][0]["logprobs"], value["results"][0]["logprobs"])
    with pytest.raises(wire.WireError, match="expected result chunks, got request chunks"):
        wire.decode_result_chunks(wire.encode_byte_chunks(wire.dumps({}), kind="request", force_chunk=True))


def test_a_frame_is_hashed_once(monkeypatch):
    hashed = []

    class Counting:
        def __init__(self, data=b""):
            self.digest = hashlib.sha256()
            self.update(data)

        def update(self, data):
            hashed.append(len(data))
            self.digest.update(data)

        def hexdigest(self):
            return self.digest.hexdigest()

    class Library:
        sha256 = Counting

    monkeypatch.setattr(_chunks, "hashlib", Library)
    buffers = wire.frame_buffers({"a": np.zeros(50_000), "b": np.zeros(50_000, np.int32)})
    chunks = wire.encode_byte_chunks(buffers, kind="request", max_bytes=50_000)
    assert len(chunks) > 10
    assert sum(hashed) == sum(map(len, buffers))
    hashed.clear()
    wire.decode_byte_chunks(chunks)
    assert sum(hashed) == sum(map(len, buffers))


def test_tensors_are_neither_copied_into_buffers_nor_out_of_frames():
    array = np.arange(1000)
    assert any(np.shares_memory(np.frombuffer(buffer, np.uint8), array) for buffer in wire.frame_buffers({"x": array}))
    frame = wire.dumps({"x": array, "h": wire.RawTensor("BF16", (2,), b"abcd")})
    for held in (frame, bytearray(frame), memoryview(frame)):
        decoded = wire.loads(held, framework="numpy")
        assert np.shares_memory(decoded["x"], np.frombuffer(held, np.uint8))
        assert np.shares_memory(decoded["h"].view("<u2"), np.frombuffer(held, np.uint8))
        with pytest.raises(ValueError, match="read-only"):
            decoded["x"][0] = 1


def test_memory_is_one_chunk_when_encoding_and_the_frame_when_decoding():
    value = {"x": np.zeros(32 * MIB, np.uint8), "y": np.zeros(4 * MIB, np.int64)}
    payload = 64 * MIB
    tracemalloc.start()
    try:
        frame_bytes = bytearray()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for chunk in wire.iter_byte_chunks(wire.frame_buffers(value), kind="request", max_bytes=6 * MIB):
            frame_bytes += chunk[:8]
            del chunk
        assert tracemalloc.get_traced_memory()[1] - before < 0.2 * payload
        frame = wire.dumps(value)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        decoded = wire.loads(frame, framework="numpy")
        assert tracemalloc.get_traced_memory()[1] - before < 0.01 * payload
        assert decoded["y"].nbytes == 32 * MIB
    finally:
        tracemalloc.stop()


def test_a_mapped_file_is_read_in_place(tmp_path):
    path = tmp_path / "frame"
    path.write_bytes(wire.dumps({"x": np.arange(1000)}))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    decoded = wire.loads(mapped, framework="numpy")
    assert np.shares_memory(decoded["x"], np.frombuffer(mapped, np.uint8))
    assert decoded["x"].tolist() == list(range(1000))
    assert wire.read_metadata(mapped) == {}
    del decoded
    mapped.close()


def test_frames_at_odd_addresses_are_copied_to_aligned_memory():
    frame = wire.dumps({"x": np.arange(100), "z": np.zeros(0)})
    shifted = memoryview(b"\0" * 3 + frame)[3:]
    decoded = wire.loads(shifted, framework="numpy")
    assert decoded["x"].flags.aligned
    assert not decoded["x"].flags.writeable
    assert decoded["x"].tolist() == list(range(100))


def test_views_with_gaps_and_of_wider_items_are_read():
    frame = wire.dumps({"x": np.arange(4)})
    assert wire.loads(memoryview(bytes(byte for byte in frame for _ in range(2)))[::2])["x"].tolist() == [0, 1, 2, 3]
    assert wire.loads(memoryview(np.frombuffer(frame, np.int64)))["x"].tolist() == [0, 1, 2, 3]
    assert wire.frame_sha256(memoryview(np.frombuffer(frame, np.int64))) == hashlib.sha256(frame).hexdigest()
