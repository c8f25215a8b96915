"""Where a run stands, told from its journal alone. No I/O: the same records always give the same state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cortex_training.training.journal import Record

FIRST, REPLACEMENT, ROLLBACK, CONTINUATION, MOVE = "first", "replacement", "rollback", "continuation", "move"
"""Why a segment began: with the run; for a lost job (or for lost weights, in the same job); after a divergence; for
more steps or a larger budget; because the plan names another job."""


@dataclass
class Operation:
    """One intent and what is known of it. `status`: ``open`` (nothing came back), ``done``, ``failed`` or
    ``refused``.
    """

    number: int
    op: str
    segment: int
    step: int
    micro_batch: int = 0
    attempt: int = 0
    request_id: str | None = None
    status: str = "open"
    result: dict[str, Any] = field(default_factory=dict)
    window_s: float | None = None
    ahead: bool = False


@dataclass(frozen=True)
class Base:
    """A resumable checkpoint that a segment starts from: `step` steps are in its weights."""

    checkpoint_id: str
    source_job_id: str
    step: int
    global_steps: int

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Base:
        return cls(value["checkpoint_id"], value["source_job_id"], value["step"], value["global_steps"])


@dataclass
class Segment:
    """One lineage of weights in one job: everything between two reloads.

    `owned`: the run ends the job. `given`: the job was there before the segment, so its base has to be loaded into it,
    and how it counts its steps is not known.
    """

    number: int
    job_id: str
    owned: bool
    given: bool
    base: Base | None
    reason: str
    cause: str = REPLACEMENT
    operations: list[Operation] = field(default_factory=list)
    ended: str | None = None
    rescued: Base | None = None
    created: bool = False
    complete: bool = False
    saved_at: float = 0.0
    stepped_on_nothing: int | None = None
    """The first confirmed step that told a gradient norm of zero."""
    _of: dict[tuple[str, int | None], list[Operation]] = field(default_factory=dict, repr=False)
    _losses: dict[int, dict[int, float]] = field(default_factory=dict, repr=False)
    _confirmed: list[Operation] = field(default_factory=list, repr=False)

    @property
    def start_step(self) -> int:
        return self.base.step if self.base else 0

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)
        for step in (operation.step, None):
            self._of.setdefault((operation.op, step), []).append(operation)

    def close(self, operation: Operation, status: str, result: Mapping[str, Any], at: float) -> None:
        """Take note of what became of an operation."""
        operation.status, operation.result = status, dict(result)
        if status != "done":
            return
        if operation.op == "forward_backward" and result.get("loss") is not None:
            # A loss that is not finite is journalled as text, since JSON has no word for it.
            self._losses.setdefault(operation.step, {})[operation.micro_batch] = float(result["loss"])
        elif operation.op == "save" and not result.get("settles"):
            self.saved_at = at
        elif operation.op == "step":
            self._confirmed.append(operation)
            if result.get("grad_norm") == 0 and self.stepped_on_nothing is None:
                self.stepped_on_nothing = operation.step

    def of(self, op: str, step: int | None = None) -> list[Operation]:
        """The operations of a kind, in order; those of one step when it is given."""
        return self._of.get((op, step), [])

    @property
    def confirmed_step(self) -> int:
        """The last step that the service confirmed (its result, or the save that settled it)."""
        return self._confirmed[-1].step if self._confirmed else self.start_step

    @property
    def unsettled_step(self) -> Operation | None:
        """A step that may or may not have been executed."""
        behind = self.of("step", self.confirmed_step + 1)
        return next((o for o in behind if o.status == "open"), None)

    @property
    def holds_nothing_new(self) -> bool:
        """Whether the journal proves that the job holds no gradients behind the last confirmed step, and that nothing
        which was sent to it may still land.
        """
        sent = [o for o in self.operations if o.status != "refused"]
        batches = [o for o in sent if o.op == "forward_backward" and o.step > self.confirmed_step]
        return self.rescued is None and not batches and all(o.status != "open" for o in sent)

    @property
    def gradients_are_pending(self) -> bool:
        """Whether a forward-backward behind the last confirmed step may have left gradients on the workers."""
        behind = self.of("forward_backward", self.confirmed_step + 1)
        return any(o.request_id is not None and o.status in ("open", "done") for o in behind)

    @property
    def given_up(self) -> str | None:
        """Why nobody may go on in this segment, also when the driver that found out died before it wrote ``ended``."""
        if self.ended is not None:
            return self.ended
        if self.rescued is not None:
            return f"step {self.rescued.step + 1} was sent and may still land on job {self.job_id}"
        next_step = self.confirmed_step + 1
        if any(o.status == "failed" for o in self.of("step", next_step)):
            return f"step {next_step} failed on job {self.job_id}"
        batches = self.of("forward_backward", next_step)
        if self.was_sent_ahead(next_step) and any(o.status == "failed" for o in batches):
            return f"a forward-backward of step {next_step} that was sent ahead failed on job {self.job_id}"
        return None

    def was_sent_ahead(self, step: int) -> bool:
        """Whether a forward-backward of `step` was sent before the result of the step before it was there."""
        return any(o.ahead for o in self.of("forward_backward", step))

    @property
    def loaded(self) -> bool:
        return any(o.status == "done" for o in self.of("load"))

    @property
    def offset(self) -> int | None:
        """``global_steps`` minus the step's number, as the first confirmed step of the segment showed it."""
        first = self._confirmed[0] if self._confirmed else None
        return first.result["global_steps"] - first.step if first else None

    @property
    def certain_offset(self) -> int | None:
        """`offset`, also before the first step where it is known: in a job that the segment made and nobody has
        stepped, or by a save behind the start.

        A job that was given may have been stepped, and a service may count from zero after a restore.
        """
        if self.offset is not None:
            return self.offset
        if not self.given and self.base is None:
            return 0
        counted = [o for o in self.of("save", self.start_step) if o.status == "done"]
        return counted[0].result["global_steps"] - self.start_step if counted else None

    @property
    def predicted_offset(self) -> int:
        """What `offset` is when the service restores its count with the weights, as the local service does."""
        return self.base.global_steps - self.base.step if self.base else 0

    @property
    def offset_is_certain(self) -> bool:
        """Whether counts can be trusted enough to publish: the predicted count came back, or a second step agrees, or
        a save behind the first one does (in the run's last step no second one follows).
        """
        if self.offset is None:
            return False
        if self.offset == self.predicted_offset or len(self._confirmed) > 1:
            return True
        return any(o.result["global_steps"] - o.step == self.offset for o in self.saves())

    def loss(self, step: int) -> float | None:
        """Mean loss of the confirmed micro-batches of a step: it was measured on the weights of ``step - 1``."""
        losses = self._losses.get(step)
        return sum(losses.values()) / len(losses) if losses else None

    @property
    def losses(self) -> dict[int, float]:
        """The loss of every step that was measured in this segment."""
        return {step: sum(found.values()) / len(found) for step, found in self._losses.items()}

    def weights_are_finite(self, step: int) -> bool:
        """Whether a finite loss was measured on the weights that `step` steps made."""
        loss = self.loss(step + 1)
        return loss is not None and math.isfinite(loss)

    def saves(self, step: int | None = None) -> list[Operation]:
        """The saves that hold the weights of their step; one that only settled a doubt says less."""
        return [o for o in self.of("save", step) if o.status == "done" and not o.result.get("settles")]

    def done(self, op: str, step: int | None = None) -> bool:
        return any(o.status == "done" for o in self.of(op, step))

    def failures(self, op: str, step: int) -> int:
        return sum(1 for o in self.of(op, step) if o.status == "failed")

    def lost_steps(self, step: int) -> int:
        """How often `step` was sent and, by a save's count, was not executed."""
        return sum(1 for o in self.of("step", step) if o.status == "refused" and "settled_by" in o.result)

    def attempts_failed(self, step: int, micro_batch: int) -> int:
        return sum(
            1 for o in self.of("forward_backward", step) if o.micro_batch == micro_batch and o.status == "failed"
        )


