"""Models that were downloaded by something else are found by their id, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex_training.cli.serve import _model_folder_option
from cortex_training.local.hub_cache import cached_model
from cortex_training.local.models import choose_model, model_folder
from cortex_training.local.refusals import Refusal
from tests.conftest import ServiceFactory
from tests.local.api import Caller, masked_frame, token_batch, training

_REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def downloaded(cache: Path, model_id: str, revision: str = _REVISION) -> Path:
    """The tiny model as a download leaves it: links in a snapshot to files among the blobs."""
    repository = cache / f"models--{model_id.replace('/', '--')}"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model_folder("tiny").iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def test_a_downloaded_model_trains(cache: Path, start_local_service: ServiceFactory) -> None:
    downloaded(cache, "acme/small")
    job = Caller(start_local_service().url).running(training(model_name="acme/small"))
    assert job.describe()["reason"] == ""
    assert 5 < job.forward_backward(masked_frame(token_batch()))["avg_loss"] < 8


def test_where_it_looks(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = downloaded(cache, "acme/small")
    assert cached_model("acme/small") == snapshot
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cached_model("acme/small") == snapshot
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    assert cached_model("acme/small") is None


def test_a_download_that_was_broken_off_is_none(cache: Path) -> None:
    snapshot = downloaded(cache, "acme/small")
    (snapshot / "model.safetensors").resolve().unlink()
    assert cached_model("acme/small") is None
    downloaded(cache, "acme/other", revision="../../../../etc")
    assert cached_model("acme/other") is None


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/../b", "a/b/c", "/etc", "a b", "a\n", "models--acme--small/../x"]
)
def test_what_is_no_id_names_no_folder(cache: Path, name: str) -> None:
    downloaded(cache, "acme/small")
    assert cached_model(name) is None


def test_an_id_of_the_services_table_stands_for_tiny_unless_asked_for(cache: Path) -> None:
    snapshot = downloaded(cache, "Qwen/Qwen3-0.6B")
    assert choose_model("Qwen/Qwen3-0.6B", {}, strict=False).stand_in
    assert choose_model("Qwen/Qwen3-0.6B", {}, strict=True).folder == snapshot
    given = dict([_model_folder_option("Qwen/Qwen3-0.6B")])
    assert choose_model("Qwen/Qwen3-0.6B", given, strict=False).folder == snapshot
    with pytest.raises(ValueError, match="no model with safetensors"):
        _model_folder_option("Qwen/Qwen3-8B")
    with pytest.raises(Refusal, match="download it"):
        choose_model("Qwen/Qwen3-8B", {}, strict=True)
