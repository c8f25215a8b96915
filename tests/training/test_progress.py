"""What a person sees of a run: lines in a log, a bar on a terminal."""

import io
import sys
from dataclasses import replace

import pytest

from cortex_training.cli.runs import _progress
from cortex_training.training import TrainingPlan
from cortex_training.training.loop import _tell_of_accumulation
from cortex_training.training.progress import Pace, Progress

PLAN = TrainingPlan(root="r", dataset="d", steps=4, micro_batch_size=1)
MOMENTS = [
    Progress("job", 0, 4, message="status [placing]"),
    Progress(
        "train", 1, 4, loss=2.5, learning_rate=1e-3, step_s=2.0, remote_s=1.5, waiting_s=0.25, tokens_per_s=1000.0
    ),
    Progress("log", 1, 4, message="[rank 0] markup [/] is only text"),
    Progress("train", 2, 4, loss=2.25, step_s=2.0, remote_s=1.0, waiting_s=0.0, remaining_s=65.4),
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_every_moment_is_shown(monkeypatch, stream):
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with _progress(PLAN) as tell:
        for moment in MOMENTS:
            tell(moment)
    text = shown.getvalue()
    assert "[rank 0] markup [/] is only text" in text
    assert "loss 2.2500" in text
    assert ("0:01:05 left" if stream is Terminal else "65 s left") in text


@pytest.mark.parametrize(("batches", "told"), [(1, []), (4, [("plan", "the gradients of 4 forward-backwards add up")])])
def test_a_plan_with_accumulation_says_so_once(batches, told):
    said = []

    class Driver:
        plan = replace(PLAN, micro_batches_per_step=batches)

        def tell(self, stage, message):
            said.append((stage, message[:43]))

    _tell_of_accumulation(Driver())
    assert said == told


def test_a_line_says_where_the_time_went():
    assert MOMENTS[1].line() == "train 1/4 · loss 2.5000 · lr 0.001 · 1,000 tokens/s · 75 % remote · waited 0.2 s"


def test_what_is_left_goes_by_the_last_steps_and_forgets_what_a_replay_undid(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("cortex_training.training.progress.time.monotonic", lambda: now[0])
    pace = Pace()
    assert pace.remaining_s(1, 10) is None
    now[0] += 3
    assert pace.remaining_s(2, 10) == 24
    now[0] += 1
    assert pace.remaining_s(3, 10) == 14
    assert pace.remaining_s(2, 10) is None
    now[0] += 5
    assert pace.remaining_s(3, 10) == 35
