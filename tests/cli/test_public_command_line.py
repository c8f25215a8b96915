"""Whoever typed it for the public client can type it here: every command and flag of its command line.

Set CORTEX_TRAINING_PUBLIC_PYTHON to a Python that has ``cortex-training==0.0.3``, torch and numpy.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cortex_training.cli import build_parser

pytestmark = pytest.mark.public_client

_PYTHON = os.environ.get("CORTEX_TRAINING_PUBLIC_PYTHON")
_SCRIPT = Path(__file__).with_name("public_command_line.py")

NOT_OFFERED = {"tui"}
"""A full-screen reader of logs; `tail-logs --follow` reads them line by line."""


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not _PYTHON:
        pytest.skip("CORTEX_TRAINING_PUBLIC_PYTHON is not set to a Python with cortex-training==0.0.3")
    # Elsewhere than in this repository, whose package has the same import name.
    folder = tmp_path_factory.mktemp("public_client")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [_PYTHON, str(_SCRIPT)], env=environment, capture_output=True, text=True, timeout=240, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: value for name, value in json.loads(done.stdout).items() if name not in NOT_OFFERED}


def value_for(argument: dict[str, Any]) -> str:
    return argument["choices"][0] if argument["choices"] else "1" if argument["number"] else "text"


def typed(arguments: list[dict[str, Any]], positionals: bool) -> list[list[str]]:
    """Each flag with a value, in every spelling; then the positional arguments, if wanted."""
    flags = [
        [spelling, value_for(argument)] if argument["takes"] else [spelling]
        for argument in arguments
        for spelling in argument["flags"]
    ]
    return flags or [[]] if not positionals else [[value_for(one) for one in arguments if one["positional"]]]


def test_every_command_and_flag_is_understood(offered: dict[str, Any]) -> None:
    assert len(offered) > 14
    parser = build_parser()
    tried = 0
    for command, arguments in offered.items():
        name = command or "list"
        [positional] = typed(arguments, positionals=True)
        for flag in typed(arguments, positionals=False):
            line = [*flag, name] if not command else [name, *flag, *positional]
            if flag and flag[0] == "--config" and command == "login":
                line = [name, *flag]  # one or the other
            parser.parse_args(["--job", "j", *line])
            tried += 1
    assert tried > 30


def test_every_choice_is_one_here(offered: dict[str, Any]) -> None:
    parser = build_parser()
    for command, arguments in offered.items():
        [positional] = typed(arguments, positionals=True)
        for argument in arguments:
            for choice in argument["choices"] or ():
                parser.parse_args([command, argument["flags"][0], choice, *positional])
