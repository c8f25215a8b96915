"""A whole run in a bucket: driven, killed, fought over, throttled; and its credentials are in none of its objects."""

import asyncio
import json
import threading

import pytest

from cortex_training.cli import main
from cortex_training.errors import CortexTrainingError
from cortex_training.publication import PublicationLog, StoreError, open_store, s3
from cortex_training.training import RunFailed, Superseded, cancel_jobs, end_run, packs, status
from cortex_training.training.metrics import read_metrics
from tests.faults.proxy import HOLD
from tests.training.conftest import Runs
from tests.training.test_kill import Driver


@pytest.fixture(scope="module")
def on_disk(local_service, manifest, tmp_path_factory):
    """The same run on a directory: what a bucket must not change."""
    runs = Runs(local_service, manifest, tmp_path_factory.mktemp("disk") / "run", local_service.base_url)
    runs.run()
    return status(runs.root).state.losses


class BucketRuns(Runs):
    credentials = ""

    def plan(self, **changes):
        return super().plan(credentials=self.credentials, **changes)

    @property
    def state(self):
        return status(self.root, self.credentials).state


def in_bucket(service, manifest, root, credentials, base_url):
    runs = BucketRuns(service, manifest, root, base_url)
    runs.credentials = credentials
    return runs


@pytest.fixture
def runs(local_service, manifest, s3_root, creds, proxy):
    return in_bucket(local_service, manifest, s3_root, creds, proxy.base_url)


@pytest.fixture
def faulty_runs(local_service, manifest, s3_root, faulty_creds, proxy):
    return in_bucket(local_service, manifest, s3_root, faulty_creds, proxy.base_url)


def objects(s3_server, bucket):
    client = s3_server.client()
    keys = [
        item["Key"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        for item in page.get("Contents", ())
    ]
    return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}


def test_a_run_trains_publishes_and_prunes_and_keeps_no_credential(
    runs, on_disk, s3_server, bucket, s3_store, capsys, monkeypatch
):
    monkeypatch.setattr(packs, "PACK_RECORDS", 15)
    result = runs.run(runs.plan(keep_publications=2))
    assert result.root == runs.root
    assert runs.state.losses == on_disk
    assert [e.step for e in PublicationLog(s3_store).entries()] == [4, 6]
    assert s3_store.holds_save(PublicationLog(s3_store).latest().save)
    assert [row["step"] for row in read_metrics(runs.root, runs.credentials)] == [1, 2, 3, 4, 5, 6]
    stored = objects(s3_server, bucket)
    assert any("/journal/packed/" in key for key in stored)
    for secret in (s3_server.access_key_id, s3_server.secret_access_key):
        assert not [key for key, data in stored.items() if secret.encode() in data or secret in key]
    # The same command a second time finds it finished, and whoever only looks gets the same answer.
    before = len(runs.service.execution_log())
    assert runs.run().entry == result.entry
    assert len(runs.service.execution_log()) == before
    assert main(["runs", runs.root, "--creds", runs.credentials]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == "finished 6 steps"


def test_a_driver_killed_in_the_middle_is_followed_by_one_that_goes_on(runs, proxy, tmp_path):
    driver = Driver(runs, tmp_path)
    for _ in range(2):
        rule = proxy.add(r"^POST .*/step$", HOLD, skip=1)
        process = driver.start()
        assert rule.holding.wait(60), process.communicate()
        process.kill()
        process.communicate()
        rule.released.set()
    result = driver.finish()
    assert (result["steps"], result["segments"]) == (10, 1)
    assert [r["global_steps"] for r in runs.executed("step", result["job_id"])] == list(range(1, 11))


def test_two_drivers_at_once_leave_one(runs, on_disk):
    async def drive():
        from cortex_training.training import run

        async def one():
            async with runs.client() as client:
                return await run(runs.plan(), client, attempt="twin")

        return await asyncio.gather(one(), one(), return_exceptions=True)

    ends = asyncio.run(drive())
    assert sorted(type(end).__name__ for end in ends) == ["Superseded", "TrainingResult"]
    assert runs.state.losses == on_disk
    steps = [r["global_steps"] for r in runs.executed("step", *runs.state.job_ids)]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("action", "part"),
    [
        ("status 409 ConditionalRequestConflict", "/journal/"),
        ("drop after", "/pub/"),
        pytest.param("status 503 SlowDown", "/journal/", marks=pytest.mark.live),
        pytest.param("drop after", "/journal/", marks=pytest.mark.live),
        pytest.param("drop before", "/exec/", marks=pytest.mark.live),
    ],
)
def test_a_bucket_that_falters_costs_nothing(faulty_runs, faults, on_disk, action, part):
    faults.spoil("PUT", part, action, 4)
    result = faulty_runs.run()
    assert (result.steps, result.segments) == (6, 1)
    assert faulty_runs.state.losses == on_disk
    assert len(faulty_runs.executed("step", result.job_id)) == 6


