"""How a run ends and goes on: its budget, more steps, passes over the data, saves that nothing can go on from."""

import asyncio
import contextlib
import functools
import os
import time

import pytest

from cortex_training._chunks import CHUNK_OVERHEAD_BYTES
from cortex_training.datasets import Dataset
from cortex_training.protocol import training as protocol
from cortex_training.publication import PosixStore, PublicationLog, SaveManifest
from cortex_training.training import RunFailed, RunInterrupted, Superseded, driver, run, status
from cortex_training.training.chart import draw_losses
from cortex_training.training.journal import read_journal
from cortex_training.training.metrics import read_metrics
from cortex_training.training.teardown import take_away
from tests.training.conftest import Runs


@pytest.fixture(scope="module")
def eight_steps(local_service, manifest, tmp_path_factory):
    runs = Runs(local_service, manifest, tmp_path_factory.mktemp("eight") / "run", local_service.base_url)
    result = runs.run(runs.plan(steps=8, save_every_steps=50))
    return runs, result


def state(runs):
    return status(runs.root).state


def job_is_over(runs, job_id):
    async def look():
        async with runs.client() as client:
            return (await client.get_job(job_id))["status"] in ("cancelling", "cancelled")

    return asyncio.run(look())


def test_more_steps_again_and_again_use_up_no_replacement(eight_steps, runs):
    for steps in (2, 4, 6, 8):
        result = runs.run(runs.plan(steps=steps, max_replacements=0))
        assert result.steps == steps
    assert state(runs).losses == state(eight_steps[0]).losses
    assert [s.cause for s in state(runs).segments] == ["first", *["continuation"] * 3]
    assert status(runs.root).what_happened == "finished 8 steps"


def test_a_finished_job_that_was_kept_goes_on_in_place(eight_steps, runs):
    first = runs.run(runs.plan(steps=4, when_done="keep"))
    second = runs.run(runs.plan(steps=8))
    assert (second.job_id, second.segments) == (first.job_id, 1)
    assert state(runs).losses == state(eight_steps[0]).losses


def test_a_spent_budget_saves_publishes_and_ends_the_job_and_a_larger_one_goes_on(eight_steps, runs, monkeypatch):
    spent_after = [3]
    monkeypatch.setattr(
        driver.Driver, "budget_is_spent", property(lambda self: self.segment_steps() >= spent_after[0]), raising=True
    )
    monkeypatch.setattr(
        driver.Driver,
        "segment_steps",
        lambda self: self.state.current.confirmed_step if self.state.current else 0,
        raising=False,
    )
    plan = runs.plan(steps=8, save_every_steps=50, max_gpu_seconds=100, max_replacements=0)
    with pytest.raises(RunFailed, match=r"max_gpu_seconds is 100; raise it"):
        runs.run(plan)
    assert [e.step for e in PublicationLog(runs.root).entries()] == [3]
    assert status(runs.root).what_happened.startswith("paused after step 3")
    assert job_is_over(runs, state(runs).current.job_id)
    jobs = len(state(runs).job_ids)
    with pytest.raises(RunFailed, match="raise it"):
        runs.run(plan)
    assert len(state(runs).job_ids) == jobs
    spent_after[0] = 99
    result = runs.run(plan)
    assert (result.steps, result.segments) == (8, 2)
    assert state(runs).losses == state(eight_steps[0]).losses


def test_gpu_seconds_are_counted_over_all_jobs_and_outlive_drivers(runs):
    began = time.time()
    with pytest.raises(RunFailed, match="GPU seconds were used"):
        runs.run(runs.plan(steps=5000, save_every_steps=5000, max_gpu_seconds=4))
    # Two GPUs, so four GPU seconds are two seconds; and then a save.
    used = state(runs).gpu_seconds(time.time())
    assert 4 <= used <= 2 * (time.time() - began)
    assert used == state(runs).gpu_seconds(time.time() + 1000)
    confirmed = state(runs).current.confirmed_step
    assert PublicationLog(runs.root).latest().step == confirmed
    result = runs.run(runs.plan(steps=confirmed + 1, max_gpu_seconds=10_000))
    assert result.steps == confirmed + 1


