"""What goes into a frame comes out of it, bit for bit, and a frame is what the safetensors library would write."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from collections import namedtuple
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex_training import wire

ITEM_BYTES = {
    "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

# Any text a str can hold, lone surrogates too.
texts = st.text(st.characters(), max_size=8)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.integers(min_value=2**70, max_value=2**90)
)


@st.composite
def raw_tensors(draw: Any) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype, shape, bytes) with any bit pattern: every NaN, -0.0, infinities; 0-d and 0-size included."""
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = prod(shape) * ITEM_BYTES[dtype]
    byte = st.integers(0, 1) if dtype == "BOOL" else st.integers(0, 255)
    return dtype, shape, bytes(draw(st.lists(byte, min_size=size, max_size=size)))


@st.composite
def frames_in_words(draw: Any, tensors: st.SearchStrategy[Any]) -> Any:
    """A value that comes back exactly: containers with a tensor below anything else, JSON without tuples elsewhere."""
    plain = st.recursive(scalars, lambda child: st.lists(child, max_size=3) | st.dictionaries(texts, child, max_size=3))
    tree = st.recursive(
        tensors | plain,
        lambda child: (
            st.lists(child, max_size=4)
            | st.lists(child, max_size=3).map(tuple)
            | st.dictionaries(texts, child, max_size=4)
        ),
        max_leaves=12,
    )
    return draw(tree)


def as_decoded(value: Any) -> Any:
    """`value` with the one loss that the format has: a tuple below a tensor-free dict or list is a list."""
    return without_tuples(value) if isinstance(value, dict | list) and not holds_tensor(value) else rebuilt(value)


def rebuilt(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_decoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_decoded(item) for item in value)
    return value


def without_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_tuples(item) for key, item in value.items()}
    return [without_tuples(item) for item in value] if isinstance(value, list | tuple) else value


def holds_tensor(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(holds_tensor(item) for item in (value.values() if isinstance(value, dict) else value))
    return hasattr(value, "dtype")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_any_value_comes_back(make_tensor, same, framework):
    pytest.importorskip(framework)

    @given(frames_in_words(raw_tensors().map(lambda parts: make_tensor(framework, *parts))))
    def check(value: Any) -> None:
        frame = wire.dumps(value)
        assert wire.dumps(value) == frame
        decoded = wire.loads(frame, framework=framework)
        assert same(decoded, as_decoded(value))
        assert wire.dumps(decoded) == frame
        assert wire.loads(bytearray(frame), framework=framework) is not None or decoded is None

    check()


def test_numpy_and_torch_write_the_same_bytes(make_tensor):
    pytest.importorskip("torch")

    @given(st.lists(raw_tensors(), max_size=4))
    def check(parts: Any) -> None:
        both = [wire.dumps([make_tensor(framework, *p) for p in parts]) for framework in ("numpy", "torch")]
        assert both[0] == both[1]

    check()


def test_the_container_is_what_the_safetensors_library_writes(make_tensor):
    pytest.importorskip("torch")
    from safetensors.torch import save

    @given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), raw_tensors(), min_size=1, max_size=6))
    def check(parts: Any) -> None:
        value = {f"n{name}": as_array(*part) for name, part in parts.items()}  # no empty and no reserved name
        frame = wire.dumps(value)
        size = int.from_bytes(frame[:8], "little")
        dss = json.loads(frame[8 : 8 + size])["__metadata__"]["dss"]
        stored = {f"n{name}": make_tensor("torch", *part).reshape(part[1] or (1,)) for name, part in parts.items()}
        assert save(stored, {"dss": dss}) == frame

    check()


