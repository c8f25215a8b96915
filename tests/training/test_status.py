"""What a root alone tells of its run: where it stands, and whose its jobs are."""

import pytest

from cortex_training.training import status
from cortex_training.training.journal import JournalWriter
from cortex_training.training.root import claim_identity, open_root
from cortex_training.training.sweep import owned_jobs


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
