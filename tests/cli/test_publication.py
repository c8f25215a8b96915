"""`cortex-training publish` hands its arguments on, whatever they look like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortex_training.publication.command import main as cortex_publish


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save = tmp_path / "root" / "exec" / "a" / "step-5"
    save.mkdir(parents=True)
    return tmp_path / "root"


def test_a_save_is_published_found_and_pruned(run: Any, root: Path) -> None:
    save = root / "exec" / "a" / "step-5"
    assert run("publish", "resolve", "-checkpoint", str(root)).out == ""
    published = run("publish", "publish", "-checkpoint", str(root), "-epoch", "3", str(save), "5")
    assert (published.code, published.err) == (0, "")
    assert published.out.endswith(f"(epoch 3, step 5, {save})\n")
    assert run("publish", "resolve", "-checkpoint", str(root)).out == f"{save}\n"
    assert run("publish", "prune", "--checkpoint", str(root), "-keep=1").out == ""


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["-h"],
        ["--help"],
        ["help"],
        ["nonsense"],
        ["-checkpoint", "{root}"],
        ["resolve"],
        ["resolve", "-h"],
        ["resolve", "-c", "{root}"],
        ["resolve", "-checkpoint", "{root}", "-creds", "file:/none"],
        ["resolve", "-checkpoint", "{root}", "--"],
        ["resolve", "--", "-checkpoint", "{root}"],
        ["resolve", "-checkpoint", "{root}", "--proxy", "http://p:1"],
        ["resolve", "-checkpoint", "{root}/missing"],
        ["resolve", "-checkpoint", "s3://b/x", "-creds", "file:/none", "-timeout", "1s"],
        ["publish", "-checkpoint", "{root}", "{root}/exec/a/step-5", "-5"],
        ["prune", "-checkpoint", "{root}", "-keep", "-1"],
        ["prune", "-checkpoint", "{root}", "-keep", "--job"],
    ],
    ids=" ".join,
)
def test_it_is_the_same_command(run: Any, root: Path, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    argv = [text.format(root=root) for text in argv]
    ours = run("publish", *argv)
    code = cortex_publish(argv)
    out, err = capsys.readouterr()
    assert (ours.code, ours.out, ours.err) == (code, out, err)


def test_it_needs_no_connection_and_its_module_imports_nothing() -> None:
    program = (
        "import sys, cortex_training.cli.publication\n"
        "print([name for name in sys.modules if name.startswith('cortex_training.publication')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_commands_help_lists_it(run: Any) -> None:
    assert "resolve, watch, publish, prune, probe" in " ".join(run("--help").out.split())