def test_a_bucket_that_settles_other_writes_for_long_costs_nothing_whatever_is_written(
    faulty_runs, faults, on_disk, monkeypatch
):
    """The claim, the identity, the takeover and every other record, packs, manifests, publications."""
    monkeypatch.setattr(s3, "_CONFLICT_WAIT_S", 0.005)
    monkeypatch.setattr(packs, "PACK_RECORDS", 15)
    parts = ("/run.json", "/epochs/", "/journal/packed/", "/journal/0", "/exec/", "/pub/")
    spoiled = [faults.spoil("PUT", part, "status 409 ConditionalRequestConflict", 8) for part in parts]
    result = faulty_runs.run()
    assert [fault.met for fault in spoiled] == [8] * len(parts)
    assert (result.steps, result.segments) == (6, 1)
    assert faulty_runs.state.losses == on_disk
    assert len(faulty_runs.executed("step", result.job_id)) == 6


def test_a_bucket_that_overwrites_is_refused_before_the_run_begins(faulty_runs, faults, s3_server, bucket):
    """A store that ignores the condition says 200 to both writers, and two drivers would own the run."""
    faults.spoil("PUT", "/.cortex-probe-", "pretend", 2)
    with pytest.raises(StoreError, match="probe"):
        faulty_runs.run()
    assert not objects(s3_server, bucket)


def test_wrong_credentials_are_named_and_not_shown(runs, tmp_path):
    from tests.publication.servers import write_secret

    wrong = write_secret(tmp_path / "wrong", access_key_id="AKIDWRONG", secret_access_key="very-secret-text")
    with pytest.raises(CortexTrainingError) as caught:
        runs.run(runs.plan().__class__.from_dict({**runs.plan().to_dict(), "credentials": f"{wrong}-missing"}))
    assert "no source answered" in str(caught.value)
    assert "very-secret-text" not in repr(caught.value)


def test_a_teardown_ends_a_run_in_a_bucket(runs, proxy, s3_root, creds):
    async def end():
        async with runs.client() as client:
            before = await end_run(s3_root, client, creds)
            await cancel_jobs(s3_root, client, creds)
            return before

    assert asyncio.run(end()) == []
    rule = proxy.add(r"^POST .*/step$", HOLD, skip=1)
    ended = []

    def drive():
        try:
            runs.run()
        except (Superseded, RunFailed) as problem:
            ended.append(problem)

    thread = threading.Thread(target=drive)
    thread.start()
    assert rule.holding.wait(60)
    cancelled = asyncio.run(end())
    rule.released.set()
    thread.join(60)
    assert cancelled == runs.state.job_ids
    assert [type(problem) for problem in ended] == [Superseded]


def test_the_journal_in_a_bucket_is_what_a_directory_would_hold(runs, s3_root, creds):
    runs.run(runs.plan(steps=2))
    store = open_store(s3_root, creds)
    records = [json.loads(store.read(f"journal/{name}")) for name in store.names("journal")]
    assert [r["type"] for r in records][:5] == ["takeover", "segment", "created", "running", "intent"]
    assert records[-1]["type"] == "released"
