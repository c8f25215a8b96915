"""kill -9 and another start: what is still there, what has failed, what goes on, and that nothing is half there."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from typing import Any

import requests

from cortex_training.local.job_spec import read_job_spec
from cortex_training.local.jobs import Job
from cortex_training.states import JobState
from tests.conftest import ServiceFactory
from tests.local.api import Caller, RunningJob, chunks_of, masked_frame, sampling, token_batch, training


def page_of(job: RunningJob, request_id: str) -> dict[str, Any]:
    reply = job.call("GET", f"/requests/{request_id}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_finished_requests_stay_readable(start_local_service: ServiceFactory) -> None:
    service = start_local_service(result_chunk_bytes=10_000)
    job = Caller(service.url).running(training(), sampling())
    asked = {
        "forward-backward": job.post_frame(chunks_of(masked_frame(token_batch()))[0]),
        "failed": job.post_frame(masked_frame(token_batch(1, 300))),
        "step": job.call("POST", "/step", json={}),
        "generate": job.call("POST", "/generate", json={"prompts": ["Hello"] * 40}),
        # A frame asks for its result in chunks, which are more here than one page shows.
        "chunked": job.post_frame(
            masked_frame(token_batch(64, 128), processing={"post": ["compute_logprobs"]}), path="/forward"
        ),
    }
    for reply in asked.values():
        job.poll(reply)
    stream = job.call("POST", "/generate-stream", json={"prompts": ["a", "b", "c"], "sampling_params": {"seed": 1}})
    while page_of(job, stream.json()["request_id"])["status"] == "pending":
        pass
    time.sleep(0.2)
    taken = [event["type"] for event in page_of(job, stream.json()["request_id"])["events"]]
    before = {name: page_of(job, reply.json()["request_id"]) for name, reply in asked.items()}
    assert before["chunked"]["next_cursor"]
    running = job.call("POST", "/generate", json={"prompts": ["x"] * 64, "sampling_params": {"max_tokens": 100}})
    service.kill()

    # As the service does by default: a job that has ended answers no polls.
    service = start_local_service(result_chunk_bytes=10_000)
    job = RunningJob(Caller(service.url), job.job_id)
    refused = job.call("GET", f"/requests/{asked['step'].json()['request_id']}")
    assert (refused.status_code, refused.json()["job_status"]) == (409, "failed")

    service.kill()
    job = RunningJob(Caller(start_local_service(assume="ended-job-polls=served").url), job.job_id)
    for name, page in before.items():
        request_id = page["request_id"]
        assert page_of(job, request_id) == page
        if name == "chunked":
            following = job.call("GET", f"/requests/{request_id}", params={"cursor": page["next_cursor"]}).json()
            assert following["events"]
    cut_off = page_of(job, running.json()["request_id"])
    assert (cut_off["status"], cut_off["result"]) == ("failed", None)
    assert "the service was restarted while this was" in cut_off["error"]
    # What a poll took is gone, and what none took is there.
    left = [event["type"] for event in page_of(job, stream.json()["request_id"])["events"]]
    assert sorted(taken + left) == ["done", *["result"] * 3]
    assert job.call("GET", "/requests/unknown").status_code == 404


def test_jobs_go_on_from_their_last_checkpoint(start_local_service: ServiceFactory) -> None:
    service = start_local_service(gpus=8)
    caller = Caller(service.url)
    job = caller.running(training(), sampling())
    for seed in range(2):
        job.forward_backward(masked_frame(token_batch(seed=seed)))
        job.step()
    not_stepped = job.post_frame(masked_frame(token_batch(seed=2)))
    job.poll(not_stepped)
    kept = job.save()
    at_the_save = job.done(job.post_frame(masked_frame(token_batch(seed=7)), path="/forward"))["avg_loss"]
    job.sync()
    stepped_later = job.call("POST", "/step", json={})
    job.poll(stepped_later)
    older = job.call("POST", "/save", json={"checkpoint_type": "weights-only"})
    weights = job.done(older)["checkpoint_id"]
    forgetful = caller.running(training())
    forgetful.forward_backward(masked_frame(token_batch()))
    untouched = caller.running(sampling(source_checkpoint_info={"checkpoint_id": weights, "source_job_id": job.job_id}))
    sampled = untouched.generate([[5, 6, 7]], sampling_params={"temperature": 0})
    waiting = RunningJob(caller, caller.create(training(config={"n_gpus": 7})).json()["job_id"])
    assert waiting.describe()["status"] == "pending"
    service.kill()

    caller = Caller(start_local_service(gpus=8, resume_jobs=True).url)
    job, forgetful, untouched, waiting = (
        RunningJob(caller, one.job_id) for one in (job, forgetful, untouched, waiting)
    )
    failed = forgetful.describe()
    assert (failed["status"], "had saved nothing" in failed["reason"]) == ("failed", True)
    described = job.wait_for("running", "failed")
    assert kept in described["reason"]
    assert "at step 2, and what it did after that is lost" in described["reason"]
    assert "sampling has the weights it was created with" in described["reason"]
    # What is in the checkpoint is still done; what is not has failed, though its caller had seen it done.
    for lost in (not_stepped, stepped_later):
        page = page_of(job, lost.json()["request_id"])
        assert (page["status"], page["result"]) == ("failed", None)
        assert "lost when the service was restarted" in page["error"]
    assert page_of(job, older.json()["request_id"])["status"] == "done"
    measured = job.done(job.post_frame(masked_frame(token_batch(seed=7)), path="/forward"))["avg_loss"]
    assert measured == at_the_save
    job.forward_backward(masked_frame(token_batch(seed=2)))
    assert job.step()["global_steps"] == 3
    untouched.wait_for("running")
    assert untouched.generate([[5, 6, 7]], sampling_params={"temperature": 0}) == sampled
    assert waiting.describe()["status"] == "pending"
    for one in (job, untouched):
        one.call("POST", ":cancel")
    waiting.wait_for("running")


def test_what_a_job_cost_before_the_restart_counts() -> None:
    spec = read_job_spec({"sub_job_configs": [training(config={"n_gpus": 2})]})
    job = Job("job", spec, "DB", "PUBLIC", [], earlier_gpu_seconds=50.0)
    assert job.gpu_seconds == 50.0
    job.move_to(JobState.RUNNING)
    job.move_to(JobState.FAILED)
    assert 50.0 <= job.gpu_seconds < 60.0


def test_what_a_poll_showed_is_never_taken_back(start_local_service: ServiceFactory) -> None:
    """Killed at any moment, under load: what was seen done is done, with the same result; everything has one state."""
    chance = random.Random(1)
    seen: dict[tuple[str, str], Any] = {}
    jobs: list[str] = []
    for _ in range(4):
        service = start_local_service(simulate="0", resume_jobs=True, assume="ended-job-polls=served")
        caller = Caller(service.url)
        for job_id, request_id in seen:
            page = page_of(RunningJob(caller, job_id), request_id)
            assert page["status"] == "done"
            assert page["result"] == seen[job_id, request_id]
        for job_id in jobs:
            assert RunningJob(caller, job_id).describe()["status"] not in ("terminated", "cancelled")
        job = caller.running(sampling())
        jobs.append(job.job_id)
        killer = threading.Timer(chance.uniform(0.2, 0.6), service.process.kill)
        killer.start()
        try:
            while True:
                reply = job.call("POST", "/generate", json={"prompts": ["a"] * chance.randrange(1, 200)})
                page = job.poll(reply)
                assert page["status"] == "done"
                seen[job.job_id, page["request_id"]] = page["result"]
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            service.process.wait()
        finally:
            killer.join()
        with sqlite3.connect(service.data_dir / "requests.sqlite") as rows:
            assert rows.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            orphans = (
                "SELECT count(*) FROM result_chunks WHERE execution_id NOT IN (SELECT execution_id FROM executions)"
            )
            assert rows.execute(orphans).fetchone() == (0,)
    assert len(seen) > 10


def test_a_job_that_is_not_valid_any_more_does_not_keep_the_service_down(start_local_service: ServiceFactory) -> None:
    service = start_local_service(simulate="0")
    caller = Caller(service.url)
    good, old = caller.running(), caller.running()
    service.kill()
    with sqlite3.connect(service.data_dir / "jobs.sqlite") as rows:
        rows.execute("UPDATE jobs SET body = '{}' WHERE job_id = ?", (old.job_id,))
    caller = Caller(start_local_service(simulate="0").url)
    assert RunningJob(caller, good.job_id).describe()["status"] == "failed"
    assert RunningJob(caller, old.job_id).call("GET", "").status_code == 404


def test_a_cancelled_job_stays_cancelled(start_local_service: ServiceFactory) -> None:
    service = start_local_service(simulate="0")
    job = Caller(service.url).running()
    service.kill()
    with sqlite3.connect(service.data_dir / "jobs.sqlite") as rows:
        rows.execute("UPDATE jobs SET state = 'cancelling', reason = 'cancelled by the caller'")
    job = RunningJob(Caller(start_local_service(simulate="0", resume_jobs=True).url), job.job_id)
    assert (job.describe()["status"], job.describe()["reason"]) == ("cancelled", "cancelled by the caller")
