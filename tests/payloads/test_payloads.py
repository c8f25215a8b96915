"""Readable JSON to frames."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex_training import (
    build_forward_backward_kwargs,
    build_forward_backward_payload,
    serialize_forward_backward_args,
    wire,
)
from cortex_training.errors import ConfigurationError
from cortex_training.payloads import tensor_from_json

VECTORS = Path(__file__).parents[1] / "wire" / "vectors"
FRAMES = json.loads((VECTORS / "manifest.json").read_text())["frames"]
RECORDED = [frame for frame in FRAMES if frame.get("kind") == "build_forward_backward_payload"]
IDS = [[1, 2, 3, 4]]
MASK = [[1, 1, 1, 0]]


def built(**spec: Any) -> dict[str, Any]:
    frame = build_forward_backward_payload(spec)
    assert wire.read_metadata(frame) == {"response_options": {"format": "dssst1", "delivery": "chunked"}}
    return wire.loads(frame, framework="numpy")


def kwargs(**spec: Any) -> dict[str, Any]:
    """The arguments as lists; the dtype is checked to be int64."""
    value = built(**spec)["kwargs"]
    assert {array.dtype for array in value.values()} == {np.dtype(np.int64)}
    return {name: array.tolist() for name, array in value.items()}


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_builds_the_recorded_frames(case):
    ours = build_forward_backward_payload(case["spec"])
    recorded = (VECTORS / case["file"]).read_bytes()

    def parts(frame: bytes) -> Any:
        size = int.from_bytes(frame[:8], "little")
        header = json.loads(frame[8 : 8 + size])  # the recorded order of dss and op is random
        return header, list(header)[1:], frame[8 + size :]

    assert parts(ours) == parts(recorded)
    assert len(RECORDED) == 3


def test_arguments_are_serialised_with_what_the_loss_needs():
    ids = np.array(IDS)
    frame = serialize_forward_backward_args(
        kwargs={"input_ids": ids}, context={"loss_mask": ids * 1.0}, processing={"loss_fn": "causal_cross_entropy"}
    )
    value = wire.loads(frame, framework="numpy")
    assert list(value) == ["args", "kwargs", "context", "processing"]
    assert value["args"] == ()
    assert value["context"]["loss_mask"].tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert list(wire.loads(serialize_forward_backward_args((1,), {"x": ids}))) == ["args", "kwargs"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"args": "ab"}, "args"),
        ({"args": 5}, "args"),
        ({"kwargs": [1]}, "kwargs"),
        ({"context": "x"}, "context"),
        ({"processing": 3}, "processing"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments, field):
    with pytest.raises(ConfigurationError, match=f"^{field} = "):
        serialize_forward_backward_args(**arguments)


def test_context_and_processing_are_kept_and_data_in_context_becomes_tensors():
    value = built(
        input_ids=IDS,
        labels="none",
        args=[1, "a"],
        context={"loss_mask": {"data": [[1, 0.5, 0, 0]], "dtype": "float32"}, "rr_sample_ids": ["a", "b"]},
        processing={"loss_fn": "grpo", "config": {"eps_clip": 0.2}},
    )
    assert value["args"] == (1, "a")
    assert value["context"]["loss_mask"].dtype == np.float32
    assert value["context"]["rr_sample_ids"] == ["a", "b"]
    assert value["processing"] == {"loss_fn": "grpo", "config": {"eps_clip": 0.2}}


@pytest.mark.parametrize(
    ("spec", "labels"),
    [
        ({}, [[2, 3, 4, -100]]),
        ({"labels": "next_token", "attention_mask": MASK}, [[2, 3, -100, -100]]),
        ({"labels": "shifted_input_ids", "attention_mask": MASK, "mask_padding": False}, [[2, 3, 4, -100]]),
        ({"labels": "input_ids", "attention_mask": MASK}, [[1, 2, 3, -100]]),
        ({"label_strategy": "self", "attention_mask": MASK, "ignore_index": -1}, [[1, 2, 3, -1]]),
        ({"labels": {"strategy": "self", "mask_padding": False}, "attention_mask": MASK}, [[1, 2, 3, 4]]),
        ({"labels": {"ignore_index": -7}, "ignore_index": -8}, [[2, 3, 4, -7]]),
        ({"labels": {"mask_padding": False}, "label_strategy": "self", "attention_mask": MASK}, [[1, 2, 3, 4]]),
        ({"labels": [[9, 8, 7, 6]]}, [[9, 8, 7, 6]]),
        ({"labels": {"data": [[9, 8, 7, 6]], "dtype": "int64"}}, [[9, 8, 7, 6]]),
        ({"labels": np.array([[9, 8, 7, 6]])}, [[9, 8, 7, 6]]),
        ({"labels": "none"}, None),
        ({"labels": None}, None),
        ({"label_strategy": "none"}, None),
    ],
)
def test_labels(spec, labels):
    assert kwargs(input_ids=IDS, **spec) == {"input_ids": IDS} | ({} if labels is None else {"labels": labels})


@pytest.mark.parametrize(
    ("spec", "mask"),
    [
        ({"attention_mask": MASK}, None),
        ({"attention_mask": MASK, "include_attention_mask": True}, MASK),
        ({"attention_mask": True}, [[1, 1, 1, 1]]),
        ({"include_attention_mask": True}, [[1, 1, 1, 1]]),
        ({"attention_mask": False, "include_attention_mask": True}, None),
    ],
)
def test_the_attention_mask_is_sent_when_asked_for(spec, mask):
    assert kwargs(input_ids=IDS, labels="none", **spec).get("attention_mask") == mask


@pytest.mark.parametrize(
    ("spec", "positions"),
    [
        ({}, None),
        ({"position_ids": False}, None),
        ({"position_ids": True}, [[0, 1, 2, 3]]),
        ({"position_ids": "arange"}, [[0, 1, 2, 3]]),
        ({"include_position_ids": True}, [[0, 1, 2, 3]]),
        ({"position_ids": [[5, 6, 0, 1]]}, [[5, 6, 0, 1]]),
    ],
)
def test_position_ids(spec, positions):
    assert kwargs(input_ids=IDS, labels="none", **spec).get("position_ids") == positions


def test_a_payload_may_be_nested_beside_what_the_command_line_reads():
    assert built(payload={"input_ids": IDS, "args": [1]}, poll=False)["args"] == (1,)
    assert "poll" not in built(input_ids=IDS, poll=True)["kwargs"]


def test_the_dtype_of_the_ids_is_the_dtype_of_the_labels():
    value = built(input_ids={"data": IDS, "dtype": "int32"})["kwargs"]
    assert value["input_ids"].dtype == value["labels"].dtype == np.int32


def test_sequences_without_tokens():
    assert kwargs(input_ids=[[], []]) == {"input_ids": [[], []], "labels": [[], []]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "the forward-backward JSON = .*must be an object"),
        ({"payload": 5}, "payload = 5: must be an object"),
        ({}, "payload needs kwargs, input_ids, or texts with tokenizer"),
        ({"input_ids": IDS, "lables": "none"}, r"unknown field\(s\) \['lables'\]"),
        ({"input_ids": IDS, "kwargs": {}}, "give one"),
        ({"kwargs": []}, "kwargs = .*must be an object"),
        ({"input_ids": [1, 2, 3]}, r"input_ids must have shape \[batch, seq_len\], got \[3\]; write one sequence as"),
        ({"input_ids": [[1], [2, 3]]}, "input_ids = .*rows must all have the same length"),
        ({"input_ids": [[1.5]]}, "input_ids = .*has values that long cannot hold"),
        ({"input_ids": {"data": [[1]], "dtype": "bf16"}}, "input_ids = .*must hold whole numbers"),
        ({"input_ids": [[2**70]]}, "input_ids = .*must hold numbers in 64 bits"),
        ({"input_ids": [["a"]]}, "input_ids = .*must hold numbers"),
        ({"input_ids": [[None]]}, "input_ids = .*must hold numbers"),
        (
            {"input_ids": IDS, "attention_mask": [[1]]},
            r"attention_mask must have the same shape as input_ids: \[1, 1\]",
        ),
        ({"input_ids": IDS, "position_ids": [1]}, "position_ids must have shape"),
        ({"input_ids": IDS, "labels": [[1]]}, "labels must have the same shape"),
        ({"input_ids": IDS, "labels": "next"}, "labels = 'next': use 'next_token'"),
        ({"input_ids": IDS, "labels": False}, "labels = False: use"),
        ({"input_ids": IDS, "labels": {"stratgy": "self"}}, "labels = .*give strategy, ignore_index and mask_padding"),
        ({"input_ids": IDS, "ignore_index": "x"}, "ignore_index = 'x': must be an integer"),
        ({"input_ids": {"data": IDS, "dtype": "int"}, "ignore_index": 2**40}, "ignore_index = .*fits int32"),
        ({"input_ids": IDS, "attention_mask": MASK, "mask_padding": 1}, "mask_padding = 1: must be true or false"),
        ({"input_ids": IDS, "include_attention_mask": "yes"}, "include_attention_mask = 'yes'"),
        ({"input_ids": IDS, "args": "ab"}, "args = 'ab': must be a JSON list"),
        ({"input_ids": IDS, "context": []}, "context = .*must be an object"),
        ({"input_ids": IDS, "processing": []}, "processing = .*must be an object"),
        ({"kwargs": {"x": {"data": [1], "dtype": "half"}}}, "kwargs.x.dtype = 'half': unsupported tensor dtype"),
        ({"kwargs": {"x": {"data": [1], "dtyp": "int"}}}, r"kwargs.x = .*unknown field\(s\) \['dtyp'\]"),
        ({"kwargs": {"x": {"data": [300, 2], "dtype": "bool"}}}, "kwargs.x = .*has values that bool cannot hold"),
        ({"kwargs": {"x": {"data": [2**40], "dtype": "int"}}}, "kwargs.x = .*has values that int cannot hold"),
        ({"kwargs": {"x": {"data": [1e300], "dtype": "float"}}}, "kwargs.x = .*has values that float cannot hold"),
        ({"kwargs": {"x": {"data": [1e300], "dtype": "bf16"}}}, "kwargs.x = .*has values that bf16 cannot hold"),
        ({"context": {"m": {"data": [0.5]}}, "input_ids": IDS}, "context.m = .*has values that long cannot hold"),
    ],
)
def test_bad_payloads_name_the_field_and_the_fix(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        build_forward_backward_payload(spec)


NAMES = {
    "bool": "bool", "boolean": "bool", "float": "float32", "float32": "float32", "float64": "float64",
    "double": "float64", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16",
    "int": "int32", "int32": "int32", "int64": "int64", "long": "int64",
}  # fmt: skip


@pytest.mark.parametrize(("name", "torch_name"), NAMES.items())
def test_dtype_names_mean_what_they_mean_in_torch(name, torch_name):
    torch = pytest.importorskip("torch")
    tensor = wire.loads(wire.dumps(tensor_from_json("x", {"data": [[1, 0]], "dtype": name})), framework="torch")
    assert tensor.dtype == getattr(torch, torch_name)
    assert tensor.tolist() == [[1, 0]]


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(st.floats(width=64), max_size=8), st.sampled_from(["float", "float64", "bf16", "fp16"]))
def test_numbers_are_rounded_as_torch_rounds_them(values, name):
    torch = pytest.importorskip("torch")
    expected = torch.tensor(values, dtype=getattr(torch, NAMES[name]))
    if not (torch.isfinite(expected) | ~torch.isfinite(torch.tensor(values, dtype=torch.float64))).all():
        with pytest.raises(ConfigurationError, match="cannot hold"):
            tensor_from_json("x", {"data": values, "dtype": name})
        return
    ours = wire.loads(wire.dumps(tensor_from_json("x", {"data": values, "dtype": name})), framework="torch")
    assert torch.equal(ours.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert wire.dumps(ours[finite]) == wire.dumps(expected[finite])


def test_ready_made_arguments_are_sent_as_they_are():
    value = built(kwargs={"n": {"a": 1}, "flag": True, "list": [1, 2], "scalar": {"data": 1.5, "dtype": "double"}})[
        "kwargs"
    ]
    assert (value["n"], value["flag"]) == ({"a": 1}, True)
    assert value["list"].tolist() == [1, 2]
    assert value["scalar"].shape == ()


def test_payloads_of_ids_import_neither_torch_nor_tokenizers():
    program = """if True:
        import sys
        from cortex_training import build_forward_backward_payload
        build_forward_backward_payload({"input_ids": [[1, 2]]})
        assert not {"torch", "transformers", "tokenizers"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_models_arguments_alone_are_those_of_the_frame() -> None:
    spec = {"input_ids": [[5, 6, 7]], "attention_mask": True}
    arguments = build_forward_backward_kwargs(spec)
    sent = wire.loads(build_forward_backward_payload(spec), framework="numpy")["kwargs"]
    assert arguments.keys() == sent.keys() == {"input_ids", "attention_mask", "labels"}
    for name, value in arguments.items():
        np.testing.assert_array_equal(value, sent[name])
