"""What a root alone tells of its run: where it stands and why, who drives it, and whose its jobs are."""

import asyncio
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cortex_training.publication import StoreError
from cortex_training.training import RunFailed, RunInterrupted, status
from cortex_training.training.journal import JournalWriter, read_journal
from cortex_training.training.loop import _record_stop
from cortex_training.training.root import claim_identity, open_root
from cortex_training.training.state import replay
from cortex_training.training.sweep import owned_jobs
from cortex_training.training.teardown import take_away


class Root:
    """A root whose journal is written record by record, as a driver of these steps writes it."""

    def __init__(self, path):
        self.path = str(path)
        self.store = open_root(self.path)
        claim_identity(self.store, {"model_name": "tiny"})
        self.drivers = 0
        self.segments = 0

    def driver(self, **info):
        self.drivers += 1
        self._writer = JournalWriter.take_over(self.store, self.drivers, f"{self.drivers:032x}", {"info": info})
        return self

    def record(self, type_, **body):
        return self._writer.append(type_, body).number

    def segment(self, job_id, *, step=0, cause="first"):
        base = {"checkpoint_id": "cp", "source_job_id": "old", "step": step, "global_steps": step} if step else None
        body = {"segment": self.segments, "job_id": job_id, "owned": True, "base": base, "reason": "r", "cause": cause}
        self.record("segment", **body)
        self.segments += 1

    def trains(self, *steps):
        for step in steps:
            intent = self.record("intent", op="step", segment=self.segments - 1, step=step)
            self.record("outcome", intent=intent, status="done", result={"global_steps": step})

    def finishes(self, steps, *cancelled):
        self.record("finished", steps=steps)
        for job_id in cancelled:
            self.record("cancelled", job_id=job_id)
        self.record("released")

    @property
    def driven(self):
        return status(self.path).driven()

    @property
    def owned(self):
        return set(owned_jobs([self.path]))

    @property
    def what_happened(self):
        return status(self.path).what_happened


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path / "run").driver()


class TestWhoseJobsAre:
    def test_the_job_of_a_run_that_is_not_finished_is_owned(self, root):
        root.segment("a")
        assert root.owned == {"a"}
        root.trains(1, 2)
        assert root.owned == {"a"}

    def test_the_kept_job_of_a_finished_run_is_nobodys(self, root):
        root.segment("a")
        root.trains(1, 2)
        root.finishes(2)
        assert root.owned == set()

    def test_the_new_job_of_a_finished_run_that_goes_on_is_owned(self, root):
        root.segment("a")
        root.trains(1, 2)
        root.finishes(2, "a")
        root.driver().segment("b", step=2, cause="continuation")
        assert root.owned == {"b"}
        assert root.what_happened.startswith("confirmed step 2")

    def test_a_kept_job_that_goes_on_is_owned_from_its_first_operation_on(self, root):
        root.segment("a")
        root.trains(1, 2)
        root.finishes(2)
        root.driver().record("intent", op="forward_backward", segment=0, step=3)
        assert root.owned == {"a"}
        assert root.what_happened.startswith("confirmed step 2")

    def test_a_cancelled_job_is_nobodys_and_its_replacement_is_owned(self, root):
        root.segment("a")
        root.record("ended", reason="lost")
        root.record("cancelled", job_id="a")
        root.segment("b", cause="replacement")
        assert root.owned == {"b"}

    def test_a_run_that_used_its_budget_up_owns_no_job_until_it_gets_more(self, root):
        root.segment("a")
        root.trains(1)
        root.record("paused", reason="budget")
        assert root.owned == set()
        root.driver().record("intent", op="forward_backward", segment=0, step=2)
        assert root.owned == {"a"}
        assert root.what_happened.startswith("confirmed step 1")


