"""Code written for the public client runs on ours: every name it offers exists and takes the same arguments.

Set CORTEX_TRAINING_PUBLIC_PYTHON to a Python that has ``cortex-training==0.0.3``, torch and numpy.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import cortex_training
import cortex_training.client
from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient

pytestmark = pytest.mark.public_client

_PYTHON = os.environ.get("CORTEX_TRAINING_PUBLIC_PYTHON")
_SCRIPT = Path(__file__).with_name("public_client_signatures.py")

NOT_OFFERED = {"CortexTrainingClient.tail_events", "CortexTrainingClient.stream_events"}
"""The service knows no such operation, so these never worked."""


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script prints about the public client."""
    if not _PYTHON:
        pytest.skip("CORTEX_TRAINING_PUBLIC_PYTHON is not set to a Python with cortex-training==0.0.3")
    # Elsewhere than in this repository, whose package has the same import name.
    folder = tmp_path_factory.mktemp("public_client")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [_PYTHON, str(_SCRIPT)], env=environment, capture_output=True, text=True, timeout=240, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.fixture(scope="module")
def offered(described: dict[str, Any]) -> dict[str, Any]:
    """Name -> parameters of everything the public client offers."""
    return {name: value for name, value in described["callables"].items() if name not in NOT_OFFERED}


def test_every_name_exists(offered: dict[str, Any]) -> None:
    assert len(offered) > 60
    missing = [name for name in offered if not exists(name)]
    assert missing == []


def test_every_name_of_its_client_module_can_be_imported_from_ours(described: dict[str, Any]) -> None:
    assert "serialize_forward_backward_args" in described["in_client"]
    missing = [name for name in described["in_client"] if not hasattr(cortex_training.client, name)]
    assert missing == []


def exists(name: str) -> bool:
    try:
        attrgetter(name)(cortex_training)
    except AttributeError:
        return False
    return True


def test_every_callable_takes_the_same_arguments(offered: dict[str, Any]) -> None:
    problems = {name: refused(attrgetter(name)(cortex_training), theirs) for name, theirs in with_parameters(offered)}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_the_asynchronous_client_takes_them_too(offered: dict[str, Any]) -> None:
    problems = {}
    for name, theirs in with_parameters(offered):
        owner, _, method = name.partition(".")
        if owner == "CortexTrainingClient":
            ours = "aclose" if method == "close" else method
            problems[method] = refused(getattr(AsyncCortexTrainingClient, ours), theirs)
    assert {name: problem for name, problem in problems.items() if problem} == {}


def with_parameters(offered: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, theirs) for name, theirs in offered.items() if theirs is not None and exists(name)]


def refused(function: Any, theirs: list[Any]) -> list[str]:
    """What `function` does not take of the calls that a function with `theirs` takes."""
    ours = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    by_name = {one.name: one for one in ours}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in ours)
    problems = []
    for place, (name, kind, optional) in enumerate(theirs):
        if kind == "VAR_KEYWORD":
            continue
        one = by_name.pop(name, None)
        if one is None:
            if not (takes_any and kind == "KEYWORD_ONLY"):
                problems.append(f"{name} is not taken")
            continue
        if optional and one.default is one.empty:
            problems.append(f"{name} is required")
        if kind == "POSITIONAL_OR_KEYWORD" and (ours.index(one) != place or one.kind is one.KEYWORD_ONLY):
            problems.append(f"{name} is not taken at place {place}")
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    problems += [
        f"{one.name} is required" for one in by_name.values() if one.default is one.empty and one.kind not in variadic
    ]
    return problems


def test_the_comparison_finds_what_is_missing() -> None:
    def function(first: int, *, third: int, second: int = 0) -> None: ...

    theirs = [
        ["first", "POSITIONAL_OR_KEYWORD", True],
        ["second", "POSITIONAL_OR_KEYWORD", True],
        ["fourth", "KEYWORD_ONLY", True],
    ]
    assert refused(function, theirs) == [
        "first is required",
        "second is not taken at place 1",
        "fourth is not taken",
        "third is required",
    ]


def test_constructor_arguments_reach_the_client(offered: dict[str, Any]) -> None:
    """`from_pat` and `from_connection_name` pass the constructor's arguments on."""
    names = [
        name for name, _, _ in offered["CortexTrainingClient.__init__"] if name.startswith(("poll", "pool", "max"))
    ]
    assert len(names) == 6
    for kind in (CortexTrainingClient, AsyncCortexTrainingClient):
        client = kind.from_pat("account.snowflakecomputing.com", "pat", "DB", "S", **dict.fromkeys(names, 7))
        assert {name: getattr(client._settings, name) for name in names} == dict.fromkeys(names, 7)
