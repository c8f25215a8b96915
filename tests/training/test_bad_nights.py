"""Nights on which a guess would have cost a step, a batch, or a GPU."""

import asyncio
import threading

import pytest

from cortex_training.errors import AuthError
from cortex_training.publication.log import PublicationLog
from cortex_training.training import RunFailed, Superseded, cancel_jobs, end_run, operations, run, status
from tests.conftest import start_service
from tests.faults.proxy import ANSWER, DROP_AFTER, DROP_BEFORE, LATE, FaultProxy
from tests.training.conftest import Runs

DEAD = ("cancelling", "cancelled")


def on_client(runs, use, base_url=None):
    async def main():
        async with runs.client(base_url) as client:
            return await use(client)

    return asyncio.run(main())


def state_of(runs, job_id):
    async def look(client):
        return (await client.get_job(job_id))["status"]

    return on_client(runs, look, runs.service.base_url)


def jobs(runs):
    return status(runs.root).state.job_ids


def steps(runs, job_id):
    return [r["global_steps"] for r in runs.executed("step", job_id)]


def foreign_job(runs):
    async def create(client):
        job_id = (await client.create_job_from_body({"sub_job_configs": [dict(s) for s in runs.plan().sub_jobs]}))[
            "job_id"
        ]
        await client.wait_for_job(job_id)
        return job_id

    return on_client(runs, create)


def cancel(runs, job_id):
    on_client(runs, lambda client: client.cancel_job(job_id))


@pytest.fixture(scope="module")
def unhelpful_service(tmp_path_factory):
    """It counts from zero after a restore, and gives jobs ids of its own."""
    folder = tmp_path_factory.mktemp("unhelpful")
    service = start_service(folder, assume=["global-steps=zero", "job-ids=ignored"])
    yield service
    service.stop()


@pytest.fixture
def unhelped(unhelpful_service, manifest, tmp_path):
    with FaultProxy(unhelpful_service.base_url) as proxy:
        yield Runs(unhelpful_service, manifest, tmp_path / "run", proxy.base_url), proxy


def test_a_lost_step_is_not_settled_by_a_count_that_is_only_guessed(unhelped):
    runs, proxy = unhelped
    runs.run(runs.plan(steps=1, save_every_steps=1))
    proxy.add(r"^POST .*/step$", DROP_AFTER)
    result = runs.run(runs.plan(steps=3, save_every_steps=1))
    first, doubted, last = jobs(runs)
    assert result.steps == 3
    # The doubted job did step once; nobody could tell, so it was given up, and its step counts nowhere.
    assert (steps(runs, first), steps(runs, doubted), steps(runs, last)) == ([1], [1], [1, 2])
    assert status(runs.root).state.current.base.step == 1


def stepped_once(runs):
    """Somebody else's job, which has been stepped already."""
    job_id = foreign_job(runs)

    async def step_once(client):
        frame = open_frame(runs)
        await client.poll_request(job_id, await client.forward_backward(job_id, frame))
        await client.poll_request(job_id, await client.step(job_id))

    on_client(runs, step_once)
    return job_id


@pytest.fixture
def hasty(monkeypatch):
    """Networks that hold no request back for long."""
    monkeypatch.setattr(operations, "LATE_S", 0.5)


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_never_came_to_somebody_elses_job_is_sent_again(runs, proxy, hasty, step):
    job_id = stepped_once(runs)
    proxy.add(r"^POST .*/step$", DROP_BEFORE, skip=step - 1)
    result = runs.run(runs.plan(job_id=job_id, steps=3))
    assert (result.steps, result.segments) == (3, 1)
    assert steps(runs, job_id) == [1, 2, 3, 4]
    cancel(runs, job_id)


def test_a_step_that_comes_late_to_somebody_elses_job_is_waited_for(runs, proxy, monkeypatch):
    monkeypatch.setattr(operations, "LATE_S", 3.0)
    job_id = stepped_once(runs)
    proxy.add(r"^POST .*/step$", LATE, skip=1, delay_s=0.3)
    result = runs.run(runs.plan(job_id=job_id, steps=3))
    assert (result.steps, result.segments) == (3, 1)
    assert steps(runs, job_id) == [1, 2, 3, 4]
    cancel(runs, job_id)


