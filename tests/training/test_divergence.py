"""A loss that explodes: the run stops, or goes back to its last publication and does something else from there."""

import asyncio
import contextlib
import hashlib
import math

import pytest

from cortex_training.aio import AsyncCortexTrainingClient
from cortex_training.datasets import Dataset
from cortex_training.local.models import model_folder
from cortex_training.publication import PublicationLog
from cortex_training.training import RunFailed, TrainingPlan, status
from cortex_training.training.divergence import Divergence
from cortex_training.training.driver import Driver
from cortex_training.training.journal import read_journal
from cortex_training.training.loop import last_losses
from cortex_training.training.root import open_root
from cortex_training.training.state import RunState, Segment
from tests.faults.reference import train
from tests.training.conftest import Runs
from tests.training.test_state import Story

PEAK = 3e-3
SKIP_ONE = {"action": "rollback", "skip_batches": 1}


class BadBatchClient(AsyncCortexTrainingClient):
    """A client of a service on which certain batches give a loss of their own, whoever runs them and whenever."""

    bad: dict[str, float]

    async def forward_backward(self, job_id, data, **options):
        request_id = await super().forward_backward(job_id, data, **options)
        self.frames = {**getattr(self, "frames", {}), request_id: hashlib.sha256(data).hexdigest()}
        return request_id

    async def poll_request(self, job_id, request_id, **options):
        result = await super().poll_request(job_id, request_id, **options)
        loss = self.bad.get(getattr(self, "frames", {}).get(request_id))
        return result if loss is None else {**result, "avg_loss": loss}


class BadBatchRuns(Runs):
    def client(self, base_url=None):
        client = BadBatchClient(base_url or self.base_url, self.service.database, self.service.schema)
        client.bad = self.bad
        return client

    def plan(self, divergence=None, **changes):
        schedule = {"schedule": "linear", "peak": PEAK}
        return super().plan(**{"learning_rate": schedule, "divergence": divergence or {}, **changes})

    @property
    def state(self):
        return status(self.root).state

    def frame(self, step, micro_batch):
        return Dataset.open(self.manifest).batches(2, 2, 0).frame(step, micro_batch)

    def spoil(self, step, micro_batch, loss=math.nan):
        self.bad[hashlib.sha256(self.frame(step, micro_batch)).hexdigest()] = loss


@pytest.fixture
def runs(local_service, manifest, tmp_path):
    runs = BadBatchRuns(local_service, manifest, tmp_path / "run", local_service.base_url)
    runs.bad = {}
    return runs


@pytest.fixture(scope="module")
def skipping_step_4(manifest):
    """Losses of a plain loop that never sees the batches of step 4."""
    batches = Dataset.open(manifest).batches(2, 2, 0)
    frames = {(k, m): batches.frame(k if k < 4 else k + 1, m) for k in range(1, 8) for m in range(2)}
    return train(model_folder("tiny"), frames, steps=6, micro_batches=2, peak_rate=PEAK)


def published(runs):
    return [e.step for e in PublicationLog(runs.root).entries()]


def alive(runs):
    async def look():
        async with runs.client() as client:
            return [
                j for j in runs.state.job_ids if (await client.get_job(j))["status"] not in ("cancelling", "cancelled")
            ]

    return asyncio.run(look())


@pytest.mark.parametrize(("micro_batch", "loss"), [(0, math.nan), (1, math.inf)])
def test_a_bad_batch_is_left_out_and_nothing_else_changes(runs, skipping_step_4, micro_batch, loss):
    runs.spoil(4, micro_batch, loss)
    result = runs.run(runs.plan(SKIP_ONE, max_replacements=0))
    assert (result.steps, result.segments) == (6, 2)
    state = runs.state
    assert (state.rollbacks, state.replacements, state.skipped) == (1, 0, (4,))
    assert state.segments[1].base.step == 2
    for step in range(1, 7):
        assert state.losses[step] == skipping_step_4.mean_loss(step), f"step {step}"
    assert published(runs) == [2, 4, 6]
    assert not alive(runs)


def test_the_weights_that_diverged_are_not_published_whatever_was_saved(runs):
    runs.spoil(4, 0)
    with pytest.raises(RunFailed, match=r"weights of step 3 is nan.*Nothing of these weights was published"):
        runs.run(runs.plan(save_every_steps=1))
    assert [o.step for o in runs.state.current.saves()] == [1, 2, 3]
    assert published(runs) == [1, 2]
    assert not alive(runs)


def test_a_rate_that_is_too_high_is_lowered(runs):
    divergence = {"action": "rollback", "lr_factor": 3e-33}
    result = runs.run(runs.plan(divergence, learning_rate={"schedule": "constant", "peak": 1e30}))
    assert result.steps == 6
    assert result.last_loss < result.first_loss
    assert runs.state.lr_factor == 3e-33
    assert runs.state.segments[1].base is None


