from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortex_training import wire
from cortex_training.datasets import Dataset
from cortex_training.datasets.batches import pass_order
from cortex_training.errors import ConfigurationError

Build = Callable[..., Dataset]
Pairs = list[dict[str, str]]


def decoded(frame: bytes) -> dict[str, Any]:
    value = wire.loads(frame)
    return {
        "kwargs": {key: np.asarray(item) if key != "use_cache" else item for key, item in value["kwargs"].items()},
        "context": {key: np.asarray(item) for key, item in value["context"].items()},
        "rest": {key: item for key, item in value.items() if key not in ("kwargs", "context")},
    }


def test_a_frame_has_the_documented_form(build: Build, pairs: Pairs) -> None:
    frame = build(pairs).batches(3, 2, 1).frame(1, 1)
    value = decoded(frame)
    assert wire.read_metadata(frame) == {"response_options": {"format": "dssst1", "delivery": "chunked"}}
    assert value["rest"] == {
        "args": (),
        "processing": {"loss_fn": "causal_cross_entropy", "post": [], "config": {}},
    }
    assert value["kwargs"].pop("use_cache") is False
    arrays = {**value["kwargs"], "loss_mask": value["context"]["loss_mask"]}
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "input_ids": "int64",
        "attention_mask": "int64",
        "position_ids": "int64",
        "loss_mask": "float32",
    }
    assert len({array.shape for array in arrays.values()}) == 1
    assert (value["context"]["input_ids"] == value["kwargs"]["input_ids"]).all()


def test_masks_positions_and_padding_follow_the_packed_documents(build: Build) -> None:
    # "ab" is prompt tokens 2, "xyz" completion 3 and eos: 6 tokens each. Two fit into 12, the third is alone and
    # padded.
    dataset = build([{"prompt": "ab", "completion": "xyz"}] * 3, max_seq_len=12)
    batches = dataset.batches(2, 1, 0)
    value = decoded(batches.frame(1, 0))
    full, short = (0, 1) if len(batches.sequences(1, 0)[0].tokens) == 12 else (1, 0)
    assert value["kwargs"]["position_ids"][full].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert value["kwargs"]["position_ids"][short].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert value["kwargs"]["attention_mask"][full].tolist() == [1] * 12
    assert value["kwargs"]["attention_mask"][short].tolist() == [1] * 6 + [0] * 6
    assert value["kwargs"]["input_ids"][short].tolist()[6:] == [1] * 6
    # loss_mask[i] weighs the prediction of token i + 1: x, y, z and eos, and never the next document's first token.
    assert value["context"]["loss_mask"][full].tolist() == [0, 1, 1, 1, 1, 0] * 2
    assert value["context"]["loss_mask"][short].tolist() == [0, 1, 1, 1, 1, 0] + [0] * 6


def test_the_loss_mask_weighs_exactly_the_learned_tokens(build: Build, pairs: Pairs) -> None:
    dataset = build([*pairs, {"text": "plain words"}])
    batches = dataset.batches(1, 1, 0)
    weights = [
        decoded(batches.frame(step, 0))["context"]["loss_mask"].sum() for step in range(1, batches.steps_per_pass + 1)
    ]
    assert sum(weights) == dataset.manifest.loss_tokens


def test_a_micro_batch_is_as_wide_as_its_longest_sequence(build: Build) -> None:
    batches = build([{"text": "x" * length} for length in (39, 49)], max_seq_len=64).batches(1, 1, 0)
    widths = {decoded(batches.frame(step, 0))["kwargs"]["input_ids"].shape[1] for step in (1, 2)}
    assert widths == {40, 50}
    assert decoded(build([{"text": "x" * 39}, {"text": "x" * 49}]).batches(2, 1, 0).frame(1, 0))["kwargs"][
        "input_ids"
    ].shape == (2, 50)


def test_every_pass_visits_every_sequence_once_and_passes_follow_without_a_gap(build: Build, pairs: Pairs) -> None:
    dataset = build(pairs)
    count = dataset.manifest.sequences
    batches = dataset.batches(3, 2, 9)
    assert count % 6  # otherwise the wrap is not seen
    assert batches.steps_per_pass == count // 6 + 1
    stream = [
        sequence.tokens.tobytes()
        for step in range(1, 2 * batches.steps_per_pass + 1)
        for micro_batch in range(2)
        for sequence in batches.sequences(step, micro_batch)
    ]
    first, second = stream[:count], stream[count : 2 * count]
    assert Counter(first) == Counter(second)
    assert len(set(first)) == count
    assert first != second


def test_a_dataset_smaller_than_a_micro_batch_repeats(build: Build) -> None:
    batches = build([{"text": "only"}]).batches(4, 1, 0)
    assert batches.steps_per_pass == 1
    assert decoded(batches.frame(1, 0))["kwargs"]["input_ids"].shape == (4, 5)


def test_the_order_is_a_permutation_that_follows_seed_and_pass() -> None:
    orders = {(seed, number): pass_order(50, seed, number).tolist() for seed in (0, 1) for number in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    # Pinned: sha256 of "7:0:0" … "7:0:4" sorts so on every machine.
    assert pass_order(5, 7, 0).tolist() == [4, 3, 1, 2, 0]
    digests = [hashlib.sha256(f"7:3:{index}".encode()).digest() for index in range(2000)]
    assert pass_order(2000, 7, 3).tolist() == sorted(range(2000), key=digests.__getitem__)


def test_many_runs_in_one_process_keep_their_orders(
    build: Build, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_for = []

    def counting(sequences: int, seed: int, number: int) -> object:
        sorted_for.append((seed, number))
        return pass_order(sequences, seed, number)

    monkeypatch.setattr("cortex_training.datasets.batches.pass_order", counting)
    dataset = build(pairs)
    runs = [dataset.batches(1, 1, seed) for seed in range(16)]
    for step in (1, 2, 3):
        for batches in runs:
            batches.frame(step, 0)
    assert sorted_for == [(seed, 0) for seed in range(16)]


def test_frames_are_the_same_bytes_in_another_process_and_thread(build: Build, pairs: Pairs, tmp_path: Path) -> None:
    batches = build(pairs).batches(2, 2, 3)
    wanted = [(step, micro_batch) for step in (1, 2, 3, 4, 50) for micro_batch in (0, 1)]
    frames = [batches.frame(*place) for place in wanted]
    script = f"""
import hashlib
from cortex_training.datasets import Dataset
batches = Dataset.open({str(tmp_path / "dataset" / "manifest.json")!r}).batches(2, 2, 3)
print(*(hashlib.sha256(batches.frame(*place)).hexdigest() for place in {wanted[::-1]!r}))
"""
    other = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert other[::-1] == [hashlib.sha256(frame).hexdigest() for frame in frames]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda place: batches.frame(*place), wanted * 20)) == frames * 20


@pytest.mark.parametrize(("name", "shape"), [("micro_batch_size", (0, 1)), ("micro_batches_per_step", (1, True))])
def test_a_bad_shape_is_named(build: Build, name: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match=name):
        build([{"text": "only"}]).batches(*shape, 0)


@pytest.mark.parametrize("place", [(0, 0), (1, 2), (1, -1)])
def test_a_micro_batch_outside_the_step_is_refused(build: Build, place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="steps count from 1"):
        build([{"text": "only"}]).batches(1, 2, 0).frame(*place)