def test_a_step_that_comes_after_it_was_sent_again_ends_the_run_and_nothing_of_it_is_published(runs, proxy, hasty):
    job_id = stepped_once(runs)
    proxy.add(r"^POST .*/step$", LATE, skip=1, delay_s=4.0)
    with pytest.raises(RunFailed, match=r"expected.*may not create one"):
        runs.run(runs.plan(job_id=job_id, steps=40))
    published = PublicationLog(runs.root).entries()
    doubled = status(runs.root).state.current.confirmed_step
    assert all(entry.step <= doubled for entry in published)
    cancel(runs, job_id)


def test_a_job_that_never_gets_a_step_ends_the_run_on_somebody_elses_job(runs, proxy, hasty):
    job_id = stepped_once(runs)
    proxy.add(r"^POST .*/step$", DROP_BEFORE, times=9)
    with pytest.raises(RunFailed, match=r"step 1 was sent and has not been executed.*may not create one"):
        runs.run(runs.plan(job_id=job_id, steps=3, max_attempts=2))
    assert steps(runs, job_id) == [1]
    assert status(runs.root).state.current.lost_steps(1) == 2
    cancel(runs, job_id)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("made", [foreign_job, stepped_once])
def test_a_lost_answer_on_somebody_elses_job_is_settled_from_the_first_step_on(runs, proxy, made, step):
    job_id = made(runs)
    before = len(steps(runs, job_id))
    proxy.add(r"^POST .*/step$", DROP_AFTER, skip=step - 1)
    result = runs.run(runs.plan(job_id=job_id, steps=3))
    assert (result.steps, result.global_steps) == (3, before + 3)
    assert steps(runs, job_id) == list(range(1, before + 4))
    assert {entry.step for entry in PublicationLog(runs.root).entries()} <= {1, 2, 3}
    cancel(runs, job_id)


def open_frame(runs):
    from cortex_training.datasets import Dataset

    return Dataset.open(runs.manifest).batches(2, 1, 9).frame(1, 0)


@pytest.mark.parametrize(
    ("path", "skip", "segments"), [("step", 1, 2), ("forward-backward", 0, 1), ("forward-backward", 3, 2)]
)
@pytest.mark.parametrize("status_code", [pytest.param(409, marks=pytest.mark.live), 503])
def test_workers_that_restart_lose_the_segment_if_they_held_gradients(runs, proxy, path, skip, segments, status_code):
    body = {"code": status_code, "message": "zone is restarting, try again"}
    proxy.add(rf"^POST .*/{path}$", ANSWER, skip=skip, status=status_code, body=body)
    result = runs.run()
    assert result.segments == segments
    assert result.steps == 6
    assert all(state_of(runs, job) in DEAD for job in jobs(runs))


def test_a_job_of_somebody_else_stays_alive_when_the_run_moves_to_its_own(runs):
    job_id = foreign_job(runs)
    runs.run(runs.plan(job_id=job_id, steps=2))
    result = runs.run(runs.plan(steps=4))
    assert result.job_id != job_id
    assert result.segments == 2
    assert state_of(runs, job_id) == "running"
    assert state_of(runs, result.job_id) in DEAD
    assert steps(runs, result.job_id) == [3, 4]
    cancel(runs, job_id)


def test_a_job_of_our_own_is_cancelled_when_the_run_moves_to_somebody_elses(runs):
    first = runs.run(runs.plan(steps=2, when_done="keep"))
    job_id = foreign_job(runs)
    runs.run(runs.plan(job_id=job_id, steps=4))
    assert state_of(runs, first.job_id) in DEAD
    assert state_of(runs, job_id) == "running"
    cancel(runs, job_id)


def test_a_bad_minute_in_which_saves_get_no_answer_costs_neither_run_nor_job(runs, proxy, monkeypatch):
    monkeypatch.setattr(operations, "SAVE_PAUSES_S", (0.01,) * len(operations.SAVE_PAUSES_S))
    rule = proxy.add(r"^POST .*/save$", DROP_BEFORE, times=5)
    result = runs.run()
    assert rule.seen > 5
    assert result.segments == 1
    assert len(jobs(runs)) == 1


