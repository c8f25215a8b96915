"""Batches that are sent behind a step before its result is there: the same training, also where drivers die."""

import asyncio
import contextlib
import hashlib
import math

import pytest

from cortex_training.aio import AsyncCortexTrainingClient
from cortex_training.datasets import Dataset
from cortex_training.errors import ConfigurationError, RequestFailed
from cortex_training.local.models import model_folder
from cortex_training.publication import PublicationLog
from cortex_training.training import RunFailed, RunInterrupted, run, status
from cortex_training.training.driver import Driver
from cortex_training.training.journal import read_journal
from cortex_training.training.root import open_root
from tests.faults.reference import train
from tests.training.conftest import Runs

PEAK = 3e-3
STEPS = 6


class TroubledClient(AsyncCortexTrainingClient):
    """A client of a service on which certain batches fail, give no finite loss, or are run out of turn."""

    frames: dict[str, str]
    trouble: dict[str, set[str]]

    async def forward_backward(self, job_id, data, **options):
        request_id = await super().forward_backward(job_id, data, **options)
        self.frames[request_id] = hashlib.sha256(data).hexdigest()
        return request_id

    async def poll_request(self, job_id, request_id, **options):
        result = await super().poll_request(job_id, request_id, **options)
        frame = self.frames.get(request_id)
        if frame in self.trouble["fails"]:
            self.trouble["fails"].discard(frame)
            raise RequestFailed(job_id=job_id, request_id=request_id, state="failed", error="out of memory")
        return {**result, "avg_loss": math.nan} if frame in self.trouble["spoils"] else result

    async def get_request_status(self, job_id, request_id, *args, **options):
        told = await super().get_request_status(job_id, request_id, *args, **options)
        early = self.frames.get(request_id) in self.trouble["overtakes"]
        return {**told, "updated_at": "2020-01-01T00:00:00Z"} if early else told


class AheadRuns(Runs):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.frames = {}
        self.trouble = {"fails": set(), "spoils": set(), "overtakes": set()}

    def client(self, base_url=None):
        client = TroubledClient(base_url or self.base_url, self.service.database, self.service.schema)
        client.frames, client.trouble = self.frames, self.trouble
        return client

    def plan(self, **changes):
        given = {
            "steps": STEPS,
            "save_every_steps": 5,
            "learning_rate": {"schedule": "linear", "peak": PEAK},
            **changes,
        }
        return super().plan(**{"submit_ahead": True, "assume_fifo": True, **given})

    @property
    def state(self):
        return status(self.root).state

    def make(self, kind, step, micro_batch):
        frame = Dataset.open(self.manifest).batches(2, 2, 0).frame(step, micro_batch)
        self.trouble[kind].add(hashlib.sha256(frame).hexdigest())

    def sent_ahead(self):
        intents = [r.body for r in read_journal(open_root(self.root)) if r.type == "intent"]
        return [(i["step"], i["micro_batch"]) for i in intents if i.get("ahead")]


@pytest.fixture
def runs(local_service, manifest, tmp_path):
    return AheadRuns(local_service, manifest, tmp_path / "run", local_service.base_url)


@pytest.fixture(scope="module")
def undisturbed(manifest):
    batches = Dataset.open(manifest).batches(2, 2, 0)
    frames = {(k, m): batches.frame(k, m) for k in range(1, STEPS + 2) for m in range(2)}
    return train(model_folder("tiny"), frames, steps=STEPS, micro_batches=2, peak_rate=PEAK)


def require_same_training(runs, undisturbed):
    for step in range(1, STEPS + 1):
        assert runs.state.losses[step] == undisturbed.mean_loss(step), f"step {step}"


def published(runs):
    return [e.step for e in PublicationLog(runs.root).entries()]


def test_batches_go_behind_every_step_but_those_that_are_saved(runs, undisturbed):
    result = runs.run()
    assert (result.steps, result.segments) == (STEPS, 1)
    assert runs.sent_ahead() == [(step, m) for step in (2, 3, 4, 5) for m in (0, 1)]
    require_same_training(runs, undisturbed)
    assert published(runs) == [5, 6]


