"""What must hold of a run whatever happened to it, told from the run's files and from what the service executed.

Nothing here asks the engine: the journal and the publications are read as the plain files that they are.
"""

from __future__ import annotations

import base64
import json
import math
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load

from cortex_training.identity import group_id
from tests.faults.reference import Reference, Weights

ENDED = {"cancelled", "terminated", "failed", "completed"}
_ENTRY = re.compile(r"([0-9]{20})-([0-9]{20})-([A-Z2-7]+)")


class Wrong(AssertionError):
    """A rule that was broken."""


@dataclass(frozen=True)
class Publication:
    epoch: int
    step: int
    manifest: dict[str, Any]


@dataclass
class Lineage:
    """One segment as the journal's plain records tell it; `open` are steps that may have been executed too.

    `hollow` is the first confirmed step that told a gradient norm of zero: nobody can vouch for weights behind it.
    """

    number: int
    job_id: str
    base: dict[str, Any] | None
    confirmed: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    hollow: int | None = None

    @property
    def start(self) -> int:
        return self.base["step"] if self.base else 0


class Evidence:
    """A run's root and the service's log and data, at one moment."""

    def __init__(self, root: Path, log: list[dict[str, Any]], *, restored: bool = True) -> None:
        """`restored`: the service's step counter goes on where the checkpoint's was, else each job counts from 0."""
        self.root = root
        self.restored = restored
        journal = _journal(root / "journal")
        self.numbers, self.records = list(journal), list(journal.values())
        self.segments = _segments(self.numbers, self.records)
        jobs = {s.job_id for s in self.segments}
        self.log = [r for r in log if r["job_id"] in jobs]
        self.publications = _publications(root)

    def count(self, segment: Lineage, step: int) -> int:
        """What the service's step counter shows in this segment after a step."""
        return step if self.restored else step - segment.start

    def executed(self, op: str, job_id: str) -> list[dict[str, Any]]:
        return [r for r in self.log if r["op"] == op and r["job_id"] == job_id]

    def log_of(self, segment: Lineage) -> list[dict[str, Any]]:
        """What the service executed for a segment. Where several used one job, each but the first began with a load."""
        parts: list[list[dict[str, Any]]] = [[]]
        for record in self.log:
            if record["job_id"] != segment.job_id:
                continue
            if record["op"] == "load" and any(r["op"] in ("step", "forward-backward") for r in parts[-1]):
                parts.append([])
            parts[-1].append(record)
        place = [s.number for s in self.segments if s.job_id == segment.job_id].index(segment.number)
        return parts[place] if place < len(parts) else []

    def steps_of(self, segment: Lineage) -> list[dict[str, Any]]:
        return [r for r in self.log_of(segment) if r["op"] == "step"]


def check_so_far(evidence: Evidence, reference: Reference, *, doubled: int = 0) -> None:
    """What holds at every moment, also right after a driver died. `doubled`: how many steps the network may repeat."""
    _journal_has_one_writer_at_a_time(evidence)
    for number, segment in enumerate(evidence.segments):
        if segment.number != number:
            raise Wrong(f"segment {number} of the journal calls itself {segment.number}")
        _steps_once(evidence, segment, doubled)
        if not doubled:
            _steps_make_the_weights(evidence, segment, reference)
        _batches_once(evidence, segment, reference, doubled)
    _failures_rename(evidence)
    for publication in evidence.publications:
        _justified(evidence, publication, reference)


def check_end(evidence: Evidence, reference: Reference, service: Any, result: dict[str, Any]) -> None:
    """What holds when the last driver has finished the run."""
    if result["steps"] != reference.steps:
        raise Wrong(f"the run ended at step {result['steps']} of {reference.steps}")
    latest = evidence.publications[-1] if evidence.publications else None
    if latest is None or latest.step != reference.steps:
        raise Wrong(f"the last step was not published; the latest publication is {latest}")
    for publication in evidence.publications:
        found = weights_of(service, publication.manifest)
        expected = reference.of_segment(publication.manifest["segment"]).weights[publication.step]
        _equal_weights(found, expected, f"published step {publication.step}")
    _metrics(evidence, reference)
    _nothing_alive(evidence, service)


def weights_of(service: Any, manifest: dict[str, Any]) -> Weights:
    """The weights of a checkpoint, exported by the service and fetched over HTTP."""
    where = f"{service.url}/{manifest['job_id']}/checkpoints/{manifest['checkpoint_id']}:export"
    answer = requests.post(where, timeout=30)
    answer.raise_for_status()
    link = next(f for f in answer.json()["files"] if f["filename"] == "model.safetensors")
    return load(requests.get(link["url"], timeout=30).content)


