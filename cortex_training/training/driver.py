"""One driver of a run: it owns an epoch, writes the journal, and sends nothing it has not written down."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from cortex_training.errors import (
    ApiError,
    AuthError,
    ChunkGroupError,
    JobFailed,
    NotFoundError,
    OutcomeUnknown,
    RateLimitedError,
    SendRefused,
    ServiceError,
    TransportError,
)
from cortex_training.publication.errors import StoreError
from cortex_training.publication.log import Epoch, PublicationLog
from cortex_training.publication.store import Store
from cortex_training.states import is_terminal_job, job_state
from cortex_training.training.journal import JournalReader, JournalWriter, Record
from cortex_training.training.metrics import open_metrics
from cortex_training.training.offload import offload, unbroken
from cortex_training.training.packs import Packer
from cortex_training.training.plan import TrainingPlan
from cortex_training.training.progress import Pace, Progress, ProgressCallback, RunFailed, RunInterrupted
from cortex_training.training.state import Operation, RunState, Segment, replay

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

SEND_WINDOW_S = 3.0
"""How long an intent permits sending, in seconds of the driver's own monotonic clock."""

_LONGEST_WINDOW_S = 120.0
_WINDOW_PER_APPEND = 4.0
"""A window is at least so many times as long as writing the last intent took: a slow store must not use it all up."""


class Submission(Protocol):
    """A call of the client that answers a request id, all arguments bound but the permission to send."""

    async def __call__(self, *, permit: Callable[[], None]) -> str: ...


class SegmentLost(Exception):
    """The weights of the current segment can't be trusted or reached any more; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SendingWindow:
    """Permission to send, handed to the client as ``permit`` and asked right before the socket write.

    A driver that was frozen after it wrote its intent wakes up past the window and is refused, while its successor
    waits the window out before it sends anything: the two never send the same operation.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.open(time.monotonic())

    def open(self, written: float) -> None:
        """Begin the window at `written`: from before the record that permits it was written, so that it never outlasts
        the one the successor waits for.
        """
        self._until = written + self.length_s

    def __call__(self) -> None:
        if time.monotonic() > self._until:
            raise SendRefused(f"the intent is older than {self.length_s:g} s; a new one has to be written first")


