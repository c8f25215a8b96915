from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortex_training.datasets import Dataset, build_dataset

TOKENIZER = Path(__file__).parents[1] / "compat" / "tokenizer"
"""A byte-level tokenizer with four merges; eos <|end|> is 0, padding <|pad|> is 1, <|turn|> is 2."""


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(TOKENIZER, tmp_path / "tokenizer"))


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Dataset]:
    """Build rows and open the result; keywords override those of `build_dataset`."""

    def build_and_open(rows: Any, **options: Any) -> Dataset:
        out = options.pop("out", tmp_path / "dataset")
        build_dataset(rows, out, **{"tokenizer": TOKENIZER, "max_seq_len": 64, **options})
        return Dataset.open(out / "manifest.json")

    return build_and_open


@pytest.fixture
def pairs() -> list[dict[str, str]]:
    return [{"prompt": f"What is {n} times {n}? ", "completion": str(n * n)} for n in range(40)]
