"""`pip install .` into an empty environment, without torch: the whole public surface works there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

_REPOSITORY = Path(__file__).parents[2]
_WALK = Path(__file__).with_name("surface_walk.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with this distribution and its declared requirements."""
    folder = tmp_path_factory.mktemp("empty")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_REPOSITORY / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_REPOSITORY / "cortex_training", source / "cortex_training", ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    constraints = _REPOSITORY / "constraints" / "all.txt"
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(source), "-c", str(constraints)], check=True)
    return python


def clean_environment() -> dict[str, str]:
    """Nothing that leads out of the environment, or to another service."""
    unwanted = ("PYTHON", "VIRTUAL_ENV", "CORTEX_TRAINING_", "SNOWFLAKE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


@pytest.mark.timeout(900)
def test_the_whole_surface_works_without_torch(python: Path, local_service: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python), str(_WALK), local_service.base_url, str(tmp_path)],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["extras"] == []
    assert seen["version"] == importlib.metadata.version("cortex-training-client")
    assert seen["refused"] == {}

    frames = seen["frames"]
    assert frames["chunks"] > 1
    assert (frames["same"], frames["again"]) == (True, True)
    assert frames["bf16"] == [1.0, -2.0]
    assert frames["f8"] == [[0.0, 1.0, -1.0], [0.0, 0.5, -0.5], [0.0, 0.5, -0.5]]
    assert frames["built"] == [1.5]
    assert "pickle" in frames["refusal"]

    for walked in (seen["blocking"], seen["asynchronous"], seen["commands"]):
        assert walked["steps"] == 1
    loss = seen["blocking"]["loss"]
    assert seen["asynchronous"]["losses"] == [loss] * 4
    assert seen["commands"]["loss"] == pytest.approx(loss)
    assert [len(ids) for ids in seen["blocking"]["token_ids"]] == [4, 4]
    assert seen["blocking"]["events"] == ["result", "done"]
    assert seen["blocking"]["listed"]
    assert seen["blocking"]["log"]
    assert seen["commands"]["cancelled"]
    assert seen["commands"]["resolved"]
