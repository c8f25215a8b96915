import json
from dataclasses import replace

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication import SavedFile, SaveError, SaveManifest, Store

FILES = (SavedFile("model.safetensors", 1024, "0" * 64), SavedFile("deep/config.json", 0, "a" * 64))
MANIFEST = SaveManifest(
    "0b6c", "cp_1", "weights-only", 12, segment=2, created_at="2026-07-20T18:05:00Z", files=FILES, metrics={"loss": 1.5}
)


def test_a_manifest_reads_back(store: Store) -> None:
    MANIFEST.write(store, "exec/a/cp_1")
    assert SaveManifest.read(store, "exec/a/cp_1") == MANIFEST
    document = json.loads(store.read("exec/a/cp_1/.cortex-save.json"))
    assert document["v"] == 1
    assert document["files"][0] == {"path": "model.safetensors", "size": 1024, "sha256": "0" * 64}


def test_a_save_without_a_manifest_is_named(store: Store) -> None:
    with pytest.raises(SaveError, match=r"exec/a/cp_1/\.cortex-save\.json"):
        SaveManifest.read(store, "exec/a/cp_1")


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": ""},
        {"checkpoint_id": 7},
        {"checkpoint_type": "full"},
        {"global_steps": -1},
        {"global_steps": True},
        {"segment": 1.0},
        {"created_at": 1753034700},
        {"metrics": {"loss": float("nan")}},
        {"metrics": {"loss": object()}},
        {"files": (SavedFile("../x", 1, "0" * 64),)},
        {"files": (SavedFile("x", -1, "0" * 64),)},
        {"files": (SavedFile("x", 1, "0" * 63),)},
        {"files": (SavedFile("x", 1, "0" * 64), SavedFile("x", 1, "0" * 64))},
    ],
)
def test_what_cannot_be_read_back_is_not_written(store: Store, change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="save manifest"):
        replace(MANIFEST, **change).write(store, "exec/a/cp_1")  # type: ignore[arg-type]
    assert not store.holds_save("exec/a/cp_1")


def document(**change: object) -> bytes:
    return json.dumps(json.loads(MANIFEST.to_bytes()) | change).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a save manifest"),
        (b"{", "not a save manifest"),
        (b"\xff", "not a save manifest"),
        (b"[]", "not an object"),
        (b"{}", "version None"),
        (document(v=2), "version 2"),
        (document(v="1"), "version '1'"),
        (document(v=True), "version True"),
        (document(job_id=None), "job_id is None"),
        (document(files={}), "files is {}"),
        (document(files=[[]]), "which has no path"),
        (document(files=[{"path": "/etc/passwd", "size": 1, "sha256": "0" * 64}]), "/etc/passwd"),
        (document(files=[{"path": "x", "size": "1", "sha256": "0" * 64}]), "size '1'"),
        (document(files=[{"path": "x", "size": 1, "sha256": "G" * 64}]), "sha256"),
        (document(metrics=[]), "metrics"),
    ],
)
def test_a_broken_manifest_is_named_with_its_fault(data: bytes, said: str) -> None:
    with pytest.raises(SaveError, match=r"^/root/m\.json: ") as raised:
        SaveManifest.from_bytes(data, "/root/m.json")
    assert said in str(raised.value)


@pytest.mark.parametrize("field", list(json.loads(MANIFEST.to_bytes())))
def test_each_field_is_needed(field: str) -> None:
    whole = json.loads(MANIFEST.to_bytes())
    del whole[field]
    with pytest.raises(SaveError, match="version" if field == "v" else f"no field {field}"):
        SaveManifest.from_bytes(json.dumps(whole).encode(), "/root/m.json")
