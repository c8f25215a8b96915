"""Drivers in processes of their own, between them and the service a bad network, and the oracle after each of them."""

from __future__ import annotations

import copy
import json
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex_training.datasets import Dataset, build_dataset
from cortex_training.local.control_client import ServiceControl
from tests.faults.driver import Hit, Orders
from tests.faults.nursery import Child
from tests.faults.oracle import Evidence, Wrong, check_end, check_so_far, name_of
from tests.faults.power import Disk
from tests.faults.proxy import FaultProxy
from tests.faults.reference import Reference, train

STEPS, MICRO_BATCHES, SAVE_EVERY, PEAK_RATE = 5, 2, 2, 3e-3
MAX_SEQ_LEN = 96

SUB_JOBS = [
    {
        "job_type": "training",
        "model_name": "tiny",
        "dtype": "float32",
        "seed": 7,
        "training_config": {
            "optimizer": {"name": "AdamW", "lr": PEAK_RATE},
            "max_seq_len": MAX_SEQ_LEN,
            "train_batch_size": 2,
            "n_gpus": 1,
        },
    },
    {"job_type": "sampling", "model_name": "tiny", "inference_config": {"max_seq_len": MAX_SEQ_LEN, "n_gpus": 1}},
]


@dataclass(frozen=True)
class Material:
    """A dataset of real sentences and what training on it must give."""

    manifest: Path
    reference: Reference

    @classmethod
    def make(cls, folder: Path, model_folder: Path) -> Material:
        rows = [
            {"prompt": f"What comes after {n}?", "completion": f"After {n} comes {n + 1}, and then comes {n + 2}."}
            for n in range(60)
        ]
        build_dataset(rows, folder / "data", tokenizer=model_folder, max_seq_len=MAX_SEQ_LEN, seed=1)
        manifest = folder / "data" / "manifest.json"
        batches = Dataset.open(manifest).batches(2, MICRO_BATCHES, 0)
        frames = {
            (step, micro_batch): batches.frame(step, micro_batch)
            for step in range(1, STEPS + 2)
            for micro_batch in range(MICRO_BATCHES)
        }
        reference = train(model_folder, frames, steps=STEPS, micro_batches=MICRO_BATCHES, peak_rate=PEAK_RATE)
        return cls(manifest, reference)


@dataclass(frozen=True)
class Ended:
    """How a driver's process ended."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        if self.code != 0:
            raise Wrong(f"the driver ended with {self.code}:\n{self.err}")
        document: dict[str, Any] = json.loads(self.out)
        return document


class Scene:
    """One run on a root of its own, its service and its network."""

    def __init__(self, folder: Path, service: Any, proxy: FaultProxy, material: Material) -> None:
        self.service = service
        self.proxy = proxy
        self.material = material
        self.root = folder / "run"
        self.doubled = 0
        self.restored = True
        self.mistake: str | None = None
        self.chunk_payload_bytes: int | None = None
        self.pack_records: int | None = None
        self.spoiled_frame: str | None = None
        self.disk: Disk | None = None
        # Far beyond what a driver needs on a busy machine: only one that hangs is not done by then.
        self.patience_s = 240.0
        self.environment: dict[str, str] = {}
        # A root that is no directory is copied to `root` before the judge looks at it.
        self.fetch_root: Callable[[], None] = lambda: None
        self.connection = ["--base-url", proxy.base_url, "--database", service.database, "--schema", service.schema]
        self._plan_file = folder / "plan.json"
        self.write_plan()

    def write_plan(self, **changes: Any) -> None:
        plan = {
            "root": str(self.root),
            "dataset": str(self.material.manifest),
            "steps": STEPS,
            "micro_batch_size": 2,
            "micro_batches_per_step": MICRO_BATCHES,
            "save_every_steps": SAVE_EVERY,
            "weight_sync_every_steps": SAVE_EVERY,
            "learning_rate": {"schedule": "linear", "peak": PEAK_RATE},
            "keep_publications": 10,
            "max_replacements": 8,
            "experiment_name": name_of(self.root),
            "sub_jobs": copy.deepcopy(SUB_JOBS),
            "patience_s": 30,
            **changes,
        }
        self._plan_file.write_text(json.dumps(plan))

    def watch_the_disk(self, chance: random.Random | None = None) -> None:
        """Make power losses possible; `chance` decides what survives of what was not synced (None: nothing does)."""
        self.disk = Disk(self.root, self._plan_file.with_name("synced.jsonl"), chance)

    def start(self, *hits: Hit, trace: Path | None = None, window_s: float = 1.0) -> Child:
        orders = Orders(
            tuple(hits),
            str(trace) if trace else None,
            window_s,
            self.mistake,
            self.chunk_payload_bytes,
            self.pack_records,
            self.spoiled_frame,
            (str(self.disk.root), str(self.disk.notes)) if self.disk else None,
        )
        arguments = ["cortex-training", *self.connection, "train", str(self._plan_file)]
        return Child(arguments, {**self.environment, "FAULTS": orders.to_environment()})

    def wait(self, process: Child) -> Ended:
        """The end of a driver, checked: whatever it left behind must be right already."""
        try:
            out, err = process.communicate(timeout=self.patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.check_so_far()
            raise Wrong(f"the driver was not done after {self.patience_s:g} s") from None
        if self.disk:
            self.disk.lose_what_was_lost()
        self.check_so_far()
        return Ended(process.wait(), out, err)

    def drive(self, *hits: Hit, **options: Any) -> Ended:
        return self.wait(self.start(*hits, **options))

    def finish(self, drivers: int = 1) -> dict[str, Any]:
        """Let a driver finish the run undisturbed, and check everything. `drivers` is how many starts it may take."""
        ended = self.drive()
        while ended.code != 0 and drivers > 1:
            drivers -= 1
            ended = self.drive()
        result = ended.result
        check_end(self.evidence, self.material.reference, self.service, result)
        return result

    def check_so_far(self) -> None:
        self.fetch_root()
        if (self.root / "journal").exists():
            check_so_far(self.evidence, self.material.reference, doubled=self.doubled)

    @property
    def control(self) -> ServiceControl:
        """The weather of the service; it changes for everybody who uses the service."""
        control: ServiceControl = self.service.control
        return control

    @property
    def job_id(self) -> str:
        """The job that the run is in now."""
        return self.evidence.segments[-1].job_id

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.root, self.service.execution_log(), restored=self.restored)


def wait_until_frozen(process: Child, timeout_s: float = 240.0) -> bool:
    """Wait until a driver was stopped by its own SIGSTOP; False when it ended instead."""
    try:
        return process.wait_until_frozen(timeout_s)
    except subprocess.TimeoutExpired:
        raise Wrong("the driver did not come to the point where it was to be frozen") from None


def wake(process: Child) -> None:
    process.send_signal(signal.SIGCONT)


def passed(trace: Path) -> Sequence[tuple[str, int]]:
    """The crash points that a driver passed, with the step they were about, in order; without renewals of a sending
    window, whose number depends on how fast the machine is.
    """
    if not trace.exists():
        return []
    found = [(point, step) for point, step in map(json.loads, trace.read_text().splitlines())]
    return [(point, step) for point, step in found if not point.endswith("record renewed")]