def replayed(evidence: Evidence, reference: Reference) -> int:
    """Steps that were executed beyond the planned ones; that the journal admits them was checked step by step."""
    return sum(len(evidence.steps_of(segment)) for segment in evidence.segments) - reference.steps


def _journal(folder: Path) -> dict[int, dict[str, Any]]:
    """Records by number: what a pack holds counts, and everything else is in a file of its own."""
    found = {int(path.name): _read(path) for path in folder.glob("[0-9]*")}
    for path in folder.glob("packed/[0-9]*"):
        found.update((record["number"], record) for record in _read(path)["records"])
    return dict(sorted(found.items()))


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError) as problem:
        raise Wrong(f"{path} is gone or torn: {problem}") from None
    return document


def _segments(numbers: list[int], records: list[dict[str, Any]]) -> list[Lineage]:
    segments: list[Lineage] = []
    steps: dict[int, int] = {}
    for number, record in zip(numbers, records, strict=True):
        if record["type"] == "segment":
            segments.append(Lineage(record["segment"], record["job_id"], record["base"]))
        elif record["type"] == "adopted":
            segments[-1].job_id = record["job_id"]
        elif record["type"] == "intent" and record["op"] == "step":
            steps[number] = record["step"]
            segments[-1].open.add(record["step"])
        elif record["type"] == "outcome" and record["intent"] in steps:
            step, result = steps[record["intent"]], record.get("result") or {}
            if record["status"] == "done":
                segments[-1].confirmed.add(step)
                if result.get("grad_norm") == 0 and segments[-1].hollow is None:
                    segments[-1].hollow = step
            # One that a save settled may land afterwards, and one that failed or answered what nobody expected may
            # have been executed.
            if record["status"] == "done" or (record["status"] == "refused" and not result.get("settled_by")):
                segments[-1].open.discard(step)
    return segments


def _publications(root: Path) -> list[Publication]:
    found = []
    for path in sorted((root / "pub").glob("*")):
        match = _ENTRY.fullmatch(path.name)
        if match is None:
            raise Wrong(f"pub/{path.name} is not an entry")
        save = base64.b32decode(match[3] + "=" * (-len(match[3]) % 8)).decode()
        manifest = _read(root / save / ".cortex-save.json")
        found.append(Publication(int(match[1]), int(match[2]), manifest))
    return found


def _journal_has_one_writer_at_a_time(evidence: Evidence) -> None:
    if evidence.numbers != list(range(1, len(evidence.numbers) + 1)):
        raise Wrong(f"the journal has gaps: {evidence.numbers}")
    epoch = 0
    for number, record in zip(evidence.numbers, evidence.records, strict=True):
        if record["type"] == "takeover":
            if record["epoch"] <= epoch:
                raise Wrong(f"record {number}: epoch {record['epoch']} took over from {epoch}")
            epoch = record["epoch"]
        elif record["epoch"] != epoch:
            raise Wrong(f"record {number} ({record['type']}) is of epoch {record['epoch']}, and {epoch} has the run")


def _steps_once(evidence: Evidence, segment: Lineage, doubled: int) -> None:
    shift = evidence.count(segment, 0)
    made = [r["global_steps"] - shift for r in evidence.steps_of(segment)]
    expected = list(range(segment.start + 1, segment.start + 1 + len(made)))
    if made != expected:
        raise Wrong(f"segment {segment.number} executed steps {made}, not {expected}")
    certain = sorted(segment.confirmed)
    if made[: len(certain)] != certain:
        raise Wrong(f"segment {segment.number} confirmed steps {certain} and executed {made}")
    beyond = len(made) - len(certain)
    if beyond > len(segment.open) + doubled:
        raise Wrong(f"segment {segment.number} executed {made}; confirmed are {certain}, open {sorted(segment.open)}")


def _steps_make_the_weights(evidence: Evidence, segment: Lineage, reference: Reference) -> None:
    """Every confirmed step left the weights that the reference has there, whether they were ever saved or not."""
    reference = reference.of_segment(segment.number)
    executed = evidence.steps_of(segment)
    for step, record in zip(sorted(segment.confirmed), executed, strict=False):
        found = record.get("weights_sha256")
        if segment.hollow is not None and step >= segment.hollow:
            break
        if found is not None and found != reference.weights_sha256(step):
            raise Wrong(f"segment {segment.number} has other weights than the reference after step {step}")