def as_array(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    if dtype.startswith("F8") or dtype == "BF16":
        return wire.RawTensor(dtype, shape, data)
    return np.frombuffer(data, numpy_name(dtype)).reshape(shape)


def numpy_name(dtype: str) -> str:
    kinds = {"U": "uint", "I": "int", "F": "float", "C": "complex", "B": "bool"}
    return "bool" if dtype == "BOOL" else dtype.lower() if dtype.startswith("F8") else f"{kinds[dtype[0]]}{dtype[1:]}"


@given(frames_in_words(raw_tensors().map(lambda parts: as_array(*parts))), st.dictionaries(texts, scalars, max_size=3))
def test_metadata_travels_beside_the_value(value, metadata):
    frame = wire.dumps(value, metadata)
    assert json.dumps(wire.read_metadata(frame)) == json.dumps(metadata)
    assert json.dumps(wire.read_metadata(frame[: 8 + int.from_bytes(frame[:8], "little")])) == json.dumps(metadata)


def test_empty_metadata_is_absent():
    assert wire.dumps({"x": 1}, {}) == wire.dumps({"x": 1}, None) == wire.dumps({"x": 1})
    assert wire.read_metadata(wire.dumps({"x": 1})) == {}


def test_keys_that_read_alike_get_names_of_their_own(same):
    one, two, three = (np.array([n]) for n in range(3))
    for value in (
        {"a": {"b": one}, "a.b": two, "a.b#2": three},
        {"a": [one], "a.0": two},
        {"": {"x": one}, "x": two},
        {"": one, "__root__": two},
        {"__metadata__": one, "__dss_empty__": two},
        {"\ud800": one, "\\ud800": two},
        {"a": {"b": one}, "a.b": two, "": {"a": {"b": three}}},
    ):
        assert same(wire.loads(wire.dumps(value), framework="numpy"), value)


def test_arrays_that_are_not_row_major():
    base = np.arange(24).reshape(2, 3, 4)
    for array in (
        base.T,
        base[:, ::2],
        base[::-1],
        np.asfortranarray(base),
        base[:, :, 1],
        np.broadcast_to(base, (2, 2, 3, 4)),
    ):
        decoded = wire.loads(wire.dumps(array), framework="numpy")
        assert decoded.shape == array.shape
        assert (decoded == array).all()


def test_views_of_one_memory_are_each_written_in_full():
    base = np.arange(10)
    decoded = wire.loads(wire.dumps([base, base, base[2:8], base[4:]]), framework="numpy")
    assert [array.tolist() for array in decoded] == [[*range(10)], [*range(10)], [*range(2, 8)], [*range(4, 10)]]


def test_big_endian_arrays():
    array = np.array([1, -2, 300], ">i4")
    assert wire.dumps(array) == wire.dumps(array.astype("<i4"))


def test_numpy_scalars_keep_their_value():
    value = {
        "a": np.int64(-5),
        "b": np.float32(0.1),
        "c": np.bool_(True),
        "d": [np.float16(1.5), np.str_("s")],
        "e": np.float64(2),
    }
    decoded = wire.loads(wire.dumps({**value, "t": np.zeros(1)}), framework="numpy")
    decoded.pop("t")
    assert decoded == {"a": -5, "b": float(np.float32(0.1)), "c": True, "d": [1.5, "s"], "e": 2.0}
    assert decoded == wire.loads(wire.dumps(value))


def test_what_python_calls_json_keeps_its_meaning():
    class Level(enum.IntEnum):
        HIGH = 3

    class Colour(enum.StrEnum):
        RED = "red"

    assert wire.loads(wire.dumps({"a": Level.HIGH, "b": Colour.RED})) == {"a": 3, "b": "red"}
    assert wire.loads(wire.dumps(namedtuple("Point", "x y")(1, 2))) == (1, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [b"bytes"]}, r"a\.0: a builtins\.bytes cannot be sent"),
        ({"a": {1, 2}}, "a: a builtins.set cannot be sent"),
        (object(), "the value: a builtins.object"),
        ({"a": {"b": np.zeros(1, np.complex128)}}, r"a\.b: dtype complex128 cannot be sent, convert it to complex64"),
        ({"a": np.zeros(1, "M8[s]")}, "a: dtype datetime64"),
        ({"a": np.array(["x"])}, "a: dtype <U1"),
        ({"a": np.array([None])}, "a: dtype object"),
        ({"a": np.zeros(1, [("x", "i4")])}, "a: dtype void64|a: dtype void32|a: dtype \\["),
        ({"a": np.ma.masked_array([1, 2], [0, 1])}, "a: a masked array would lose its mask"),
        ({"a": np.complex64(1)}, "a: a numpy scalar of dtype complex64"),
        ({"a": np.datetime64("2020-01-01")}, "a: a numpy scalar of dtype datetime64"),
        ({"a": {1: np.zeros(1)}}, "keys must be strings, got <class 'int'> in a"),
        ({None: np.zeros(1)}, "keys must be strings, got <class 'NoneType'> in the value"),
        ({"a": {(1, 2): 3}}, "a: a dict key must be a string, got <class 'tuple'>"),
        ({1: "x", "1": "y"}, "the keys 1 and '1' are the same text"),
        ({True: "x", "true": "y"}, "the keys True and 'true' are the same text"),
    ],
)
def test_what_a_frame_cannot_carry_is_refused_with_its_place(value, message):
    with pytest.raises(wire.WireError, match=message):
        wire.dumps(value)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is float64 on this platform")
@pytest.mark.parametrize("value", [np.zeros(1, np.longdouble), np.longdouble(1)])
def test_long_doubles_are_refused(value):
    with pytest.raises(wire.WireError, match=r"^a: (dtype|a numpy scalar of dtype) \w+"):
        wire.dumps({"a": value})