def test_the_same_divergence_again_ends_the_run_for_good(runs):
    runs.spoil(4, 0)
    plan = runs.plan({"action": "rollback", "lr_factor": 0.5})
    with pytest.raises(RunFailed, match="1 rollbacks were used"):
        runs.run(plan)
    before = len(runs.service.execution_log())
    with pytest.raises(RunFailed, match="1 rollbacks were used"):
        runs.run(plan)
    assert len(runs.service.execution_log()) == before
    assert published(runs) == [2]
    assert not alive(runs)


def test_a_run_that_stopped_goes_back_once_its_plan_says_so(runs, skipping_step_4):
    runs.spoil(4, 1)
    with pytest.raises(RunFailed, match=r"divergence\.action"):
        runs.run(runs.plan())
    result = runs.run(runs.plan(SKIP_ONE))
    assert (result.steps, result.segments) == (6, 2)
    assert runs.state.losses[6] == skipping_step_4.mean_loss(6)


def test_a_loss_far_above_the_median_counts_when_the_plan_says_so(runs, skipping_step_4):
    runs.spoil(4, 0, 60.0)
    policy = {**SKIP_ONE, "loss_factor": 3, "median_of": 3}
    result = runs.run(runs.plan(policy))
    assert result.segments == 2
    assert runs.state.losses[6] == skipping_step_4.mean_loss(6)
    diverged = [r for r in read_journal(open_root(runs.root)) if r.type == "diverged"]
    assert diverged[0].body["loss"].startswith("60, more than 3 times the median")


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.live), "after"])
@pytest.mark.parametrize("record", ["diverged", "ended", "cancelled", "segment", "created"])
def test_a_driver_that_dies_while_it_goes_back_is_followed_by_one_that_does(
    runs, skipping_step_4, monkeypatch, record, when
):
    """Whatever is on record of the rollback by then: it happens once, and uses up no replacement."""
    runs.spoil(4, 0)
    write = Driver.record
    armed = [False]

    class Killed(BaseException):
        pass

    async def dying(self, type_, body):
        armed[0] = armed[0] or type_ == "diverged"
        strikes = armed[0] and type_ == record
        if type_ == "released" and armed[0]:
            raise Killed
        if strikes and when == "before":
            raise Killed
        written = await write(self, type_, body)
        if strikes:
            raise Killed
        return written

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "record", dying)
        with contextlib.suppress(Killed):
            runs.run(runs.plan(SKIP_ONE, max_replacements=0))
    result = runs.run(runs.plan(SKIP_ONE, max_replacements=0))
    assert (result.steps, result.segments) == (6, 2)
    assert runs.state.losses[6] == skipping_step_4.mean_loss(6)
    assert not alive(runs)


def test_batches_are_left_out_wherever_earlier_rollbacks_did_so_too():
    state = RunState()
    state.skipped = (3, 5, 6)
    assert [state.position(step) for step in range(1, 7)] == [1, 2, 4, 7, 8, 9]


def test_what_counts_as_a_divergence():
    assert Divergence().found_in(1e9, [1.0] * 50) is None
    assert Divergence().found_in(math.inf, []) == "inf"
    rule = Divergence(loss_factor=2.0, median_of=3)
    assert rule.found_in(9.0, [1.0, 1.0]) is None
    assert rule.found_in(2.0, [9.0, 1.0, 1.0, 1.0]) is None
    assert "median 1 of 3 steps" in rule.found_in(2.1, [9.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("step", [1, 3, 19, 20, 60, 2_999, 3_000])
def test_the_median_is_of_the_last_steps_as_the_last_segment_measured_them(step, monkeypatch):
    story = Story()
    # Steps 41 to 60 are made again, and the loss of step 50 is not known.
    for number, (first, last, added) in enumerate([(1, 60, 1000.0), (41, 3_000, 0.0)]):
        story.segment(number)
        for k in {*range(first, last + 1)} - {50}:
            story.operation("forward_backward", k, "done", segment=number, result={"loss": k + added})
    state = story.state
    known = state.losses
    expected = [known[k] for k in sorted(known) if k <= step][-20:]
    looked_at = []
    loss = Segment.loss
    monkeypatch.setattr(Segment, "loss", lambda self, k: looked_at.append(k) or loss(self, k))
    assert last_losses(state, step, 20) == expected
    assert len(looked_at) <= 2 * 21, "a long run pays no more for it than a short one"


def test_the_plan_keeps_its_policy(runs):
    plan = runs.plan({**SKIP_ONE, "loss_factor": 4.0})
    assert TrainingPlan.from_dict(plan.to_dict()).divergence == Divergence("rollback", skip_batches=1, loss_factor=4.0)