@pytest.mark.parametrize(
    ("type_", "op", "step", "micro_batch"),
    [
        pytest.param("intent", "step", 3, 0, marks=pytest.mark.live),
        ("sent", "step", 3, 0),
        pytest.param("intent", "forward_backward", 4, 0, marks=pytest.mark.live),
        ("sent", "forward_backward", 4, 0),
        ("intent", "forward_backward", 4, 1),
        pytest.param("sent", "forward_backward", 4, 1, marks=pytest.mark.live),
        ("outcome", "step", 3, 0),
        ("outcome", "forward_backward", 4, 0),
        pytest.param("outcome", "forward_backward", 4, 1, marks=pytest.mark.live),
        pytest.param("intent", "step", 4, 0, marks=pytest.mark.live),
    ],
)
def test_a_driver_that_dies_before_a_record_loses_and_repeats_nothing(
    runs, undisturbed, monkeypatch, type_, op, step, micro_batch
):
    write = Driver.record
    died = []

    class Killed(BaseException):
        pass

    async def dying(self, what, body):
        about = body if what == "intent" else vars(self.state.operation(body["intent"])) if "intent" in body else {}
        found = (what, *(about.get(key) for key in ("op", "step", "micro_batch")))
        if died or found == (type_, op, step, micro_batch):
            died.append(found)
            raise Killed
        return await write(self, what, body)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "record", dying)
        with contextlib.suppress(Killed):
            runs.run()
    assert died
    result = runs.run()
    assert (result.steps, result.segments) == (STEPS, 1)
    require_same_training(runs, undisturbed)
    assert [r["global_steps"] for r in runs.executed("step", result.job_id)] == list(range(1, STEPS + 1))
    groups = [r["chunk_group"] for r in runs.executed("forward-backward", result.job_id)]
    assert len(groups) == len(set(groups)) == 2 * STEPS + 1
    assert published(runs) == [5, 6]


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_one_that_fails_costs_the_segment(runs, undisturbed, monkeypatch, micro_batch, dies):
    runs.make("fails", 4, micro_batch)
    plan = runs.plan(save_every_steps=2)
    if dies:
        write = Driver.record

        class Killed(BaseException):
            pass

        async def dying(self, what, body):
            if self.state.current is not None and self.state.current.given_up:
                raise Killed
            return await write(self, what, body)

        with monkeypatch.context() as patch:
            patch.setattr(Driver, "record", dying)
            with contextlib.suppress(Killed):
                runs.run(plan)
        assert len(runs.state.segments) == 1
    result = runs.run(plan)
    assert (result.steps, result.segments) == (STEPS, 2)
    first, second = runs.state.segments
    assert "step 4 that was sent ahead failed" in first.ended
    assert first.confirmed_step == 3
    assert second.base.step == 2
    require_same_training(runs, undisturbed)
    assert published(runs) == [2, 4, 6]


def test_one_that_is_not_finite_ends_the_run_and_nothing_of_its_weights_is_published(runs):
    runs.make("spoils", 4, 1)
    with pytest.raises(RunFailed, match="weights of step 3 is nan"):
        runs.run(runs.plan(save_every_steps=2))
    assert published(runs) == [2]
    assert not [r for r in runs.executed("step", runs.state.current.job_id) if r["global_steps"] > 3]


def test_a_service_that_runs_them_before_their_step_is_found_out_before_a_save(runs):
    runs.make("overtakes", 4, 1)
    with pytest.raises(RunFailed, match=r"ran a batch of step 4 before step 3.*changes the order"):
        runs.run(runs.plan(save_every_steps=5, max_replacements=0))
    assert published(runs) == []
    assert not runs.state.current.saves()


def test_a_successor_compares_what_its_predecessor_sent(runs):
    runs.make("overtakes", 4, 0)
    stop = asyncio.Event()

    def stopping(moment):
        if moment.stage == "train" and moment.step == 3:
            stop.set()

    async def first():
        async with runs.client() as client:
            await run(runs.plan(), client, stopping, stop=stop)

    with pytest.raises(RunInterrupted):
        asyncio.run(first())
    with pytest.raises(RunFailed, match="changes the order"):
        runs.run(runs.plan(max_replacements=0))


def test_it_has_to_be_asked_for_twice(runs):
    with pytest.raises(ConfigurationError, match=r"plan\.submit_ahead.*assume_fifo"):
        runs.plan(assume_fifo=False).validate()
    runs.plan(submit_ahead=False).validate()