@pytest.mark.parametrize("metadata", [{"x": np.zeros(1)}, {"x": b"y"}, {"x": {1, 2}}, {(1,): 2}])
def test_metadata_that_is_not_json_is_refused(metadata):
    with pytest.raises(wire.WireError, match="metadata"):
        wire.dumps({}, metadata)


def test_a_value_that_contains_itself_is_refused():
    loop: dict[str, Any] = {"x": np.zeros(1)}
    loop["again"] = [loop]
    with pytest.raises(wire.WireError, match="contains itself"):
        wire.dumps(loop)
    shared = [1, [2]]
    assert wire.loads(wire.dumps([shared, shared])) == [shared, shared]


def nested(kind: type, levels: int, leaf: Any) -> Any:
    value = leaf
    for _ in range(levels):
        value = {"k": value} if kind is dict else kind([value])
    return value


def deepest(kind: type, leaf: Any) -> int:
    """How many levels of `kind` a frame accepts; one more is refused, and so are a hundred thousand."""
    for levels in range(1, 1000):
        try:
            wire.dumps(nested(kind, levels, leaf))
        except wire.WireError:
            return levels - 1
    raise AssertionError("no limit")


@pytest.mark.parametrize("kind", [dict, list, tuple])
@pytest.mark.parametrize("leaf", [1, np.arange(3)], ids=["json", "tensor"])
def test_every_depth_either_comes_back_or_is_refused(kind, leaf):
    levels = deepest(kind, leaf)
    assert levels >= 100
    value = wire.loads(wire.dumps(nested(kind, levels, leaf)), framework="numpy")
    for _ in range(levels):
        value = value["k"] if isinstance(value, dict) else value[0]
    assert np.array_equal(value, leaf)
    for too_many in (levels + 1, 100_000):
        with pytest.raises(wire.WireError, match="nests too deeply"):
            wire.dumps(nested(kind, too_many, leaf))


def test_an_integer_that_python_refuses_to_read_is_refused():
    with pytest.raises(wire.WireError, match="cannot be written as JSON"):
        wire.dumps({"a": 10**5000})


def test_json_too_long_for_a_header_is_refused_when_written():
    with pytest.raises(wire.WireError, match="pass long lists of numbers"):
        wire.dumps({"prompts": ["x" * (wire.MAX_HEADER_BYTES - 100)]})
    frame = wire.dumps({"prompts": ["x" * (wire.MAX_HEADER_BYTES - 200)]})
    assert len(wire.loads(frame)["prompts"][0]) == wire.MAX_HEADER_BYTES - 200


def test_raw_tensors_say_what_they_hold():
    torch = pytest.importorskip("torch")
    bits = np.arange(256, dtype=np.uint8)
    for dtype in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        name = "float8_e4m3fn" if dtype == "F8_E4M3" else dtype.lower().replace("f8", "float8")
        expected = torch.from_numpy(bits).view(getattr(torch, name)).to(torch.float32).numpy()
        assert np.array_equal(np.asarray(wire.RawTensor(dtype, (256,), bits.tobytes())), expected, equal_nan=True)
    halves = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
    raw = wire.RawTensor("BF16", (256, 256), halves.tobytes())
    assert np.array_equal(np.asarray(raw).reshape(-1), expected, equal_nan=True)
    assert np.asarray(raw, np.float64).dtype == np.float64
    assert (raw.view("<u2") == halves.reshape(256, 256)).all()
    assert "65536" not in repr(raw)
    with pytest.raises(wire.WireError, match="whose items have 4 bytes"):
        raw.view(np.float32)
    with pytest.raises(wire.WireError, match="needs 4 bytes of data, got 3"):
        wire.RawTensor("BF16", (2,), b"abc")
    with pytest.raises(wire.WireError, match="use a numpy array"):
        wire.RawTensor("F32", (1,), b"abcd")


def test_json_frames_need_neither_numpy_nor_torch_and_arrays_no_torch():
    program = """if True:
        import sys
        from cortex_training import wire
        frame = wire.dumps({"a": [1, "x", None]}, {"op": 1})
        assert wire.loads(frame) == {"a": [1, "x", None]} and wire.read_metadata(frame) == {"op": 1}
        chunks = wire.encode_byte_chunks(frame, kind="request", force_chunk=True)
        assert wire.read_byte_chunk_metadata(chunks[0])["total_chunks"] == 1
        assert "numpy" not in sys.modules and "torch" not in sys.modules
        import numpy
        decoded = wire.loads(wire.dumps({"x": numpy.ones(3)}))
        assert decoded["x"].tolist() == [1, 1, 1] and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
