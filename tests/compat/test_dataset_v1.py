"""Datasets of version 1 and their frames stay what they were.

A run that resumes after an upgrade compares the dataset's hash with its plan and replays frames under ids it has used
before. If one of these tests fails, the change needs a new manifest version or a new FRAME_VERSION; the pinned values
here never change.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from cortex_training.datasets import Dataset, Manifest, build_dataset

HERE = Path(__file__).parent
GOLDEN = HERE / "dataset_v1" / "manifest.json"

CONTENT_SHA256 = "20e27296fa687f3f52439dfe3e1ff1707f46d2a33eafef65beefeee29f58b550"
TOKENIZER_SHA256 = "a20b173bfc38ad33a9444f2b99febe4be3b5feaa28ccb14b5bed90991c61374d"
FRAMES_SHA256 = {
    (1, 0): "94d25eab744843a922927e70860b36f42927cb2d6e73163e509c4c1b09107f90",
    (1, 1): "a9a34c9c8f115162c9ab455ebd1b166112ee08e5315b892c8f4339218f47a8e1",
    (7, 1): "5413ce034dad177acaab57801b73f539253f1c89e04412c4ddfba329ff9860b5",
}

ROWS = [
    *({"prompt": f"What is {n} and {n}? ", "completion": f"{n + n}, of course."} for n in range(10)),
    {"text": "The weather in the north: Ünwetter, 雨, ☂."},
    {
        "messages": [
            {"role": "user", "content": "Are you there?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "In there."},
        ]
    },
]


def test_a_dataset_written_by_the_first_release_opens_and_gives_the_same_frames() -> None:
    dataset = Dataset.open(GOLDEN)
    assert dataset.manifest.content_sha256 == CONTENT_SHA256
    batches = dataset.batches(2, 2, 11)
    frames = {place: hashlib.sha256(batches.frame(*place)).hexdigest() for place in FRAMES_SHA256}
    assert frames == FRAMES_SHA256


def test_the_same_rows_still_become_the_same_dataset(tmp_path: Path) -> None:
    manifest = build_dataset(
        ROWS, tmp_path, tokenizer=HERE / "tokenizer", max_seq_len=128, seed=5, source="fixed rows", shard_tokens=300
    )
    assert manifest.content_sha256 == CONTENT_SHA256
    assert manifest.tokenizer_sha256 == TOKENIZER_SHA256
    # The bytes of a shard file may change with safetensors; what it holds may not.
    assert replace(manifest, shards=()) == replace(Manifest.read(GOLDEN), shards=())
