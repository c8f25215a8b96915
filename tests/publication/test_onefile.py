"""The command as one file, run by a Python that has no packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cortex_training.publication import Store
from cortex_training.publication.onefile import build, main
from tests.publication.servers import S3Server, put_save, serving, write_secret
from tests.publication.vault_server import VaultHandler, VaultServer


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onefile") / "cortex-publish.pyz"
    build(path)
    return path


def run(archive: Path, *argv: str) -> tuple[int, str, str]:
    # -I and -S: neither this environment's packages nor the working directory can help out.
    command = [sys.executable, "-I", "-S", str(archive), *argv]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


def test_on_a_directory_and_in_a_bucket(archive: Path, store: Store, request: pytest.FixtureRequest) -> None:
    flags = ["-checkpoint", store.root]
    if store.root.startswith("s3://"):
        flags += ["-creds", request.getfixturevalue("creds")]
    location = store.locate(put_save(store, "exec/a/step-5"))
    status, out, err = run(archive, "publish", *flags, "-epoch", "1", location, "5")
    assert (status, out.startswith("published "), err) == (0, True, "")
    assert run(archive, "resolve", *flags) == (0, f"{location}\n", "")
    assert run(archive, "resolve", *flags, "-nonsense")[0] == 2


def test_with_credentials_from_vault(archive: Path, s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    pytest.importorskip("hvac")
    fields = {"access_key_id": s3_server.access_key_id, "secret_access_key": s3_server.secret_access_key}
    vault = VaultServer(secrets={"/v1/secret/data/s3": {**fields, "endpoint": s3_server.endpoint}})
    write_secret(tmp_path / "approle", role_id=vault.role_id, secret_id=vault.secret_id)
    with serving(type("Handler", (VaultHandler,), {"server_state": vault})) as port:
        source = f"vault:http://127.0.0.1:{port}/s3?auth=approle&approle={tmp_path}/approle"
        status, out, err = run(archive, "probe", "-checkpoint", s3_root, "-creds", source)
    assert (status, out, err) == (0, f"{s3_root} {source}\n", "")


def test_it_is_small_pure_and_the_same_each_time(archive: Path, tmp_path: Path) -> None:
    assert archive.stat().st_size < 8_000_000
    names = zipfile.ZipFile(archive).namelist()
    assert not [name for name in names if name.endswith((".so", ".pyd", ".pyc"))]
    assert not [
        name for name in names if name.startswith(("numpy", "aiohttp", "safetensors", "cortex_training/client"))
    ]
    again = tmp_path / "again.pyz"
    assert main([str(again)]) == 0
    assert again.read_bytes() == archive.read_bytes()


def test_its_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["-h"]) == 2
    assert "usage" in capsys.readouterr().err