def test_a_plan_in_passes_trains_as_many_steps_as_they_make(runs):
    per_pass = Dataset.open(runs.manifest).batches(2, 2, 0).steps_per_pass
    result = runs.run(runs.plan(steps=0, passes=4 / per_pass))
    assert result.steps == 4
    assert {p.steps for p in runs.progress} == {4}


def test_saves_by_minutes_follow_the_clock(runs):
    runs.run(runs.plan(steps=4, save_every_steps=None, save_every_minutes=1e-6))
    assert [o.step for o in state(runs).current.saves()] == [1, 2, 3, 4]
    assert [e.step for e in PublicationLog(runs.root).entries()] == [2, 3, 4]


class TestWeightsOnly:
    def plan(self, runs, **changes):
        return runs.plan(checkpoint_type="weights-only", resume="none", **changes)

    def test_saves_are_published_as_what_they_are(self, eight_steps, runs):
        result = runs.run(self.plan(runs, steps=4))
        store = PosixStore(runs.root)
        found = SaveManifest.read(store, PublicationLog(store).latest().save)
        assert (found.checkpoint_type, found.checkpoint_id) == ("weights-only", result.checkpoint_id)
        with pytest.raises(RunFailed, match='resume = "none"'):
            runs.run(self.plan(runs, steps=8))

    def test_a_step_whose_answer_is_lost_is_settled_all_the_same(self, eight_steps, runs, proxy):
        proxy.add(r"^POST .*/step$", "drop-after", skip=2)
        assert runs.run(self.plan(runs, steps=4)).segments == 1
        assert {k: v for k, v in state(runs).losses.items() if k <= 5} == {
            k: v for k, v in state(eight_steps[0]).losses.items() if k <= 5
        } | {5: state(runs).losses[5]}

    def test_a_lost_job_ends_the_run_and_makes_no_other(self, runs, proxy):
        def cancel():
            async def main():
                async with runs.client(runs.service.base_url) as client:
                    await client.cancel_job(state(runs).current.job_id)

            asyncio.run(main())

        proxy.add(r"^POST .*/step$", "forward", skip=2, before=cancel)
        with pytest.raises(RunFailed, match='resume = "none"'):
            runs.run(self.plan(runs))
        assert len(state(runs).job_ids) == 1