@dataclass
class RunState:
    """A run, replayed.

    `skipped` are the data positions (steps of an undisturbed run) that rollbacks left out, `lr_factor` is what they
    multiplied the learning rate with.
    """

    epoch: int = 0
    segments: list[Segment] = field(default_factory=list)
    finished_steps: int = 0
    paused: str | None = None
    stopped: str | None = None
    """Why the driver that has the run gave up."""
    driver: Mapping[str, Any] = field(default_factory=dict)
    """Who has the run, as it says itself: ``host``, ``pid``, ``attempt``."""
    released: bool = False
    """Whether that driver sends nothing more."""
    last_at: float = 0.0
    """When the last record was written, UTC seconds."""
    diverged: tuple[int, str] | None = None
    skipped: tuple[int, ...] = ()
    lr_factor: float = 1.0
    steps_show_gradients: bool = False
    """Whether a step of this run has told a gradient norm that is not zero."""
    cancelled: set[str] = field(default_factory=set)
    _running: dict[str, tuple[float, int]] = field(default_factory=dict, repr=False)
    _stopped: dict[str, float] = field(default_factory=dict, repr=False)
    _operations: dict[int, tuple[Segment, Operation]] = field(default_factory=dict, repr=False)

    @property
    def current(self) -> Segment | None:
        return self.segments[-1] if self.segments else None

    @property
    def job_ids(self) -> list[str]:
        """Every job that the run ever named, owned ones only, in order and once."""
        return list(dict.fromkeys(s.job_id for s in self.segments if s.owned))

    @property
    def replacements(self) -> int:
        """Jobs that took the place of a lost one; going on after a clean end, or after a rollback, is none."""
        return sum(1 for s in self.segments if s.cause == REPLACEMENT)

    @property
    def rollbacks(self) -> int:
        return sum(1 for s in self.segments if s.cause == ROLLBACK)

    def position(self, step: int) -> int:
        """Which step's batches `step` trains on: its own, unless a rollback left some out before them."""
        position = step
        for skipped in self.skipped:
            if position >= skipped:
                position += 1
        return position

    def has_run(self, job_id: str) -> bool:
        return job_id in self._running

    def gpu_seconds(self, now: float) -> float:
        """GPU seconds of the run's own jobs from when each was seen running to its end, or to `now` (UTC seconds).

        A job that was lost unseen counts until somebody noticed.
        """
        return sum(
            max(0.0, self._stopped.get(job_id, now) - since) * gpus for job_id, (since, gpus) in self._running.items()
        )

    @property
    def losses(self) -> dict[int, float]:
        """Loss per step; where a step was replayed, the last segment's word counts."""
        out: dict[int, float] = {}
        for segment in self.segments:
            out.update(segment.losses)
        return out

    def apply(self, record: Record) -> None:
        """Move the state by one record. Unknown types are newer details that don't change what is known here."""
        self.last_at = record.at
        self.released = record.type == "released"
        handler = _HANDLERS.get(record.type)
        if handler:
            handler(self, record)

    def operation(self, number: int) -> Operation:
        return self._operations[number][1]


