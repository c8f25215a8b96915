from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from demo.heldout import Comparison
from demo.report import Facts, Sample, StepLoss, draw_losses, print_summary, shortfall

HELD_OUT = Comparison(rows=106, before=3.8637, after=2.91, difference=-0.9537, standard_error=0.0612)


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return Facts(
        engine="Airflow",
        model="SmolLM2-135M-Instruct",
        rows=4575,
        losses=[StepLoss(step, 3.8 - 0.03 * step) for step in range(1, 41)],
        held_out=HELD_OUT,
        samples=[
            Sample("def f()\nWhat does m.f do?\n", "Do it well.", "[red]I am[/red] " + "sure " * 90, "Do it."),
            Sample("class A()\nWhat is m.A?\n", "A thing.", "", "A thing of beauty."),
        ],
        entry="00000000000000000001-00000000000000000040",
        gpu_seconds=184.26,
        worker_slot_s=21.7,
        seconds=377.4,
        plot=tmp_path / "plots" / "loss.png",
        look_at=[("Airflow UI", "http://127.0.0.1:28080")],
    )


def printed(facts: Facts, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_summary(facts, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_says_every_fact(facts: Facts) -> None:
    text = printed(facts)
    for fact in (
        "fine-tuned by Airflow in 6 min 17 s",
        "3.770   2.600   -31.0%",  # training, first and last step
        "3.864   2.910   -24.7%",
        "-0.954 ± 0.061, 16 standard errors",
        "What does m.f do?",
        "Do it well.",
        "A thing of beauty.",
        "(nothing)",
        "00000000000000000001-00000000000000000040",
        "184.3, counted by the service",
        "21.7 s held by Airflow",
        "loss.png",
        "http://127.0.0.1:28080",
        "4,575 rows",
    ):
        assert fact in text, f"{fact!r} is not in\n{text}"


def test_a_model_s_words_are_not_taken_for_markup_and_are_kept_short(facts: Facts) -> None:
    text = printed(facts)
    assert "[red]I am[/red]" in text
    assert text.count("sure") < 60
    assert "…" in text


def test_it_fits_a_narrow_terminal(facts: Facts) -> None:
    assert max(len(line) for line in printed(facts, 80).splitlines()) == 80


def test_an_engine_without_worker_slots_does_not_mention_them(facts: Facts) -> None:
    assert "worker slots" not in printed(replace(facts, worker_slot_s=None))


@pytest.mark.parametrize(
    ("held_out", "words"),
    [
        (HELD_OUT, None),
        (replace(HELD_OUT, difference=-0.38), "fell by 9.8%"),
        (replace(HELD_OUT, standard_error=0.32), "fell by 2.98 standard errors"),
        (replace(HELD_OUT, difference=0.9), "rose by 23.3%"),
    ],
)
def test_too_small_a_fall_is_called_so(facts: Facts, held_out: Comparison, words: str | None) -> None:
    problem = shortfall(held_out)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert words in problem
        assert problem.split(";")[0] in " ".join(printed(replace(facts, held_out=held_out), 200).split())


def test_the_plot_is_drawn_and_follows_the_losses(facts: Facts) -> None:
    from matplotlib.image import imread

    path = draw_losses(facts)
    assert path == facts.plot
    picture = imread(path)
    assert picture.shape[:2] == (648, 1152)
    other = imread(draw_losses(replace(facts, losses=[StepLoss(step, 3.0) for step in range(1, 41)])))
    assert (picture != other).any()


def test_a_run_of_one_step_can_be_drawn(facts: Facts) -> None:
    assert draw_losses(replace(facts, losses=[StepLoss(1, 3.0)])).stat().st_size > 5000