def _batches_once(evidence: Evidence, segment: Lineage, reference: Reference, doubled: int) -> None:
    """Every forward-backward is the one that the reference makes there, on the weights that it has there."""
    reference = reference.of_segment(segment.number)
    names = {
        group_id(segment.job_id, segment.number, step, micro_batch, attempt): (step, micro_batch)
        for step, micro_batch in reference.losses
        for attempt in range(4)
    }
    done: set[tuple[int, int]] = set()
    step = segment.start
    for record in evidence.log_of(segment):
        if record["op"] == "step":
            step += 1
            missing = {at for at in reference.losses if at[0] == step} - done
            if missing and not doubled:
                raise Wrong(f"segment {segment.number} stepped to {step} without micro-batches {sorted(missing)}")
        if record["op"] != "forward-backward":
            continue
        at = names.get(record["chunk_group"])
        if at is None:
            raise Wrong(f"segment {segment.number} ran a batch under the unknown name {record['chunk_group']}")
        if at in done:
            raise Wrong(f"segment {segment.number} ran {at} twice")
        done.add(at)
        if at[0] != step + 1 and not doubled:
            raise Wrong(f"segment {segment.number} ran {at} behind step {step}")
        if record["frame_sha256"] != reference.frames[at]:
            raise Wrong(f"segment {segment.number} sent another frame for {at}")
        trusted = segment.hollow is None or at[0] <= segment.hollow
        if trusted and record["loss"] != reference.losses[at]:
            raise Wrong(f"segment {segment.number}: loss {record['loss']} for {at}, not {reference.losses[at]}")


def _failures_rename(evidence: Evidence) -> None:
    """A batch that failed under a name is not sent under that name again: it would only fail again."""
    by_number = dict(zip(evidence.numbers, evidence.records, strict=True))
    failed: set[tuple[int, ...]] = set()
    for record in evidence.records:
        if record["type"] == "outcome" and record["status"] == "failed":
            intent = by_number[record["intent"]]
            if intent["op"] == "forward_backward":
                name = (intent["segment"], intent["step"], intent["micro_batch"], intent["attempt"])
                if name in failed:
                    raise Wrong(f"(segment, step, micro-batch, attempt) {name} failed and was sent again")
                failed.add(name)


def _justified(evidence: Evidence, publication: Publication, reference: Reference) -> None:
    """Published only once a finite loss was measured on these very weights."""
    step, manifest = publication.step, publication.manifest
    segment = evidence.segments[manifest["segment"]]
    reference = reference.of_segment(segment.number)
    if manifest["global_steps"] != evidence.count(segment, step) or manifest["job_id"] != segment.job_id:
        raise Wrong(f"step {step} was published from a checkpoint with global_steps {manifest['global_steps']}")
    names = {group_id(segment.job_id, segment.number, step + 1, 0, attempt) for attempt in range(4)}
    if not any(r["chunk_group"] in names for r in evidence.log):
        raise Wrong(f"step {step} was published before a loss was measured on its weights")
    loss = manifest["metrics"]["loss"]
    if manifest["metrics"]["step"] != step or loss is None or not math.isfinite(loss):
        raise Wrong(f"the manifest of step {step} says {manifest['metrics']}")
    if loss not in (reference.losses[step + 1, 0], reference.mean_loss(step + 1)):
        raise Wrong(f"step {step} was published with loss {loss}")


def _equal_weights(found: Weights, expected: Weights, what: str) -> None:
    for name, tensor in expected.items():
        if not torch.equal(found[name], tensor):
            raise Wrong(f"{what}: {name} differs by up to {(found[name] - tensor).abs().max():g}")


def _metrics(evidence: Evidence, reference: Reference) -> None:
    for path in evidence.root.glob("exec/*/metrics.jsonl"):
        # Without a last line that was torn: rows are not synced.
        for row in map(json.loads, path.read_text().rpartition("\n")[0].splitlines()):
            if row["loss"] != reference.of_segment(row["segment"]).mean_loss(row["step"]):
                raise Wrong(f"{path}: step {row['step']} has loss {row['loss']}")


def _nothing_alive(evidence: Evidence, service: Any) -> None:
    """No job of the run, and none that bears its name though the journal does not know it."""
    jobs = requests.get(service.url, timeout=30).json()["jobs"]
    ours = {s.job_id for s in evidence.segments}
    for job in jobs:
        mine = job["job_id"] in ours or job.get("experiment_name") == name_of(evidence.root)
        # A state that is a number is one that the service's list has no name for: only `cancelling`, see `--assume`.
        state = "cancelling" if isinstance(job["status"], int) else job["status"].lower().removeprefix("job_state_")
        if mine and state not in {*ENDED, "cancelling"}:
            raise Wrong(f"job {job['job_id']} is still {job['status']}")


def name_of(root: Path) -> str:
    """The experiment name that a run on this root gives its jobs."""
    return f"faults-{uuid.uuid5(uuid.NAMESPACE_URL, str(root))}"