def replay(records: Iterable[Record]) -> RunState:
    state = RunState()
    for record in records:
        state.apply(record)
    return state


def _takeover(state: RunState, record: Record) -> None:
    state.epoch = record.epoch
    state.driver = record.body.get("info") or {}
    state.stopped = None


def _segment(state: RunState, record: Record) -> None:
    body = record.body
    base = Base.from_dict(body["base"]) if body.get("base") else None
    # Records of version 1 name no cause: all but the first segment counted as replacements there.
    cause = body.get("cause") or (REPLACEMENT if state.segments else FIRST)
    owned = body["owned"]
    given = body.get("given", not owned)
    segment = Segment(body["segment"], body["job_id"], owned, given, base, body["reason"], cause)
    segment.saved_at = record.at
    state.segments.append(segment)
    state.paused = None
    if cause == ROLLBACK:
        state.diverged = None
        state.skipped = tuple(sorted({*state.skipped, *body["skipped"]}))
        state.lr_factor *= body["lr_factor"]


def _adopted(state: RunState, record: Record) -> None:
    """The service gave the job another id than ours: its word wins, or the job could never be found again."""
    state.segments[-1].job_id = record.body["job_id"]
    state.segments[-1].created = True


def _created(state: RunState, record: Record) -> None:
    state.segments[-1].created = True


def _intent(state: RunState, record: Record) -> None:
    body = record.body
    operation = Operation(
        record.number, body["op"], body["segment"], body["step"], body.get("micro_batch", 0), body.get("attempt", 0)
    )
    operation.window_s = body.get("window_s")
    operation.ahead = body.get("ahead", False)
    segment = state.segments[-1]
    segment.add(operation)
    # A job that was kept, or whose budget was raised in time, goes on in place.
    segment.complete = False
    state.paused = None
    state._operations[record.number] = (segment, operation)


def _sent(state: RunState, record: Record) -> None:
    state.operation(record.body["intent"]).request_id = record.body["request_id"]


def _outcome(state: RunState, record: Record) -> None:
    segment, operation = state._operations[record.body["intent"]]
    segment.close(operation, record.body["status"], record.body.get("result") or {}, record.at)
    if operation.op == "step" and operation.result.get("grad_norm"):
        state.steps_show_gradients = True


def _rescued(state: RunState, record: Record) -> None:
    """A save holds everything that this segment confirmed: its successor can start from there without losing a step."""
    state.segments[-1].rescued = Base.from_dict(record.body["base"])


def _ended(state: RunState, record: Record) -> None:
    segment = state.segments[-1]
    segment.ended = record.body["reason"]
    state._stopped.setdefault(segment.job_id, record.at)


def _running(state: RunState, record: Record) -> None:
    state._running.setdefault(record.body["job_id"], (record.at, record.body["gpus"]))


def _paused(state: RunState, record: Record) -> None:
    state.paused = record.body["reason"]
    state.segments[-1].complete = True


def _stopped(state: RunState, record: Record) -> None:
    state.stopped = record.body["reason"]


def _diverged(state: RunState, record: Record) -> None:
    state.diverged = (record.body["step"], record.body["loss"])


def _cancelled(state: RunState, record: Record) -> None:
    job_id = record.body["job_id"]
    state.cancelled.add(job_id)
    state._stopped.setdefault(job_id, record.at)


def _finished(state: RunState, record: Record) -> None:
    state.finished_steps = record.body["steps"]
    state.segments[-1].complete = True


_HANDLERS = {
    "takeover": _takeover,
    "segment": _segment,
    "adopted": _adopted,
    "created": _created,
    "intent": _intent,
    "sent": _sent,
    "outcome": _outcome,
    "rescued": _rescued,
    "ended": _ended,
    "diverged": _diverged,
    "cancelled": _cancelled,
    "finished": _finished,
    "paused": _paused,
    "stopped": _stopped,
    "running": _running,
}
