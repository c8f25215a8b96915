"""Imports point one way, and light modules stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ("torch", "transformers", "pyarrow", "boto3", "sqlalchemy", "snowflake.connector")

CLIENT = {
    "client",
    "aio",
    "artifacts",
    "auth",
    "conformance",
    "settings",
    "telemetry",
    "_bucket_stage",
    "_network",
    "_sending",
    "_requests_driver",
    "_aiohttp_driver",
}
FOUNDATION = {path.stem for path in (ROOT / "cortex_training").glob("*.py")} - CLIENT - {"__init__"}
"""Every other module of the package itself: bytes, configuration, names, states, errors."""

ALLOWED = {
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    "protocol": FOUNDATION | {"protocol"},
    **{name: FOUNDATION | {"protocol"} | CLIENT for name in CLIENT},
    "datasets": FOUNDATION | {"protocol"} | CLIENT | {"datasets"},
    "publication": FOUNDATION | {"protocol"} | CLIENT | {"datasets", "publication"},
    "training": FOUNDATION | {"protocol"} | CLIENT | {"datasets", "publication", "training"},
    # The local service is the other end of the wire: if it shared the client's code, both could be wrong together.
    "local": FOUNDATION | {"local"},
    "cli": FOUNDATION | {"protocol"} | CLIENT | {"datasets", "publication", "training", "local", "cli"},
}
"""Part of `cortex_training` -> the parts it may import. `local` also has its own commands (`__main__`)."""


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def modules() -> list[Path]:
    return sorted((ROOT / "cortex_training").rglob("*.py"))


def imported_parts(path: Path) -> set[str]:
    """Parts of `cortex_training` that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "cortex_training" else [module]
        found |= {part_of(name) for name in names if name.split(".")[0] == "cortex_training"}
    return found - {"", "__version__"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT / "cortex_training")
    part = relative.parts[0].removesuffix(".py")
    if part == "__init__":
        return
    if relative.as_posix() == "local/__main__.py":
        part = "cli"
    assert part in ALLOWED, f"{relative} is in no layer; add its part to ALLOWED and to docs/architecture.md"
    assert imported_parts(path) <= ALLOWED[part]


@pytest.mark.parametrize("package", ["airflow", "prefect"])
def test_a_provider_never_imports_the_other(package: str) -> None:
    own = {"airflow": "airflow_cortex_training", "prefect": "prefect_cortex_training"}
    foreign = {own[other] for other in own if other != package} | {other for other in own if other != package}
    for path in (ROOT / "providers" / package).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and node.level == 0 else []
            assert not {name.split(".")[0] for name in names} & foreign, f"{path} imports {names}"


@pytest.mark.parametrize(
    "module",
    [
        "cortex_training",
        "cortex_training.wire",
        "cortex_training.config",
        "cortex_training.errors",
        "cortex_training.states",
        "cortex_training.client",
        "cortex_training.aio",
        "cortex_training.auth",
        "cortex_training.cli",
        "cortex_training.training",
        "cortex_training.publication",
        "cortex_training.datasets",
    ],
)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    program = f"import sys, json, {module}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_every_exported_name_exists() -> None:
    program = (
        "import cortex_training as c; missing = [n for n in c.__all__ if not hasattr(c, n)]; "
        "assert not missing, missing; assert c.wire.WIRE_FORMAT_VERSION == 'DSSST1'; assert c.__version__"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_none_of_its_modules() -> None:
    program = "import sys, cortex_training; print([m for m in sys.modules if m.startswith('cortex_training.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import cortex_training

    with pytest.raises(AttributeError, match="no attribute 'Client'"):
        _ = cortex_training.Client  # type: ignore[attr-defined]
