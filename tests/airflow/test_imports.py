"""What a DAG file costs to parse, and which code the provider may lean on."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import airflow_cortex_training

PACKAGE = Path(airflow_cortex_training.__file__).parent
MODULES = sorted(
    ".".join(("airflow_cortex_training", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
PUBLIC = [name for name in MODULES if name.count(".") > 1 and not name.endswith(".session")]
HEAVY = {
    *("torch", "transformers", "tokenizers", "pyarrow", "boto3", "snowflake.connector"),
    *("numpy", "safetensors", "aiohttp"),
}


def test_parsing_a_dag_imports_nothing_heavy() -> None:
    code = (
        "import sys, json, airflow.sdk, airflow.triggers.base, airflow.sdk.bases.sensor; before = set(sys.modules)\n"
        f"import importlib\nfor name in {PUBLIC!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = json.loads(result.stdout.splitlines()[-1])
    assert [name for name in ours if name in HEAVY] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    for name in _imported(path):
        assert not f"{name}.".startswith(("prefect.", "cortex_training.local.", "cortex_training.cli.", "demo.")), name
        assert not (name.startswith("cortex_training") and "._" in name), f"{name} is private to the client"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_pickle(path: Path) -> None:
    assert not {"pickle", "cloudpickle", "dill", "marshal"} & set(_imported(path))


def test_a_swallowed_cancellation_would_lose_kills() -> None:
    """Triggers pass CancelledError on: Airflow calls ``on_kill`` only then."""
    for path in (PACKAGE / "triggers").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and _catches_cancellation(node):
                assert any(isinstance(inner, ast.Raise) and inner.exc is None for inner in node.body), (
                    f"{path.name}:{node.lineno} keeps a cancellation for itself"
                )


def _catches_cancellation(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else ""
    return handler.type is None or "CancelledError" in caught or "BaseException" in caught


def _imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
