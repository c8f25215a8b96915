"""Finding the checkpoint of a save."""

from __future__ import annotations

from typing import Any

import pytest

from cortex_training.protocol.results import as_lists, checkpoint_id
from cortex_training.wire import RawTensor


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ({"checkpoint_id": "global_step12"}, "global_step12"),
        ({"checkpoint_id": "", "stage_path": "s3://b/j/checkpoints/cp_1f-2c/global_step1/"}, "cp_1f-2c"),
        (
            {
                "job_id": "j:training:0",
                "stage_path": "s3://bucket/x/checkpoints/cp_0a1b2c3d-0000-4000-8000-000000000000/global_step1/",
                "checkpoint_path": "/tmp/whatever",
                "checkpoint_tag": "global_step1",
                "version": 1.0,
            },
            "cp_0a1b2c3d-0000-4000-8000-000000000000",
        ),
        ({"stage_path": "s3://b/checkpoints/global_step7/"}, "global_step7"),
        ({"stage_path": "s3://b/other/"}, None),
        ({"checkpoint_path": "/tmp/global_step3"}, None),
        ({"checkpoint_id": 5}, None),
        ({}, None),
    ],
)
def test_the_checkpoint_id_is_found(result: dict[str, Any], found: str | None) -> None:
    assert checkpoint_id(result) == found


def test_tensors_that_numpy_lacks_become_lists_too() -> None:
    assert as_lists({"x": [RawTensor("BF16", (2,), b"\x80\x3f\x00\x40")]}) == {"x": [[1.0, 2.0]]}