def test_saves_that_are_never_answered_end_the_run_and_its_job(runs, proxy, monkeypatch):
    monkeypatch.setattr(operations, "SAVE_PAUSES_S", (0.01,) * len(operations.SAVE_PAUSES_S))
    rule = proxy.add(r"^POST .*/save$", ANSWER, times=10**6, status=500, body={"message": "disk on fire"})
    with pytest.raises(RunFailed, match=r"saves after step 2 .* got no answer"):
        runs.run()
    assert rule.seen <= 10
    assert state_of(runs, jobs(runs)[0]) in DEAD


def test_a_call_that_the_service_refuses_ends_the_run_and_its_job(runs, proxy):
    proxy.add(r"^POST .*/step$", ANSWER, status=400, body={"message": "learning_rate is cursed"})
    with pytest.raises(RunFailed, match="learning_rate is cursed"):
        runs.run()
    assert state_of(runs, jobs(runs)[0]) in DEAD


def test_a_folder_that_was_published_by_hand_does_not_stop_a_recovery(runs, proxy):
    def spoil():
        log = PublicationLog(runs.root)
        log.store.write("exec/by-hand/weights.txt", b"x")
        log.publish("exec/by-hand", 10**6, 99)
        cancel_now = asyncio.new_event_loop()
        cancel_now.run_until_complete(_cancel(runs))
        cancel_now.close()

    proxy.add(r"^POST .*/step$", "forward", skip=4, before=spoil)
    result = runs.run()
    assert result.segments == 2
    assert steps(runs, result.job_id) == [5, 6]


async def _cancel(runs):
    async with runs.client(runs.service.base_url) as client:
        await client.cancel_job(jobs(runs)[0])


def test_a_run_that_is_ended_while_its_job_is_being_created_leaves_no_job(runs, proxy):
    ended = []

    def end_meanwhile():
        async def end(client):
            ended.extend(await end_run(runs.root, client))

        thread = threading.Thread(target=on_client, args=(runs, end, runs.service.base_url))
        thread.start()
        # Until the journal is taken away; the create is forwarded after that, and lands in front of a closed door.
        while status(runs.root).state.epoch < 2:
            threading.Event().wait(0.05)
        threads.append(thread)

    threads = []
    proxy.add(r"^POST .*/cortex-training$", "forward", before=end_meanwhile)
    with pytest.raises(Superseded):
        runs.run()
    threads[0].join(30)
    (job_id,) = jobs(runs)
    assert state_of(runs, job_id) in DEAD


def test_one_job_that_cannot_be_looked_at_keeps_no_other_alive(runs, proxy):
    proxy.add(r"^POST .*/step$", DROP_BEFORE, skip=1)
    stop = asyncio.Event()

    def progress(seen):
        if seen.stage == "train" and seen.step == 3:
            stop.set()

    async def begin(client):
        with pytest.raises(Exception, match="stopped by its host"):
            await run(runs.plan(), client, progress, stop=stop)

    on_client(runs, begin)
    old, new = jobs(runs)
    proxy.add(rf"^GET .*/{old}$", ANSWER, times=99, status=403, body={"message": "not yours any more"})
    with pytest.raises(AuthError):
        on_client(runs, lambda client: cancel_jobs(runs.root, client))
    assert state_of(runs, new) in DEAD


def test_an_ended_run_is_taken_from_a_driver_that_is_still_alive(runs, proxy):
    reached = threading.Event()
    proxy.add(r"^POST .*/step$", "forward", skip=1, before=lambda: (reached.set(), threading.Event().wait(1.0)))

    async def both(client):
        driving = asyncio.create_task(run(runs.plan(), client))
        await asyncio.to_thread(reached.wait, 60)
        cancelled = await end_run(runs.root, client)
        with pytest.raises(Superseded):
            await driving
        return cancelled

    assert on_client(runs, both) == jobs(runs)
    assert len(jobs(runs)) == 1


def test_a_creation_that_was_lost_on_a_service_with_ids_of_its_own_is_told_of(unhelped):
    runs, proxy = unhelped

    async def listed(client):
        return {job["job_id"] for job in await client.list_jobs()}

    before = on_client(runs, listed, runs.service.base_url)
    proxy.add(r"^POST .*/cortex-training/?$", DROP_AFTER)
    result = runs.run(runs.plan(steps=2))
    (lost,) = on_client(runs, listed, runs.service.base_url) - before - {result.job_id}
    assert [p.message for p in runs.progress if lost in p.message and "should be cancelled" in p.message]
    assert state_of(runs, lost) not in DEAD
    cancel(runs, lost)
