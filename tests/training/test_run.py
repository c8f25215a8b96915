"""A run against a real service: undisturbed, and through every fault that it must survive."""

import asyncio
import os

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication.log import PublicationLog
from cortex_training.publication.save import SaveManifest
from cortex_training.publication.store import PosixStore
from cortex_training.training import RunFailed, RunInterrupted, Superseded, cancel_jobs, status
from tests.faults.proxy import ANSWER, DROP_AFTER, DROP_BEFORE, TWICE
from tests.training.conftest import SUB_JOBS


def global_steps(records):
    return [r["global_steps"] for r in records]


def losses(root):
    return status(root).state.losses


def jobs(root):
    return status(root).state.job_ids


def job_state(runs, job_id):
    async def look():
        async with runs.client() as client:
            return (await client.get_job(job_id))["status"]

    return asyncio.run(look())


@pytest.fixture(scope="module")
def undisturbed(local_service, manifest, tmp_path_factory):
    from tests.training.conftest import Runs

    runs = Runs(local_service, manifest, tmp_path_factory.mktemp("undisturbed") / "run", local_service.base_url)
    result = runs.run()
    return runs, result


def test_a_run_trains_every_step_once_and_publishes_what_it_measured(undisturbed):
    runs, result = undisturbed
    assert result.steps == result.global_steps == 6
    assert result.last_loss < result.first_loss
    assert global_steps(runs.executed("step", result.job_id)) == [1, 2, 3, 4, 5, 6]
    groups = [r["chunk_group"] for r in runs.executed("forward-backward", result.job_id)]
    assert len(groups) == len(set(groups)) == 6 * 2 + 1
    log = PublicationLog(runs.root)
    assert [e.step for e in log.entries()] == [2, 4, 6]
    assert log.latest().name == result.entry
    manifest = SaveManifest.read(PosixStore(runs.root), log.latest().save)
    assert (manifest.job_id, manifest.global_steps, manifest.segment) == (result.job_id, 6, 0)
    assert job_state(runs, result.job_id) in ("cancelling", "cancelled")
    assert [p.step for p in runs.progress if p.stage == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_is_not_run_again(undisturbed):
    runs, result = undisturbed
    before = len(runs.service.execution_log())
    again = runs.run()
    assert again.entry == result.entry
    assert len(runs.service.execution_log()) == before


def test_more_steps_on_a_finished_root_go_on_from_its_publication(undisturbed, runs):
    runs.run(runs.plan(steps=4))
    result = runs.run(runs.plan(steps=6))
    assert result.segments == 2
    assert losses(runs.root)[6] == losses(undisturbed[0].root)[6]


@pytest.mark.parametrize("action", [DROP_BEFORE, DROP_AFTER])
@pytest.mark.parametrize("skip", [0, 2, pytest.param(5, marks=pytest.mark.live)])
def test_a_step_whose_answer_is_lost_happens_once(undisturbed, runs, proxy, action, skip):
    proxy.add(r"^POST .*/step$", action, skip=skip)
    result = runs.run()
    assert result.steps == 6
    executed = [r for job in jobs(runs.root) for r in runs.executed("step", job)]
    assert global_steps(executed) == [1, 2, 3, 4, 5, 6]
    assert losses(runs.root) == losses(undisturbed[0].root)
    assert result.segments == (1 if action == DROP_AFTER else 2)
    assert all(job_state(runs, job) in ("cancelling", "cancelled") for job in jobs(runs.root))


@pytest.mark.parametrize("action", [pytest.param(DROP_BEFORE, marks=pytest.mark.live), DROP_AFTER])
@pytest.mark.parametrize("operation", ["forward-backward", "save", "requests/[^/]+", ":cancel", "cortex-training"])
def test_any_other_lost_answer_changes_nothing(undisturbed, runs, proxy, action, operation):
    proxy.add(rf"/?{operation}$", action, skip=0, times=2)
    result = runs.run()
    assert result.segments == 1
    assert global_steps(runs.executed("step", result.job_id)) == [1, 2, 3, 4, 5, 6]
    groups = [r["chunk_group"] for r in runs.executed("forward-backward", result.job_id)]
    assert len(groups) == len(set(groups)) == 13
    assert losses(runs.root) == losses(undisturbed[0].root)


@pytest.mark.parametrize(
    ("status_code", "headers"),
    [
        (503, {}),
        (429, {"Retry-After": "1"}),
        pytest.param(502, {}, marks=pytest.mark.live),
    ],
)
def test_a_storm_of_refusals_is_waited_out(undisturbed, runs, proxy, status_code, headers):
    proxy.add(r"/forward-backward$", ANSWER, skip=3, times=4, status=status_code, headers=headers)
    result = runs.run()
    assert result.segments == 1
    assert losses(runs.root) == losses(undisturbed[0].root)


@pytest.mark.parametrize("skip", [0, pytest.param(1, marks=pytest.mark.live), 5])
def test_a_step_that_the_network_delivers_twice_is_noticed_and_nothing_of_it_published(undisturbed, runs, proxy, skip):
    proxy.add(r"^POST .*/step$", TWICE, skip=skip)
    result = runs.run()
    assert result.segments == 2
    store = PosixStore(runs.root)
    for entry in PublicationLog(runs.root).entries():
        assert SaveManifest.read(store, entry.save).global_steps == entry.step
    assert losses(runs.root) == losses(undisturbed[0].root)


def test_workers_that_keep_asking_for_a_batch_from_the_start_cost_their_job(undisturbed, runs, proxy):
    code = {"code": "chunk_group_restart_required", "message": "restart from chunk 0"}
    proxy.add(r"/forward-backward$", ANSWER, skip=5, times=2, status=409, body=code)
    result = runs.run()
    assert result.segments == 2
    assert losses(runs.root) == losses(undisturbed[0].root)


def test_a_job_that_dies_is_replaced_from_the_last_publication(undisturbed, runs, proxy):
    def kill_the_job():
        async def cancel():
            async with runs.client(runs.service.base_url) as client:
                await client.cancel_job(jobs(runs.root)[0])

        asyncio.run(cancel())

    proxy.add(r"^POST .*/step$", "forward", skip=4, before=kill_the_job)
    result = runs.run()
    assert result.segments == 2
    first, second = jobs(runs.root)
    # Published at 4 only when the loss of step 5 had been measured, so the new job begins behind step 4.
    assert global_steps(runs.executed("step", first)) == [1, 2, 3, 4]
    assert global_steps(runs.executed("step", second)) == [5, 6]
    assert losses(runs.root) == losses(undisturbed[0].root)
    assert result.job_id == second


def test_a_job_whose_creation_was_refused_at_first_is_cancelled_in_the_end(undisturbed, runs, proxy):
    proxy.add(r"^POST .*/cortex-training$", ANSWER, status=401, body={"code": "390114", "message": "token expired"})
    with pytest.raises(RunFailed, match="refused to create a job"):
        runs.run()
    assert status(runs.root).what_happened.startswith("stopped after step 0: the service refused to create a job")
    assert status(runs.root).driven()["released"]
    result = runs.run()
    assert result.segments == 1
    assert job_state(runs, result.job_id) in ("cancelling", "cancelled")
    assert losses(runs.root) == losses(undisturbed[0].root)


def test_a_stopped_run_goes_on_in_its_job(undisturbed, runs):
    async def main():
        from cortex_training.training import run

        stop = asyncio.Event()

        def progress(seen):
            if seen.stage == "train" and seen.step == 3:
                stop.set()

        async with runs.client() as client:
            with pytest.raises(RunInterrupted):
                await run(runs.plan(), client, progress, stop=stop)

    asyncio.run(main())
    result = runs.run()
    assert result.segments == 1
    assert result.epoch == 2
    assert global_steps(runs.executed("step", result.job_id)) == [1, 2, 3, 4, 5, 6]
    assert losses(runs.root) == losses(undisturbed[0].root)


def test_a_cancelled_driver_releases_the_run(undisturbed, runs):
    async def main():
        from cortex_training.training import run

        reached = asyncio.Event()

        def progress(seen):
            if seen.stage == "train" and seen.step == 2:
                reached.set()

        async with runs.client() as client:
            task = asyncio.create_task(run(runs.plan(), client, progress))
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    store = PosixStore(runs.root)
    names = store.names("journal")
    assert b'"released"' in store.read(f"journal/{names[-1]}")
    result = runs.run()
    assert result.segments == 1
    assert losses(runs.root) == losses(undisturbed[0].root)


def test_two_drivers_at_once_leave_one(undisturbed, runs):
    async def main():
        from cortex_training.training import run

        started = asyncio.Event()

        def progress(seen):
            if seen.stage == "train" and seen.step == 2:
                started.set()

        async with runs.client() as first, runs.client() as second:
            old = asyncio.create_task(run(runs.plan(), first, progress))
            await started.wait()
            result = await run(runs.plan(), second)
            with pytest.raises(Superseded):
                await old
            return result

    result = asyncio.run(main())
    executed = [r for job in jobs(runs.root) for r in runs.executed("step", job)]
    assert global_steps(executed) == [1, 2, 3, 4, 5, 6]
    assert losses(runs.root) == losses(undisturbed[0].root)
    assert result.steps == 6


def test_divergence_stops_the_run_for_good_and_publishes_nothing_of_it(runs):
    plan = runs.plan(learning_rate={"schedule": "constant", "peak": 1e30}, save_every_steps=1)
    with pytest.raises(RunFailed, match=r"the loss on the weights of step \d is nan"):
        runs.run(plan)
    before = len(runs.service.execution_log())
    with pytest.raises(RunFailed, match="use a new root"):
        runs.run(plan)
    assert len(runs.service.execution_log()) == before
    assert all(job_state(runs, job) in ("cancelling", "cancelled") for job in jobs(runs.root))
    state = status(runs.root).state
    published = [e.step for e in PublicationLog(runs.root).entries()]
    assert all(state.current.weights_are_finite(step) for step in published)


class TestOnSomebodyElsesJob:
    def create(self, runs, sub_jobs=None):
        async def main():
            async with runs.client() as client:
                body = {"sub_job_configs": [dict(s) for s in sub_jobs or runs.plan().sub_jobs]}
                job_id = (await client.create_job_from_body(body))["job_id"]
                await client.wait_for_job(job_id)
                return job_id

        return asyncio.run(main())

    def cancel(self, runs, job_id):
        async def main():
            async with runs.client() as client:
                await client.cancel_job(job_id)

        asyncio.run(main())

    def test_the_job_is_left_alive(self, undisturbed, runs):
        job_id = self.create(runs)
        result = runs.run(runs.plan(job_id=job_id))
        assert result.job_id == job_id
        assert job_state(runs, job_id) == "running"
        assert losses(runs.root) == losses(undisturbed[0].root)
        self.cancel(runs, job_id)

    def test_a_lost_job_fails_the_run_with_the_way_out(self, runs):
        job_id = self.create(runs)
        runs.run(runs.plan(job_id=job_id, steps=2))
        self.cancel(runs, job_id)
        with pytest.raises(RunFailed, match="without sub_jobs"):
            runs.run(runs.plan(job_id=job_id, steps=4))

    def test_another_job_goes_on_from_the_last_publication(self, undisturbed, runs):
        first = self.create(runs)
        runs.run(runs.plan(job_id=first, steps=4))
        self.cancel(runs, first)
        second = self.create(runs)
        result = runs.run(runs.plan(job_id=second, steps=6))
        assert result.job_id == second
        assert losses(runs.root) == losses(undisturbed[0].root)
        self.cancel(runs, second)

    def test_a_weight_sync_to_a_job_without_samplers_is_refused_before_the_root_is_made(self, runs):
        job_id = self.create(runs, SUB_JOBS[:1])
        try:
            with pytest.raises(ConfigurationError, match=r"weight_sync_every_steps = 2: .* has no sampling sub-job"):
                runs.run(runs.plan(job_id=job_id, weight_sync_every_steps=2))
        finally:
            self.cancel(runs, job_id)
        assert not os.path.exists(runs.root)

    def test_an_unknown_job_is_named_before_the_root_is_made(self, runs):
        with pytest.raises(ConfigurationError, match=r"plan\.job_id"):
            runs.run(runs.plan(job_id="00000000-0000-4000-8000-000000000000"))
        assert not os.path.exists(runs.root)


def test_a_teardown_cancels_every_job_of_the_root(runs, proxy):
    proxy.add(r"^POST .*/step$", DROP_BEFORE, skip=1)

    async def main():
        from cortex_training.training import run

        stop = asyncio.Event()

        def progress(seen):
            if seen.stage == "train" and seen.step == 3:
                stop.set()

        async with runs.client() as client:
            with pytest.raises(RunInterrupted):
                await run(runs.plan(), client, progress, stop=stop)
            return await cancel_jobs(runs.root, client)

    cancelled = asyncio.run(main())
    assert len(jobs(runs.root)) == 2
    assert cancelled == jobs(runs.root)[-1:]
    assert all(job_state(runs, job) in ("cancelling", "cancelled") for job in jobs(runs.root))


def test_a_dataset_longer_than_the_models_window_is_refused_before_a_job_exists(runs):
    plan = runs.plan()
    plan.sub_jobs[0]["training_config"]["max_seq_len"] = 64

    async def known_jobs():
        async with runs.client() as client:
            return {job["job_id"] for job in await client.list_jobs()}

    before = asyncio.run(known_jobs())
    with pytest.raises(ConfigurationError, match="128"):
        runs.run(plan)
    assert not os.path.exists(runs.root)
    assert asyncio.run(known_jobs()) == before