class TestTheSendingWindow:
    """An intent permits sending for seconds; a slow disk or a large batch must not make that never."""

    def test_a_store_that_is_slower_than_the_window_gets_a_longer_one(self, runs, monkeypatch):
        monkeypatch.setattr(driver, "SEND_WINDOW_S", 0.2)
        create = PosixStore.create

        def slow(self, name, data=b""):
            if b'"intent", "window_s"' in data or b'"type": "intent"' in data:
                time.sleep(0.3)
            return create(self, name, data)

        monkeypatch.setattr(PosixStore, "create", slow)
        result = runs.run(runs.plan(steps=2, patience_s=20))
        assert result.steps == 2
        windows = [r.body.get("window_s") for r in read_journal(PosixStore(runs.root)) if r.type == "intent"]
        assert max(w for w in windows if w) > 1.0
        refused = [o for o in state(runs).current.operations if o.status == "refused"]
        assert len(refused) == 1

    def test_a_batch_of_many_chunks_outlasts_its_window(self, runs, proxy, monkeypatch):
        """The window ends between two chunks of a group: it is renewed in the journal, and the group goes through."""
        monkeypatch.setattr(driver, "SEND_WINDOW_S", 0.4)
        monkeypatch.setattr(
            protocol, "ChunkedCall", functools.partial(protocol.ChunkedCall, max_bytes=CHUNK_OVERHEAD_BYTES + 2000)
        )
        rule = proxy.add(r"/forward-backward$", "forward", times=10**6, before=lambda: time.sleep(0.25))
        result = runs.run(runs.plan(steps=1, micro_batches_per_step=1, patience_s=30))
        assert result.steps == 1
        assert rule.seen > 6, "the batch was not sent in chunks"
        records = read_journal(PosixStore(runs.root))
        assert [r for r in records if r.type == "renewed"]
        assert not [o for o in state(runs).current.operations if o.status == "refused"]
        assert len({r["chunk_group"] for r in runs.executed("forward-backward", result.job_id)}) == 2

    def test_a_driver_that_lost_the_run_cannot_renew(self, runs, proxy, monkeypatch):
        monkeypatch.setattr(driver, "SEND_WINDOW_S", 0.4)
        taken = []

        def take():
            if not taken:
                take_away(runs.root)
                taken.append(True)
            time.sleep(1.0)

        proxy.add(r"/forward-backward$", "forward", skip=1, times=5, before=take)
        with pytest.raises(Superseded):
            runs.run()
        records = read_journal(PosixStore(runs.root))
        takeover = max(r.number for r in records if r.type == "takeover")
        assert all(r.type == "takeover" for r in records if r.number >= takeover)

    def test_a_driver_that_is_told_to_stop_while_it_waits_one_out_leaves_the_wait_to_its_successor(
        self, runs, monkeypatch
    ):
        write = driver.Driver.record
        dead = []

        class Killed(BaseException):
            pass

        async def dying(self, type_, body):
            if dead or (type_ == "sent" and self.state.operation(body["intent"]).op == "step"):
                dead.append(type_)
                raise Killed
            return await write(self, type_, body)

        with monkeypatch.context() as patch:
            patch.setattr(driver.Driver, "record", dying)
            with contextlib.suppress(Killed):
                runs.run(runs.plan(steps=2))
        assert dead

        take_over = driver._take_over

        async def main():
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()

            def take_over_and_be_told(*arguments):
                taken = take_over(*arguments)
                loop.call_soon_threadsafe(loop.call_later, 0.2, stop.set)
                return taken

            with monkeypatch.context() as patch:
                patch.setattr(driver, "_take_over", take_over_and_be_told)
                patch.setattr(driver, "SEND_WINDOW_S", 120.0)
                async with asyncio.timeout(30), runs.client() as client:
                    with pytest.raises(RunInterrupted):
                        await run(runs.plan(steps=2), client, stop=stop)

        asyncio.run(main())
        assert not status(runs.root).state.released, "the one before it may still send"
        monkeypatch.setattr(driver, "SEND_WINDOW_S", 1.0)
        result = runs.run(runs.plan(steps=2))
        assert (result.steps, result.epoch) == (2, 3)
        records = read_journal(PosixStore(runs.root))
        waited = next(n for n, r in enumerate(records) if r.epoch == 3)
        assert records[waited + 1].at - records[waited].at >= 2.0


def test_metrics_say_where_the_time_went_and_a_torn_line_harms_nobody(eight_steps, tmp_path):
    runs, _ = eight_steps
    rows = read_metrics(runs.root)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(0 <= row["remote_s"] <= row["seconds"] and row["waiting_s"] >= 0 for row in rows)
    folder = PosixStore(runs.root).locate("exec/torn-e9")
    os.makedirs(folder)
    with open(f"{folder}/metrics.jsonl", "w") as file:
        file.write('{"step": 9, "ep\n[1]\n{"step": 2}\n{"st')
    assert read_metrics(runs.root) == rows
    assert draw_losses(runs.root, str(tmp_path / "loss.png"))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_progress_tells_what_is_left_and_the_services_log_when_asked_to(runs):
    runs.run(runs.plan(tail_service_log=True, steps=8))
    trained = [p for p in runs.progress if p.stage == "train"]
    assert trained[0].remaining_s is None
    assert all(p.remaining_s >= 0 for p in trained[1:])
    assert trained[-1].remaining_s == 0
    assert "% remote" in trained[-1].line()
    logged = [p for p in runs.progress if p.stage == "log"]
    assert logged
    assert all(p.message for p in logged)
