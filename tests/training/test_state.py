"""Where a run stands follows from its records, at every cut of them."""

import itertools

from cortex_training.training.driver import _may_still_be_sent
from cortex_training.training.journal import Record
from cortex_training.training.state import replay


class Story:
    """Builds records the way a driver writes them."""

    def __init__(self):
        self.records = []

    def add(self, type_, **body):
        self.records.append(Record(len(self.records) + 1, 1, "t", type_, 0.0, body))
        return len(self.records)

    def segment(self, number=0, base=None, owned=True, job_id="job"):
        self.add("segment", segment=number, job_id=job_id, owned=owned, base=base, reason="test")

    def operation(self, op, step, status=None, *, segment=0, request=True, result=None, **fields):
        intent = self.add("intent", op=op, segment=segment, step=step, **fields)
        if request:
            self.add("sent", intent=intent, request_id=f"r{intent}")
        if status:
            self.add("outcome", intent=intent, status=status, result=result or {})
        return intent

    @property
    def state(self):
        return replay(self.records)


BASE = {"checkpoint_id": "cp_1", "source_job_id": "old", "step": 40, "global_steps": 40}


def test_a_step_without_an_answer_is_unsettled_and_not_confirmed():
    story = Story()
    story.segment()
    story.operation("step", 1, "done", result={"global_steps": 1})
    story.operation("step", 2, request=False)
    segment = story.state.current
    assert segment.confirmed_step == 1
    assert segment.unsettled_step.step == 2
    assert segment.unsettled_step.request_id is None


def test_a_refused_step_is_not_unsettled():
    story = Story()
    story.segment()
    story.operation("step", 1, "refused", request=False)
    assert story.state.current.unsettled_step is None
    assert story.state.current.confirmed_step == 0


def test_a_rescued_segment_is_given_up_before_its_end_is_written():
    story = Story()
    story.segment()
    story.operation("step", 1, "done", result={"global_steps": 1})
    assert story.state.current.given_up is None
    story.operation("step", 2, request=False)
    story.add("rescued", base={**BASE, "step": 1, "global_steps": 1})
    assert story.state.current.given_up == "step 2 was sent and may still land on job job"
    story.add("ended", reason="lost")
    assert story.state.current.given_up == "lost"


def test_a_segment_whose_step_failed_is_given_up():
    story = Story()
    story.segment()
    story.operation("step", 1, "failed")
    assert story.state.current.given_up == "step 1 failed on job job"


def test_only_the_last_intent_may_still_be_sent():
    story = Story()
    story.segment()
    story.operation("forward_backward", 1, request=False)
    assert _may_still_be_sent(story.state)
    story.operation("forward_backward", 1, "done", result={"loss": 1.0})
    assert not _may_still_be_sent(story.state)


def test_a_segment_from_a_base_begins_at_the_bases_step():
    story = Story()
    story.segment(base=BASE)
    assert story.state.current.confirmed_step == 40


def test_counts_are_certain_when_predicted_or_when_two_agree():
    story = Story()
    story.segment(base=BASE)
    story.operation("step", 41, "done", result={"global_steps": 1})
    assert story.state.current.offset == -40
    assert not story.state.current.offset_is_certain
    story.operation("step", 42, "done", result={"global_steps": 2})
    assert story.state.current.offset_is_certain
    last = Story()
    last.segment(base=BASE)
    last.operation("step", 41, "done", result={"global_steps": 1})
    last.operation("save", 41, "done", result={"checkpoint_id": "cp", "global_steps": 1, "save": "exec/a/cp"})
    assert last.state.current.offset_is_certain
    restored = Story()
    restored.segment(base=BASE)
    restored.operation("step", 41, "done", result={"global_steps": 41})
    assert restored.state.current.offset_is_certain


def test_weights_are_finite_only_after_a_loss_was_measured_on_them():
    story = Story()
    story.segment()
    story.operation("step", 1, "done", result={"global_steps": 1})
    story.operation("save", 1, "done", result={"checkpoint_id": "cp", "global_steps": 1, "save": "exec/a/cp"})
    assert not story.state.current.weights_are_finite(1)
    story.operation("forward_backward", 2, "done", result={"loss": "nan"}, micro_batch=0)
    assert not story.state.current.weights_are_finite(1)
    story.operation("forward_backward", 2, "done", result={"loss": 1.5}, micro_batch=0)
    assert story.state.current.weights_are_finite(1)


def test_losses_of_a_replayed_step_are_those_of_the_last_segment():
    story = Story()
    story.segment()
    story.operation("forward_backward", 1, "done", result={"loss": 3.0})
    story.operation("forward_backward", 2, "done", result={"loss": 2.0})
    story.segment(number=1, job_id="second")
    story.operation("forward_backward", 1, "done", segment=1, result={"loss": 3.5})
    assert story.state.losses == {1: 3.5, 2: 2.0}
    assert story.state.job_ids == ["job", "second"]


def test_jobs_of_somebody_else_are_never_ours_to_cancel():
    story = Story()
    story.segment(owned=False)
    assert story.state.job_ids == []


def test_every_prefix_of_a_history_can_be_replayed():
    story = Story()
    story.add("takeover", info={})
    story.segment()
    for step in (1, 2):
        for micro_batch in (0, 1):
            story.operation("forward_backward", step, "done", micro_batch=micro_batch, result={"loss": 1.0})
        story.operation("step", step, "done", result={"global_steps": step})
    story.add("ended", reason="lost")
    story.segment(number=1, base={**BASE, "step": 1, "global_steps": 1})
    story.add("finished", steps=2)
    story.add("released")
    confirmed = [replay(story.records[:n]).current for n in range(len(story.records) + 1)]
    steps = [segment.confirmed_step if segment else 0 for segment in confirmed]
    assert steps[-4:] == [2, 1, 1, 1]
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(steps))


def test_unknown_record_types_change_nothing():
    story = Story()
    story.segment()
    before = story.state
    story.add("remark", text="a newer release says more")
    assert story.state == before


def test_how_a_job_counts_is_known_from_its_owner_from_a_save_before_the_first_step_or_from_that_step():
    ours, theirs, restored = Story(), Story(), Story()
    ours.segment()
    theirs.segment(owned=False)
    restored.segment(owned=False, base=BASE)
    assert (ours.state.current.certain_offset, theirs.state.current.certain_offset) == (0, None)
    for story, step, count in ((theirs, 0, 7), (restored, 40, 2)):
        story.operation("save", step, result={"global_steps": count, "settles": True})
        assert story.state.current.certain_offset is None
        story.operation("save", step, "done", result={"global_steps": count, "settles": True})
        assert story.state.current.certain_offset == count - step
        assert story.state.current.saves() == []
    theirs.operation("step", 1, "done", result={"global_steps": 8})
    assert theirs.state.current.offset == theirs.state.current.certain_offset == 7
