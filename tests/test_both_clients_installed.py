"""Ours and the public client own one import name: installed together, in either order, a person is told what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PUBLIC_PYTHON = os.environ.get("CORTEX_TRAINING_PUBLIC_PYTHON")
OURS, PUBLIC = "cortex-training-client", "cortex-training"

pytestmark = [
    pytest.mark.public_client,
    pytest.mark.skipif(not PUBLIC_PYTHON, reason="CORTEX_TRAINING_PUBLIC_PYTHON names no Python"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(
        REPOSITORY / "cortex_training", source / "cortex_training", ignore=shutil.ignore_patterns("__pycache__")
    )
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True)
    return next(out.glob("*.whl"))


def public_files() -> list[Path]:
    """The installed files of the public client, relative to its site-packages."""
    code = (
        "import importlib.metadata as m\n"
        "d = m.distribution('cortex-training')\n"
        "print(d.locate_file(''))\n"
        "[print(f) for f in d.files if not str(f).startswith('..') and '__pycache__' not in str(f)]"
    )
    assert PUBLIC_PYTHON is not None
    lines = subprocess.run([PUBLIC_PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    return [Path(lines[0]), *map(Path, lines[1:])]


class Site:
    """A folder of installed packages, the way pip leaves it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.wheel = wheel

    def install_ours(self) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade"]
        staged = self.folder.with_name("staged")
        subprocess.run([*command, "--target", str(staged), str(self.wheel)], check=True)
        shutil.copytree(staged, self.folder, dirs_exist_ok=True)

    def install_public(self) -> None:
        root, *files = public_files()
        for file in files:
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, self.folder / file)

    def uninstall_public(self) -> None:
        for file in public_files()[1:]:
            (self.folder / file).unlink(missing_ok=True)
        shutil.rmtree(next(self.folder.glob("cortex_training-*.dist-info")))

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        paths = [self.folder, REPOSITORY / "providers" / "airflow", REPOSITORY / "providers" / "prefect"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=self.folder, capture_output=True, text=True, check=False
        )


@pytest.fixture
def site(tmp_path: Path, wheel: Path) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder, wheel)


@pytest.mark.parametrize("order", [("install_ours", "install_public"), ("install_public", "install_ours")])
@pytest.mark.parametrize("module", ["airflow_cortex_training.operators", "prefect_cortex_training"])
def test_a_provider_refuses_to_guess(site: Site, order: tuple[str, str], module: str) -> None:
    for step in order:
        getattr(site, step)()
    refused = site.run(f"import {module}")
    assert refused.returncode == 1
    assert "pip uninstall -y cortex-training cortex-training-client" in refused.stderr


def test_airflow_still_reads_the_providers_metadata(site: Site) -> None:
    site.install_ours()
    site.install_public()
    read = site.run("from airflow_cortex_training.get_provider_info import get_provider_info as g; print(g()['name'])")
    assert read.stdout.strip() == "Cortex Training"


def test_the_command_line_warns(site: Site) -> None:
    site.install_public()
    site.install_ours()
    warned = site.run("from cortex_training.cli import main; raise SystemExit(main(['runs', '/nowhere']))")
    assert "warning: cortex-training is installed beside cortex-training-client" in warned.stderr


def test_after_an_uninstall_of_the_public_client_ours_has_to_be_installed_again(site: Site) -> None:
    site.install_public()
    site.install_ours()
    site.uninstall_public()
    broken = site.run("import cortex_training.client")
    assert broken.returncode == 1, "the uninstall took files of ours with it"
    site.install_ours()
    mended = site.run("import airflow_cortex_training.operators, prefect_cortex_training, cortex_training.client")
    assert mended.returncode == 0, mended.stderr
