"""Whatever bytes arrive, the answer is a value or a `WireError`, and it costs no more than the bytes are worth."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex_training import wire

FRAME = wire.dumps(
    {"args": (), "kwargs": {"ids": np.arange(6).reshape(2, 3), "mask": np.ones((2, 3), bool), "scale": np.array(1.5)}},
    {"response_options": {"format": "dssst1"}},
)
CHUNKS = wire.encode_byte_chunks(
    wire.dumps(np.arange(2000)), kind="request", operation="fwd-bwd", max_bytes=8192 + 5000, chunk_group_id="g"
)


def frame_of(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def frame_with(tree: Any, tensors: Any = None, body: bytes = b"", **metadata: Any) -> bytes:
    dss = tree if isinstance(tree, str) else json.dumps({"v": "DSSST1", "tree": tree})
    return frame_of({"__metadata__": {"dss": dss, **metadata}, **(tensors or {})}, body)


def u8(name: str, shape: Any, offsets: Any) -> Any:
    return {name: {"dtype": "U8", "shape": shape, "data_offsets": offsets}}


def outcome(function: Any, *arguments: Any, **options: Any) -> Any:
    """The result, or the WireError; any other exception is the failure these tests look for."""
    try:
        return function(*arguments, **options)
    except wire.WireError as error:
        return error


changes = st.lists(st.tuples(st.integers(0, len(FRAME) - 1), st.integers(0, 255)), min_size=1, max_size=6)


@settings(max_examples=500)
@given(changes, st.integers(0, len(FRAME)), st.sampled_from(["numpy", "torch"]))
def test_changed_and_cut_frames(changed, length, framework):
    frame = bytearray(FRAME)
    for position, byte in changed:
        frame[position] = byte
    for hostile in (bytes(frame), bytes(frame[:length]), bytes(frame) + bytes(length)):
        outcome(wire.loads, hostile, framework=framework)
        outcome(wire.read_metadata, hostile)
        outcome(wire.read_byte_chunk_metadata, hostile)


@settings(max_examples=300)
@given(st.integers(0, len(CHUNKS) - 1), st.integers(0, 600), st.integers(0, 255), st.permutations(range(len(CHUNKS))))
def test_changed_chunks(index, position, byte, order):
    changed = [bytearray(chunk) for chunk in CHUNKS]
    changed[index][position % len(changed[index])] = byte
    result = outcome(wire.decode_byte_chunks, [changed[i] for i in order])
    assert isinstance(result, wire.WireError) or result == wire.decode_byte_chunks(CHUNKS)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["t", "j", "d", "l", "u", "x", "", "scalar"]),
    lambda child: (
        st.lists(child, max_size=4) | st.dictionaries(st.sampled_from(["x", "scalar", "v"]), child, max_size=2)
    ),
    max_leaves=12,
)


@settings(max_examples=500)
@given(json_values)
def test_any_json_as_the_tree(tree):
    outcome(wire.loads, frame_with(tree, {"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)))


entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["I64", "U8", "BOOL", "F4", 7, None]),
        "shape": st.lists(st.integers(-2, 2**66) | st.floats() | st.booleans() | st.just("1"), max_size=4)
        | json_values,
        "data_offsets": st.lists(st.integers(-2, 2**66) | st.none(), max_size=3) | json_values,
    },
)


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(["x", "y", "__metadata__", "__dss_empty__"]), entries | json_values, max_size=3))
def test_any_tensor_table(table):
    outcome(wire.loads, frame_with(["l", [["t", "x"], ["t", "y"]]], table, bytes(16)))


@given(st.binary(max_size=64))
def test_any_bytes(data):
    assert isinstance(outcome(wire.loads, data), wire.WireError)
    outcome(wire.decode_byte_chunks, [data, data])


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (frame_of(b"[" * 200_000), "does not start with"),
        (frame_of(b'{"x":' + b"[" * 200_000), "nested too deeply|Expecting"),
        (frame_of(b'{"x":' * 200_000), "nested too deeply|Expecting"),
        (frame_of(b'{"a":1,"a":1}'), "'a' appears twice"),
        (frame_of(b'{"__metadata__":{"dss":"x","dss":"y"}}'), "'dss' appears twice"),
        (frame_of(b'{"x": NaN}'), "NaN"),
        (frame_of({"__metadata__": {"dss": 1}}), "must map text to text"),
        (frame_of({"__metadata__": []}), "must map text to text"),
        (frame_with('{"v": "DSSST1", "tree": ' + "[" * 100_000), "nests more than 384 levels"),
        (frame_with('{"v": "DSSST1", "tree": ["j", ' + "[" * 400 + "]" * 400 + "]}"), "nests more than 384 levels"),
        (frame_with('{"v": "DSSST1", "tree": ["j", ' + "9" * 10_000 + "]}"), "is not JSON"),
        (frame_with(["d", [["a", ["j", 1]], ["a", ["j", 2]]]]), "repeated entry"),
        (frame_with(["d", [[1, ["j", 1]]]]), "malformed or repeated"),
        (frame_with(["d", {"a": ["j", 1]}]), "malformed DSSST1 node"),
        (frame_with(["t"]), "malformed DSSST1 node"),
        (frame_with(["t", 3]), "malformed DSSST1 node"),
        (frame_with(["t", "__dss_empty__"], u8("__dss_empty__", [1], [0, 1]), b"a"), "does not hold"),
        (frame_with(["t", "x", {"scalar": True}], u8("x", [2], [0, 2]), b"ab"), "marked as a scalar"),
        (frame_with(["t", "x"], u8("x", [2**62, 2**62], [0, 2]), b"ab"), "does not fill"),
        (frame_with(["t", "x"], u8("x", [2**40] * 100_000, [0, 2]), b"ab"), "invalid shape"),
        (frame_with(["t", "x"], u8("x", [0, 2**62, 2**62], [0, 0])), "cannot hold a tensor"),
        (frame_with(["t", "x"], u8("x", [1] * 200, [0, 1]), b"a"), "invalid shape"),
        (frame_with(["t", "x"], {"x": u8("", [1], [0, 1])[""] | {"dtype": "BOOL"}}, b"\2"), "other than 0"),
        (frame_with(["t", "x"], u8("x", [True], [0, 1]), b"a"), "invalid shape"),
        (frame_with(["t", "x"], u8("x", [1], [1, 0]), b"a"), "does not fill|offset"),
        (frame_with(["t", "x"], u8("x", [1], [0, 1]) | u8("y", [1], [0, 1]), b"a"), "invalid offset"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_attacks(frame, message, framework):
    with pytest.raises(wire.WireError, match=message):
        wire.loads(frame, framework=framework)


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 300_000, '"a' * 300_000, "[" * 400 + '"\\' * 300_000, '"' + "\\" * 300_001]
)
def test_strings_without_an_end_are_read_once(text):
    """A scan that began again at each quote would need hours here."""
    text = "[" * 400 + text
    assert isinstance(outcome(wire.loads, frame_with(text)), wire.WireError)
    assert isinstance(outcome(wire.read_metadata, frame_with("{}", op=text)), wire.WireError)


def test_brackets_in_strings_are_no_nesting():
    value = {"text": "[" * 1000 + '\\"{' * 1000, "list": [[]] * 1000}
    assert wire.loads(wire.dumps(value)) == value


def test_a_caller_with_little_stack_left_gets_a_wire_error():
    value: Any = np.zeros(1)
    for _ in range(120):
        value = {"k": value}
    frame = wire.dumps(value)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        results = [outcome(wire.dumps, value), outcome(wire.loads, frame, framework="numpy")]
    finally:
        sys.setrecursionlimit(limit)
    assert [type(result) for result in results] == [wire.WireError, wire.WireError]
    wire.loads(frame)


@pytest.mark.parametrize("frame", ["text", None, 5, [1], np.zeros(3, np.uint8)])
def test_other_types_are_refused(frame):
    for function in (wire.loads, wire.read_metadata):
        with pytest.raises(wire.WireError, match=rf"wire\.{function.__name__} expects bytes"):
            function(frame)


def test_unknown_frameworks_are_refused():
    with pytest.raises(wire.WireError, match="framework must be"):
        wire.loads(FRAME, framework="jax")
