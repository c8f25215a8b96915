"""Saves as Trainer, torch and the service's clients write them, watched on both stores."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cortex_training.publication import (
    FRAMEWORKS,
    Entry,
    PosixStore,
    PublicationLog,
    SaveError,
    SaveManifest,
    Store,
    StoreError,
    Watch,
)
from tests.publication.servers import put_save

SAVES = "exec/a-e1"
Scan = Callable[[], list[tuple[int, str]]]


def put_hf(store: Store, folder: str, state: object = None, *, raw: bytes | None = None) -> None:
    save = put_save(store, f"{SAVES}/{folder}")
    step = int(folder.rsplit("-", 1)[1])
    data = raw if raw is not None else json.dumps(state or {"global_step": step, "log_history": []}).encode()
    store.write(f"{save}/trainer_state.json", data)


def watching(store: Store, framework: str, epoch: int = 1) -> Scan:
    """A watch, as a function that scans once and returns what was published."""
    watch = Watch(PublicationLog(store), FRAMEWORKS[framework], SAVES, epoch)

    def scan() -> list[tuple[int, str]]:
        found: list[Entry] = []
        watch.scan(found.append, 60)
        return [(entry.step, entry.save) for entry in found]

    return scan


def published(store: Store) -> list[tuple[int, int, str]]:
    return [(entry.epoch, entry.step, entry.save) for entry in PublicationLog(store).entries()]


def test_complete_saves_are_published_once_in_step_order(store: Store) -> None:
    scan = watching(store, "hf")
    assert scan() == []  # the saves folder is not there yet
    for folder in ("checkpoint-10", "checkpoint-9", "checkpoint-0100"):
        put_hf(store, folder)
    put_save(store, f"{SAVES}/runs")
    put_save(store, f"{SAVES}/checkpoint-x")
    put_save(store, f"{SAVES}/tmp-checkpoint-11")
    assert scan() == [(9, f"{SAVES}/checkpoint-9"), (10, f"{SAVES}/checkpoint-10"), (100, f"{SAVES}/checkpoint-0100")]
    assert scan() == []
    put_hf(store, "checkpoint-101")
    assert scan() == [(101, f"{SAVES}/checkpoint-101")]


def test_a_restarted_watch_passes_over_what_is_published(store: Store) -> None:
    put_hf(store, "checkpoint-1")
    assert len(watching(store, "hf")()) == 1
    put_hf(store, "checkpoint-2")
    assert watching(store, "hf")() == [(2, f"{SAVES}/checkpoint-2")]


@pytest.mark.parametrize("cut", [0, 1, 10, 30])
def test_a_save_that_is_being_written_is_passed_over_until_it_is_done(store: Store, cut: int) -> None:
    put_hf(store, "checkpoint-1")
    put_save(store, f"{SAVES}/checkpoint-3")
    put_hf(store, "checkpoint-2", raw=b'{"global_step": 2, "log_history": [NaN]}'[:cut])
    scan = watching(store, "hf")
    assert scan() == [(1, f"{SAVES}/checkpoint-1")]
    assert scan() == []
    put_hf(store, "checkpoint-2", raw=b'{"global_step": 2, "log_history": [NaN]}')
    assert scan() == [(2, f"{SAVES}/checkpoint-2")]


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense",
        b'{"global_step": 2} {}',
        b'{"global_step": 3}',
        b'{"global_step": 2.0}',
        b'{"global_step": true}',
        b'{"step": 2}',
        b"[2]",
        b"2 ",
    ],
)
def test_a_broken_save_is_named_and_costs_the_others_nothing(store: Store, raw: bytes) -> None:
    for folder in ("checkpoint-1", "checkpoint-3"):
        put_hf(store, folder)
    put_hf(store, "checkpoint-2", raw=raw)
    with pytest.raises(SaveError, match=r"checkpoint-2/trainer_state\.json"):
        watching(store, "hf")()
    assert [step for _, step, _ in published(store)] == [1, 3]


def test_a_folder_in_place_of_the_marker_is_a_fault(posix_store: PosixStore) -> None:
    put_save(posix_store, f"{SAVES}/checkpoint-1/trainer_state.json")
    with pytest.raises(StoreError, match=r"trainer_state\.json"):
        watching(posix_store, "hf")()


def test_two_folders_of_one_step_are_named(store: Store) -> None:
    put_hf(store, "checkpoint-5")
    put_hf(store, "checkpoint-05")
    with pytest.raises(SaveError, match="checkpoint-05 and checkpoint-5 are two saves of step 5"):
        watching(store, "hf")()


@pytest.mark.parametrize("folder", ["step-7", "step_7", "checkpoint-7", "global_step7", "7", "0007"])
def test_dcp_folders(store: Store, folder: str) -> None:
    scan = watching(store, "dcp")
    put_save(store, f"{SAVES}/{folder}", "__0_0.distcp")
    put_save(store, f"{SAVES}/{folder}", ".metadata.tmp")
    for other in ("step7", "epoch-7", "7x", "-7"):
        put_save(store, f"{SAVES}/{other}", ".metadata")
    assert scan() == []
    store.write(f"{SAVES}/{folder}/.metadata", b"")
    assert scan() == [(7, f"{SAVES}/{folder}")]


def test_cortex_saves_are_complete_with_their_manifest(store: Store) -> None:
    scan = watching(store, "cortex")
    put_save(store, f"{SAVES}/cp_1")
    assert scan() == []
    SaveManifest("job", "cp_1", "weights-only", 12).write(store, f"{SAVES}/cp_1")
    SaveManifest("job", "cp_2", "resumable", 12).write(store, f"{SAVES}/cp_2")
    SaveManifest("job", "cp_0", "resumable", 6).write(store, f"{SAVES}/cp_0")
    assert scan() == [(6, f"{SAVES}/cp_0"), (12, f"{SAVES}/cp_1"), (12, f"{SAVES}/cp_2")]
    store.write(f"{SAVES}/cp_3/.cortex-save.json", b'{"v": 1}')
    with pytest.raises(SaveError, match=r"cp_3.*job_id"):
        scan()


def test_the_last_scan_comes_after_the_stop(store: Store) -> None:
    found: list[Entry] = []
    waits: list[float] = []

    def stop(seconds: float) -> bool:
        waits.append(seconds)
        put_hf(store, f"checkpoint-{len(waits)}")
        return len(waits) == 3

    watch = Watch(PublicationLog(store), FRAMEWORKS["hf"], SAVES, 4)
    watch.run(stop, found.append, interval_s=7, last_timeout_s=60)
    assert waits == [7, 7, 7]
    assert [(entry.epoch, entry.step) for entry in found] == [(4, 1), (4, 2), (4, 3)]


def test_a_scan_ends_at_its_time_limit(store: Store) -> None:
    put_hf(store, "checkpoint-1")
    watch = Watch(PublicationLog(store), FRAMEWORKS["hf"], SAVES, 1)
    with pytest.raises(StoreError, match=r"not done within 1e-09 s|not sent, as the time limit has passed"):
        watch.scan(lambda entry: None, 1e-9)


def test_a_trainers_saves_are_published_by_a_watch_beside_it(posix_store: PosixStore) -> None:
    """The Trainer of transformers writes; every entry was complete when it was published, and all get published."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = transformers.TrainingArguments(
        output_dir=posix_store.locate(SAVES),
        max_steps=6,
        save_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=rows)
    stop = threading.Event()
    found: list[tuple[int, set[str]]] = []
    watch = Watch(PublicationLog(posix_store), FRAMEWORKS["hf"], SAVES, 1)

    def look(entry: Entry) -> None:
        found.append((entry.step, {path.name for path in Path(entry.location).iterdir()}))

    beside = threading.Thread(target=watch.run, args=(stop.wait, look), kwargs={"interval_s": 0.001})
    beside.start()
    try:
        trainer.train()
    finally:
        stop.set()
        beside.join()
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    for step, files in found:
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files
        state = json.loads(Path(posix_store.locate(f"{SAVES}/checkpoint-{step}/trainer_state.json")).read_text())
        assert state["global_step"] == step


def test_a_distributed_checkpoint_is_complete_when_its_metadata_is(posix_store: PosixStore) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    scan = watching(posix_store, "dcp")
    seen_while_writing = []

    class LookingWriter(dcp.FileSystemWriter):
        def finish(self, *arguments: object, **options: object) -> None:
            seen_while_writing.append(scan())  # data is written, metadata is not
            super().finish(*arguments, **options)

    for step in (3, 4):
        path = posix_store.locate(f"{SAVES}/step-{step}")
        dcp.save({"weight": torch.zeros(4)}, storage_writer=LookingWriter(path), no_dist=True)
        assert scan() == [(step, f"{SAVES}/step-{step}")]
    assert seen_while_writing == [[], []]