class TestWhyARunStopped:
    def test_a_run_that_failed_says_why_until_another_driver_has_it(self, root):
        root.segment("a")
        root.trains(1, 2)
        root.record("stopped", reason="forward-backward 0 of step 3 failed 3 times")
        root.record("cancelled", job_id="a")
        root.record("released")
        assert root.what_happened == "stopped after step 2: forward-backward 0 of step 3 failed 3 times"
        root.driver(host="elsewhere", pid=7)
        assert root.what_happened.startswith("confirmed step 2, driven by process 7 on elsewhere")

    def test_a_run_whose_job_could_not_even_be_created_says_why(self, root):
        root.segment("a")
        root.record("stopped", reason="the service refused to create a job")
        assert root.what_happened == "stopped after step 0: the service refused to create a job"

    def test_a_run_that_was_taken_from_its_driver_says_so(self, root):
        root.segment("a")
        root.trains(1)
        take_away(root.path)
        assert root.what_happened == "ended by its owner after step 1"
        assert root.driven["ended_by_owner"]

    def test_a_finished_run_that_is_torn_down_stays_finished(self, root):
        root.segment("a")
        root.trains(1)
        root.finishes(1, "a")
        take_away(root.path)
        assert root.what_happened == "finished 1 steps"

    def test_records_of_a_newer_release_change_nothing(self, root):
        root.segment("a")
        root.trains(1)
        before = replay(read_journal(root.store))
        root.record("of_next_year", reason="x")
        after = replay(read_journal(root.store))
        assert (after.stopped, after.current) == (before.stopped, before.current)


class TestWhoDrives:
    def test_a_living_driver_is_named_with_its_machine_and_its_silence(self, root):
        root.driver(host=socket.gethostname(), pid=os.getpid(), attempt="nightly").segment("a")
        root.trains(1)
        driven = root.driven
        assert (driven["host"], driven["pid"], driven["attempt"]) == (socket.gethostname(), os.getpid(), "nightly")
        assert (driven["epoch"], driven["released"], driven["process_is_gone"]) == (2, False, False)
        assert 0 <= driven["silent_s"] < 3600
        assert root.what_happened.startswith(f"confirmed step 1, driven by process {os.getpid()} on ")

    def test_one_that_let_go_drives_no_more(self, root):
        root.driver(host=socket.gethostname(), pid=os.getpid()).segment("a")
        root.record("released")
        assert root.driven["released"]
        assert root.what_happened == "confirmed step 0, goes on with the next driver"

    def test_neither_does_one_whose_process_is_gone(self, root):
        process = subprocess.Popen([sys.executable, "-S", "-c", ""])
        process.wait()
        root.driver(host=socket.gethostname(), pid=process.pid).segment("a")
        assert root.driven["process_is_gone"]
        assert root.what_happened == "confirmed step 0, goes on with the next driver"


class Driver:
    """As much of a driver as a record needs."""

    store = SimpleNamespace(root="/mnt/run")

    def __init__(self, problem=None):
        self.records = []
        self._problem = problem

    async def record(self, type_, body):
        if self._problem is not None:
            raise self._problem
        self.records.append((type_, body))


class TestTheRecordOfAStop:
    def recorded(self, problem):
        driver = Driver()
        asyncio.run(_record_stop(driver, problem))
        return driver.records

    def test_it_holds_the_reason_without_the_root_that_it_is_in(self):
        assert self.recorded(RunFailed("/mnt/run: no way on")) == [("stopped", {"reason": "no way on"})]

    def test_it_is_bounded_and_holds_no_secret_and_no_signed_link(self):
        [(_, body)] = self.recorded(RunFailed("Bearer abcdefghijklmnopqrstuv https://b/x?X-Sig=hidden " + "y" * 9000))
        assert len(body["reason"]) <= 512
        assert "abcdefgh" not in body["reason"]
        assert "hidden" not in body["reason"]

    def test_a_host_that_stops_the_run_or_cancels_it_is_no_reason(self):
        assert self.recorded(RunInterrupted("stopped by its host")) == []
        assert self.recorded(asyncio.CancelledError()) == []

    def test_a_root_that_takes_no_record_hides_no_failure(self):
        asyncio.run(_record_stop(Driver(StoreError("full")), RunFailed("x")))
