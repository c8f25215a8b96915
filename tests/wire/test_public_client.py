"""Frames exchanged with the public client, in its own Python.

Set CORTEX_TRAINING_PUBLIC_PYTHON to a Python that has ``cortex-training==0.0.3``, torch and numpy.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cortex_training import wire

pytestmark = pytest.mark.public_client

_PYTHON = os.environ.get("CORTEX_TRAINING_PUBLIC_PYTHON")

# Runs in the other interpreter: decodes our frames and chunks, encodes the value again.
_PEER = """
import sys
from importlib.metadata import version
from pathlib import Path
from cortex_training import wire
assert version("cortex-training") == "0.0.3"
folder = Path(sys.argv[1])
frame = (folder / "ours.frame").read_bytes()
chunks = [path.read_bytes() for path in sorted(folder.glob("ours.*.chunk"))]
assert wire.decode_byte_chunks(chunks, kind="request") == frame
value, metadata = wire.loads(frame), wire.read_metadata(frame)
(folder / "theirs.frame").write_bytes(wire.dumps(value, metadata=metadata))
for chunk in wire.encode_byte_chunks(frame, kind="request", operation="fwd-bwd", max_bytes=20000, chunk_group_id="g"):
    described = wire.read_byte_chunk_metadata(chunk)
    (folder / f"theirs.{described['chunk_idx']}.chunk").write_bytes(chunk)
"""


@pytest.fixture(scope="module")
def python() -> str:
    if not _PYTHON:
        pytest.skip("CORTEX_TRAINING_PUBLIC_PYTHON is not set to a Python with cortex-training==0.0.3")
    return _PYTHON


@pytest.fixture(scope="module")
def value(vectors):
    """Everything at once: every dtype, 0-d and nested tensors, specials, unicode."""
    frames = {frame["name"]: frame for frame in vectors.manifest["frames"]}
    names = (
        "all_dtypes",
        "scalars_0d",
        "nested_mixed",
        "noncontiguous",
        "specials_floats_ints",
        "unicode",
        "grpo_batch",
    )
    decoded = {name: vectors.build(frames[name]["decoded"]) for name in names}
    return {"all": decoded, "again": [decoded, (decoded["unicode"],)], "large": np.arange(9000)}


def test_both_clients_read_what_the_other_writes(python, value, same, sorted_metadata, tmp_path: Path):
    metadata = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
    frame = wire.dumps(value, metadata)
    options = {"kind": "request", "operation": "fwd-bwd", "max_bytes": 20_000, "chunk_group_id": "g"}
    chunks = wire.encode_byte_chunks(frame, **options)
    (tmp_path / "ours.frame").write_bytes(frame)
    for index, chunk in enumerate(chunks):
        (tmp_path / f"ours.{index:03}.chunk").write_bytes(chunk)
    subprocess.run([python, "-c", _PEER, str(tmp_path)], check=True, timeout=120, cwd=tmp_path)
    theirs = (tmp_path / "theirs.frame").read_bytes()
    assert same(wire.loads(theirs, framework="numpy"), value)
    assert wire.read_metadata(theirs) == metadata
    assert sorted_metadata(theirs) == sorted_metadata(frame)
    received = [(tmp_path / f"theirs.{index}.chunk").read_bytes() for index in range(len(chunks))]
    assert len(chunks) > 1
    assert list(map(sorted_metadata, received)) == list(map(sorted_metadata, chunks))
    assert wire.decode_byte_chunks(received, kind="request") == frame