class Driver:
    """Plan, client, journal and state of one driver start. Made by :meth:`claim`."""

    def __init__(
        self,
        plan: TrainingPlan,
        client: AsyncCortexTrainingClient,
        store: Store,
        writer: JournalWriter,
        packer: Packer,
        state: RunState,
        *,
        attempt: str,
        progress: ProgressCallback | None,
        stop: asyncio.Event | None,
    ) -> None:
        self.plan = plan
        self.client = client
        self.store = store
        self.log = PublicationLog(store)
        self.state = state
        self.epoch = state.epoch
        self.attempt = attempt
        self.metrics = open_metrics(store, attempt)
        self.remote_s = 0.0
        self.waiting_s = 0.0
        self.pace = Pace()
        self.published: str | None = None
        """The last save that this driver saw in the publication log."""
        self._writer = writer
        self._packer = packer
        self._appending = asyncio.Lock()
        self._append_s = 0.0
        self._progress = progress
        self._stop = stop

    @classmethod
    async def claim(
        cls,
        plan: TrainingPlan,
        client: AsyncCortexTrainingClient,
        store: Store,
        *,
        attempt: str = "",
        progress: ProgressCallback | None = None,
        stop: asyncio.Event | None = None,
    ) -> Driver:
        """Take the run over: claim the next epoch, put ``takeover`` into the journal, wait out what a predecessor may
        still send.

        Raises RunInterrupted when `stop` is set while it waits. It writes no ``released`` then, since that would speak
        for the predecessor too: the next driver waits anew.
        """
        info = {"host": socket.gethostname(), "pid": os.getpid(), "attempt": attempt}
        epoch = await offload(PublicationLog(store).claim_epoch, info)
        # In one piece, off the loop: the journal of a long run takes a while to replay.
        writer, packer, state, released = await offload(_take_over, store, epoch, info)
        folder = f"{attempt or 'run'}-e{epoch.number}"
        driver = cls(plan, client, store, writer, packer, state, attempt=folder, progress=progress, stop=stop)
        if not released and _may_still_be_sent(state):
            # A second longer, for clocks that run at different rates.
            await driver.until_stopped(asyncio.sleep(_last_window_s(state) + 1.0))
        return driver

    # -- journal
    # ---------------------------------------------------------------------------------------------------------

    async def record(self, type_: str, body: Mapping[str, Any]) -> Record:
        """Append to the journal and move the state; raises `Superseded` when the run has another driver."""
        # One at a time: a window that is renewed while a request is answered must not take the answer's number.
        async with self._appending:
            record = await offload(self._append, type_, body)
            self.state.apply(record)
            self._packer.pack_when_due()
        return record

    def _append(self, type_: str, body: Mapping[str, Any]) -> Record:
        record = self._writer.append(type_, body)
        # In the same thread: a driver that is cancelled meanwhile must not forget a record that is in the journal.
        self._packer.add(record)
        return record

    async def release(self) -> None:
        """Tell the successor that this driver sends nothing more, once nothing of it is written any more either."""
        await self.stop_packing()
        with contextlib.suppress(StoreError):
            await offload(self.metrics.close)
        await self.record("released", {})

    async def stop_packing(self) -> None:
        """Leave no task behind in a loop that is the host's."""
        await self._packer.stop()

    @property
    def segment(self) -> Segment:
        current = self.state.current
        if current is None:
            raise RuntimeError("the run has no segment yet")
        return current

    # -- host
    # ------------------------------------------------------------------------------------------------------------

    def tell(self, stage: str, **facts: Any) -> None:
        """Report progress; facts are fields of `Progress`."""
        if self._progress is None:
            return
        current = self.state.current
        step = facts.pop("step", current.confirmed_step if current else 0)
        self._progress(Progress(stage, step, self.plan.steps, job_id=current.job_id if current else None, **facts))

    def learning_rate(self, step: int) -> float | None:
        """The rate of a step as the plan and the rollbacks so far have it; None when the job's own setting holds."""
        rate = self.plan.learning_rate.at(step, self.plan.steps)
        return None if rate is None else rate * self.state.lr_factor

    @property
    def gpu_seconds(self) -> float:
        return self.state.gpu_seconds(time.time())

    @property
    def budget_is_spent(self) -> bool:
        return self.plan.max_gpu_seconds is not None and self.gpu_seconds >= self.plan.max_gpu_seconds

    async def pause(self, seconds: float) -> None:
        """Wait before something is tried again; the waiting is counted, and ends early when the host stops the run."""
        began = time.monotonic()
        try:
            await self.until_stopped(asyncio.sleep(seconds))
        finally:
            self.waiting_s += time.monotonic() - began

    def check_stop(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise RunInterrupted(f"{self.store.root}: stopped by its host; the same plan on this root goes on")

    # -- remote
    # ----------------------------------------------------------------------------------------------------------

    async def submit(
        self,
        op: str,
        step: int,
        call: Submission,
        *,
        micro_batch: int = 0,
        attempt: int = 0,
        repeatable: bool = False,
        ahead: bool = False,
    ) -> Operation:
        """Intent, POST and the record of its request id. `repeatable` calls are sent again while the service is
        unreachable. What is sent `ahead` is on record as that.

        Raises `OutcomeUnknown` when a call that may be sent only once may have been executed.
        """
        patience = time.monotonic() + self.plan.patience_s
        intent = {
            "op": op,
            "step": step,
            "micro_batch": micro_batch,
            "attempt": attempt,
            **({"ahead": True} if ahead else {}),
        }
        while True:
            self.check_stop()
            operation, problem = await unbroken(self._submit_once(intent, call, repeatable))
            if problem is None:
                return operation
            if time.monotonic() > patience:
                raise RunFailed(
                    f"{self.store.root}: {op} of step {step} did not become a request of job {self.segment.job_id} "
                    f"within {self.plan.patience_s:g} s: {problem}"
                )
            await self.pause(0.1 if isinstance(problem, SendRefused) else 1.0)

    async def _submit_once(
        self, intent: Mapping[str, Any], call: Submission, repeatable: bool
    ) -> tuple[Operation, Exception | None]:
        """The operation and why it has no request yet, or None when it has one."""
        segment = self.segment
        window = SendingWindow(self._window_s())
        intent = {**intent, "segment": segment.number}
        if window.length_s != SEND_WINDOW_S:
            intent["window_s"] = window.length_s
        began = time.monotonic()
        operation = self.state.operation((await self.record("intent", intent)).number)
        self._append_s = time.monotonic() - began
        try:
            async with self._renewed(window, operation) if repeatable else contextlib.nullcontext():
                request_id = await call(permit=window)
        except (SendRefused, TransportError, ApiError) as problem:
            await self._explain(operation, problem, repeatable)
            return operation, problem
        await self.record("sent", {"intent": operation.number, "request_id": request_id})
        return operation, None

    def _window_s(self) -> float:
        return max(SEND_WINDOW_S, min(_WINDOW_PER_APPEND * self._append_s, _LONGEST_WINDOW_S))

    @contextlib.asynccontextmanager
    async def _renewed(self, window: SendingWindow, operation: Operation) -> AsyncIterator[None]:
        """Keep the window open while a call goes on: a batch of many chunks takes longer than one window to send.

        Each renewal is a record, so a driver that has lost the run can't renew, and what it has not sent by the end of
        its window stays unsent. The chunks that went before are in the group's name: whoever sends it again completes
        it.
        """

        async def renew() -> None:
            while True:
                await asyncio.sleep(window.length_s / 2)
                began = time.monotonic()
                await self.record("renewed", {"intent": operation.number, "window_s": window.length_s})
                window.open(began)

        task = asyncio.create_task(renew())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # a renewal that failed has closed the window, and that is all it has to do

    async def _explain(self, operation: Operation, problem: Exception, repeatable: bool) -> None:
        """Write down why an intent became no request. Returns when a new intent may be tried, raises otherwise."""
        segment = self.segment
        what = f"{operation.op} of step {operation.step} on job {segment.job_id}"
        restarting = isinstance(problem, ApiError) and problem.workers_restarting
        if isinstance(problem, ChunkGroupError) or (restarting and segment.gradients_are_pending):
            # The workers lost batches, or hold others under these names: nobody knows which gradients they have.
            await self.record("ended", {"reason": f"{what}: {problem}"})
            raise SegmentLost(f"{what}: {problem}") from problem
        not_executed = restarting or getattr(problem, "sent", None) is False
        if not_executed or isinstance(problem, (SendRefused, RateLimitedError)):
            await self.record("outcome", {"intent": operation.number, "status": "refused"})
        elif isinstance(problem, ApiError) and not isinstance(problem, ServiceError):
            # Any other answer is a refusal of the service: the call was not executed, and would be refused again.
            await self.record("outcome", {"intent": operation.number, "status": "refused"})
            await self.raise_if_job_lost(str(problem))
            if isinstance(problem, AuthError):
                raise problem
            raise RunFailed(f"{self.store.root}: the service refused {what}: {problem}") from problem
        elif not repeatable:
            raise OutcomeUnknown(
                operation=operation.op,
                job_id=segment.job_id,
                reason=str(problem),
                hint="The run finds out by itself what happened.",
            ) from problem
        if not isinstance(problem, SendRefused):
            self.tell("recover", message=f"{what}: {problem}")

    async def result(self, operation: Operation) -> dict[str, Any]:
        """Wait for the request of a submitted operation; ends early when the host stops the run.

        Raises `RequestFailed`, `NotFoundError` (the service does not know the request) or `SegmentLost`.
        """
        request_id = operation.request_id
        if request_id is None:
            raise RuntimeError(f"{operation.op} of step {operation.step} was never sent")
        job_id = self.segment.job_id
        timeout_s = self.plan.request_timeout_s
        began, waited = time.monotonic(), self.waiting_s
        try:
            found: dict[str, Any] = await self.on_job(
                f"{operation.op} of step {operation.step}",
                lambda: self.until_stopped(self.client.poll_request(job_id, request_id, timeout_s=timeout_s)),
            )
        finally:
            self.remote_s += time.monotonic() - began - (self.waiting_s - waited)
        return found

    async def patiently(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call that may be repeated, for as long as the plan has patience with an unreachable service."""
        patience = time.monotonic() + self.plan.patience_s
        pause = 0.5
        while True:
            try:
                return await call()
            except (TransportError, RateLimitedError, ServiceError) as error:
                if time.monotonic() > patience:
                    raise
                self.tell("recover", message=f"{what}: {error}")
            await self.pause(pause)
            pause = min(pause * 2, 15.0)

    async def on_job(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Like :meth:`patiently`, for a call that needs a running job: `SegmentLost` when it runs no more."""
        try:
            return await self.patiently(what, call)
        except JobFailed as error:
            raise SegmentLost(str(error)) from error
        except AuthError:
            raise
        except ApiError as error:
            await self.raise_if_job_lost(str(error))
            raise

    async def until_stopped(self, work: Awaitable[Any]) -> Any:
        if self._stop is None:
            return await work
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check_stop()
            return await task
        finally:
            stopped.cancel()
            task.cancel()

    async def job(self) -> dict[str, Any] | None:
        """The current segment's job, or None when the service does not know it."""
        job_id = self.segment.job_id

        async def look() -> dict[str, Any] | None:
            try:
                return dict(await self.client.get_job(job_id))
            except NotFoundError:
                return None

        found: dict[str, Any] | None = await self.patiently(f"look at job {job_id}", look)
        return found

    async def raise_if_job_lost(self, said: str) -> None:
        """Raise `SegmentLost` when the segment's job, or a sub-job of it, is not running any more."""
        job = await self.job()
        if job is None:
            raise SegmentLost(f"job {self.segment.job_id} is gone ({said})")
        states = [job, *job.get("sub_jobs", [])]
        for entry in states:
            state = job_state(entry.get("status"))
            if is_terminal_job(state) or state in ("pending", "placing", "initializing", "cancelling"):
                name = entry.get("sub_job_id") or self.segment.job_id
                raise SegmentLost(f"{name} is {state}: {job.get('reason') or said}")


def _take_over(store: Store, epoch: Epoch, info: Mapping[str, Any]) -> tuple[JournalWriter, Packer, RunState, bool]:
    """Put ``takeover`` into the journal and read what it says; the last value: whether the predecessor released the
    run. Blocking.
    """
    reader = JournalReader(store)
    writer = JournalWriter.take_over(store, epoch.number, epoch.token, {"info": info}, reader)
    records = reader.read()
    released = len(records) < 2 or records[-2].type == "released"
    return writer, Packer(store, records, reader.packed), replay(records), released


def _may_still_be_sent(state: RunState) -> bool:
    """Whether the predecessor may be about to send, unless it released the run: no answer to its last intent is on
    record.
    """
    if state.current is None or not state.current.operations:
        return False
    last = state.current.operations[-1]
    return last.status == "open" and last.request_id is None


def _last_window_s(state: RunState) -> float:
    if state.current is None or not state.current.operations:
        return 0.0
    return state.current.operations[-1].window_s or SEND_WINDOW_S


def loss_value(result: Mapping[str, Any]) -> float | str:
    """The loss of a forward-backward as the journal keeps it: a finite number, or ``nan`` / ``inf`` as text."""
    try:
        loss = float(result["avg_loss"])
    except (KeyError, TypeError, ValueError):
        raise SegmentLost(f"a forward-backward answered no avg_loss but {sorted(result)}") from None
    return loss if math.isfinite(loss) else str(loss)
