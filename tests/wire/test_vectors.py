"""Every frame, chunk and malformed frame recorded from the public client, and what must become of it here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortex_training import wire

MANIFEST = json.loads((Path(__file__).with_name("vectors") / "manifest.json").read_text())
FRAMES = [frame for frame in MANIFEST["frames"] if "value" in frame]
ALONE = [case for case in MANIFEST["malformed"] if "file" in case]
CHUNKED = [case for case in MANIFEST["malformed"] if "files" in case]


def named(cases: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["name"])


@named([frame for frame in FRAMES if frame["name"] != "collision_dot"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_encodes_to_the_recorded_bytes(vectors, sorted_metadata, case, framework):
    pytest.importorskip(framework)
    ours = wire.dumps(vectors.build(case["value"], framework), case["metadata"])
    recorded = vectors.read(case["file"])
    assert (ours if case["byte_deterministic"] else sorted_metadata(ours)) == (
        recorded if case["byte_deterministic"] else sorted_metadata(recorded)
    )


@named(MANIFEST["frames"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_decodes_the_recorded_bytes(vectors, same, case, framework):
    pytest.importorskip(framework)
    recorded = vectors.read(case["file"])
    assert same(wire.loads(recorded, framework=framework), vectors.build(case["decoded"], framework))
    assert wire.read_metadata(recorded) == case["read_metadata"]


def test_keys_that_read_alike_as_tensor_names_keep_both_tensors(vectors, same):
    case = next(frame for frame in FRAMES if frame["name"] == "collision_dot")
    value = vectors.build(case["value"])
    assert same(wire.loads(wire.dumps(value), framework="numpy"), value)


@named([case for case in MANIFEST["chunk_sets"] if "frame" in case])
def test_chunks_are_the_recorded_ones(vectors, sorted_metadata, case):
    frame = vectors.read(case["frame"]["file"])
    recorded = [vectors.read(chunk["file"]) for chunk in case["chunks"]]
    ours = wire.encode_byte_chunks(frame, **case["encode_args"])
    assert [sorted_metadata(chunk) if chunk != frame else chunk for chunk in ours] == [
        sorted_metadata(chunk) if chunk != frame else chunk for chunk in recorded
    ]
    assert wire.decode_byte_chunks(recorded) == frame
    assert wire.decode_byte_chunks(reversed(recorded)) == frame
    for chunk, described in zip(recorded, case["chunks"], strict=True):
        assert wire.read_byte_chunk_metadata(chunk) == described["descriptor"]


@named([case for case in MANIFEST["chunk_sets"] if "frame" not in case])
def test_a_limit_below_the_header_reserve_is_refused(case):
    frame = wire.dumps({"x": np.zeros(case["frame_size"], np.uint8)})
    with pytest.raises(wire.WireError, match="max_bytes must exceed 8192 bytes"):
        wire.encode_byte_chunks(frame, **case["encode_args"])


@named(ALONE)
def test_malformed_frames(vectors, case):
    frame = vectors.read(case["file"])
    for function in (wire.loads, wire.read_metadata, wire.read_byte_chunk_metadata):
        recorded = case.get(function.__name__)
        if recorded is None:
            continue
        if "exception" in recorded:
            with pytest.raises(wire.WireError) as caught:
                function(frame)
            if "refusing" in recorded["message_gist"]:
                assert str(caught.value) == recorded["message_gist"]
        elif function is wire.loads:
            function(frame)
        else:
            assert str(function(frame)) == recorded["result"]


def malformed_chunks(vectors: Any) -> dict[str, list[bytes]]:
    """The sets of chunks that the recording describes by name, made from recorded good ones."""
    frame = vectors.read("req_small_max.frame.bin")
    good = [vectors.read(f"req_small_max.chunk{index}.bin") for index in range(5)]
    result = wire.encode_byte_chunks(wire.dumps({"x": np.zeros(24304 - 168, np.uint8)}), kind="result", max_bytes=12288)

    def described(index: int, *, payload: Any = None, value: Any = None, **changes: Any) -> bytes:
        descriptor = wire.read_byte_chunk_metadata(good[index])
        kind = changes.pop("kind", descriptor.pop("kind"))
        descriptor.pop("kind", None)
        descriptor.update(changes)
        descriptor = {key: item for key, item in descriptor.items() if item is not None}
        if value is None:
            value = {"payload": wire.loads(good[index], framework="numpy")["payload"] if payload is None else payload}
        return wire.dumps(value, {f"{kind}_chunk": descriptor})

    return {
        "none": [],
        "missing_last": good[:-1],
        "missing_first": good[1:],
        "duplicate_same_count": [good[0], good[0], *good[2:]],
        "reversed_order": good[::-1],
        "wrong_kind": result,
        "kind_none_ok": good,
        "plain_frame_single": [frame],
        "plain_in_multi": [good[0], frame],
        "mixed_group": [*good[:4], described(4, chunk_group_id="another")],
        "mixed_operation": [*good[:4], described(4, operation="generate")],
        "mixed_kind": [*good[:4], described(4, kind="result")],
        "hash_differs": [*good[:4], described(4, frame_sha256="0" * 64)],
        "size_wrong": [described(index, frame_size_bytes=1) for index in range(5)],
        "total_differs": [*good[:4], described(4, total_chunks=6)],
        "idx_out_of_range": [*good[:4], described(4, chunk_idx=5)],
        "idx_string": [described(index, chunk_idx=str(index)) for index in range(5)],
        "idx_missing": [*good[:4], described(4, chunk_idx=None)],
        "total_missing": [*good[:4], described(4, total_chunks=None)],
        "size_missing": [*good[:4], described(4, frame_size_bytes=None)],
        "payload_2d": [*good[:4], described(4, payload=np.zeros((4, 4), np.uint8))],
        "payload_not_tensor": [*good[:4], described(4, payload="text")],
        "payload_missing": [*good[:4], described(4, value={"other": 1})],
        "payload_root_not_dict": [*good[:4], described(4, value=[1])],
        "truncated_chunk": [*good[:4], good[4][:-1]],
    }


@named(CHUNKED)
def test_malformed_chunk_sets(vectors, case):
    chunks = malformed_chunks(vectors)[case["name"]]
    outcome = case["outcome"]
    if "exception" not in outcome:
        assert len(wire.decode_byte_chunks(chunks, kind=case["kind_arg"])) > 0
        return
    with pytest.raises(wire.WireError) as caught:
        wire.decode_byte_chunks(chunks, kind=case["kind_arg"])
    if outcome["is_WireError"] and "Error while deserializing" not in outcome["message_gist"]:
        assert str(caught.value).startswith(outcome["message_gist"])


def test_a_changed_payload_byte_is_found(vectors):
    chunks = [bytearray(vectors.read(f"req_small_max.chunk{index}.bin")) for index in range(5)]
    chunks[2][-1] ^= 1
    with pytest.raises(wire.WireError, match="sha256 mismatch"):
        wire.decode_byte_chunks(chunks)
