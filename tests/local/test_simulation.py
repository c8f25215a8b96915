"""Simulated durations: how they are asked for and drawn, and that everything else of the service stays as it is."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load as load_tensors

from cortex_training.local.control_client import ServiceControl
from cortex_training.local.simulation import Duration, Pace, read_simulation
from tests.conftest import RunningService
from tests.local.api import Caller, RunningJob, masked_frame, result_of, sampling, token_batch, training


@pytest.mark.parametrize(
    ("given", "durations", "seed"),
    [
        ("0.2", {"default": Duration(0.2)}, 0),
        ("median=1,sigma=0.3;seed=4", {"default": Duration(1, 0.3)}, 4),
        (
            "default:0.05; step:median=0.2,sigma=0.5,factor=4,after=100",
            {"default": Duration(0.05), "step": Duration(0.2, 0.5, 4, 100)},
            0,
        ),
    ],
)
def test_an_expression(given: str, durations: dict[str, Duration], seed: int) -> None:
    simulation = read_simulation(given)
    assert (simulation.durations, simulation.seed) == (durations, seed)


def test_a_file_says_the_same(tmp_path: Path) -> None:
    toml, json_file = tmp_path / "pace.toml", tmp_path / "pace.json"
    toml.write_text("seed = 7\n[durations]\nsave = 2\n[durations.step]\nmedian = 0.2\nsigma = 0.5\n")
    json_file.write_text('{"seed": 7, "durations": {"save": 2, "step": {"median": 0.2, "sigma": 0.5}}}')
    expected = read_simulation("seed=7;save:2;step:median=0.2,sigma=0.5")
    assert read_simulation(str(toml)).durations == read_simulation(str(json_file)).durations == expected.durations
    assert read_simulation(str(toml)).seed == 7


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "durations: must hold default or operations"),
        ("fast", "median: must be a number, got 'fast'"),
        ("step:sigma=1", "durations.step.median: is missing"),
        ("step:median=1,mode=2", "durations.step.mode: is not known"),
        ("steps:1", "durations.steps: must be default or one of forward-backward"),
        ("-1", "durations.default.median: must be a number from 0 to 86400, got -1"),
        ("nan", "durations.default.median: must be a number from 0"),
        ("median=1,sigma=6", "durations.default.sigma: must be a number from 0 to 5"),
        ("median=1,factor=2,after=1.5", "durations.default.after: must be a whole number"),
        ("1;seed=1.5", "seed: must be a whole number, got 1.5"),
    ],
)
def test_what_cannot_be_is_refused_by_field(given: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_simulation(given)


def test_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    path.write_text('{"durations": {"step": {"median": "1"}}}')
    with pytest.raises(ValueError, match=r"pace\.json: durations\.step\.median: must be a number"):
        read_simulation(str(path))
    path.write_text("[")
    with pytest.raises(ValueError, match=r"pace\.json: not JSON"):
        read_simulation(str(path))


def drawn(expression: str, operation: str = "step", *, place: str = "0:training:0", count: int = 2000) -> list[float]:
    pace = Pace(read_simulation(expression), place)
    return [pace.next(operation) for _ in range(count)]


def test_durations_are_lognormal_and_repeat() -> None:
    seconds = drawn("median=0.2,sigma=0.4;seed=3")
    assert seconds == drawn("median=0.2,sigma=0.4;seed=3")
    assert seconds != drawn("median=0.2,sigma=0.4;seed=4")
    assert seconds != drawn("median=0.2,sigma=0.4;seed=3", place="1:training:0")
    assert statistics.median(seconds) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(map(math.log, seconds)) == pytest.approx(0.4, rel=0.1)


def test_a_factor_comes_after_its_number_of_operations() -> None:
    assert drawn("step:median=0.5,factor=4,after=2;default:0.1", count=4) == [0.5, 0.5, 2.0, 2.0]
    assert drawn("step:median=0.5,factor=4,after=2;default:0.1", "save", count=3) == [0.1] * 3


@pytest.fixture
def job(weathered: Caller) -> RunningJob:
    return weathered.running(training(), sampling())


def test_no_model_is_loaded(job: RunningJob, weathered_service: RunningService) -> None:
    job.forward_backward(masked_frame(token_batch()))
    job.step()
    assert job.describe()["reason"] == "simulated: operations take their time, and there is no model"
    assert "libtorch" not in Path(f"/proc/{weathered_service.pid}/maps").read_text()


def test_results_have_the_shape_of_real_ones(job: RunningJob, caller: Caller) -> None:
    real = caller.running(training(), sampling())
    for call in (
        lambda one: one.forward_backward(masked_frame(token_batch())),
        lambda one: one.step(learning_rate=1e-4),
        lambda one: one.done(
            one.post_frame(masked_frame(token_batch(), processing={"post": ["compute_logprobs"]}), path="/forward")
        ),
        lambda one: one.generate(["ab", [5, 6]], sampling_params={"max_tokens": 3, "seed": 1, "ignore_eos": True}),
        lambda one: one.sync(),
        lambda one: one.done(one.call("POST", "/save", json={"checkpoint_type": "resumable"})),
        lambda one: one.load(one.save("weights-only")),
    ):
        assert shape_of(call(job)) == shape_of(call(real))
    for one in (job, real):
        one.call("POST", ":cancel")


def shape_of(value: Any) -> Any:
    """Names and types; of tensors the dtype and the shape."""
    if isinstance(value, dict):
        return {name: shape_of(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape_of(one) for one in value]
    if hasattr(value, "shape"):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    return type(value).__name__


def test_a_frame_without_tokens_fails_as_it_would(job: RunningJob) -> None:
    frame = masked_frame(token_batch(), kwargs={"input_ids": None})
    assert "input_ids" in job.poll(job.post_frame(frame))["error"]


def test_checkpoints_carry_the_state(job: RunningJob, weathered: Caller, control: ServiceControl) -> None:
    for seed in (1, 2):
        job.forward_backward(masked_frame(token_batch(seed=seed)))
        job.step(learning_rate=2e-3)
    saved, plain = job.save(), job.save("weights-only")
    files = job.exported(plain)
    assert load_tensors(files["model.safetensors"])["state"].shape == (32,)
    assert job.exported(saved).keys() == {*files, "training_state.json"}
    source = {"checkpoint_id": saved, "source_job_id": job.job_id}
    heir = weathered.running(training(source_checkpoint_info=source))
    same = [one.forward_backward(masked_frame(token_batch(seed=3)))["avg_loss"] for one in (job, heir)]
    assert same[0] == same[1]
    after = [one.step() for one in (job, heir)]
    assert after[0] == after[1]
    assert (after[0]["global_steps"], after[0]["last_lr"]) == (3, 2e-3)
    hashes = [
        [entry["weights_sha256"] for entry in control.executions(one.job_id) if entry["op"] == "step"]
        for one in (job, heir)
    ]
    assert hashes[0][-1] == hashes[1][-1]


def test_weights_tell_in_which_order_batches_came(weathered: Caller, control: ServiceControl) -> None:
    ends = []
    for seeds in ((1, 2), (2, 1), (1, 2)):
        job = weathered.running(training(seed=5))
        for seed in seeds:
            job.forward_backward(masked_frame(token_batch(seed=seed)))
            job.step()
        ends.append(control.executions(job.job_id)[-1]["weights_sha256"])
    assert ends[0] == ends[2] != ends[1]


def test_generated_text_follows_from_the_weights_and_the_seed(job: RunningJob) -> None:
    asked = {"sampling_params": {"max_tokens": 8, "seed": 3}}
    first = job.generate(["a"], **asked)
    assert job.generate(["a"], **asked) == first
    job.forward_backward(masked_frame(token_batch()))
    job.step()
    job.sync()
    assert job.generate(["a"], **asked) != first
    refused = job.poll(job.call("POST", "/generate", json={"prompts": [[7] * 128]}))
    assert "leave no room in the window of 128" in refused["error"]


def test_a_stream_gives_one_event_a_prompt(job: RunningJob) -> None:
    reply = job.call("POST", "/generate-stream", json={"prompts": ["a", [7] * 128, "c"]})
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != "done":
        events += job.call("GET", f"/requests/{reply.json()['request_id']}").json()["events"]
    assert [(one["type"], one.get("index")) for one in events] == [
        ("result", 0), ("error", 1), ("result", 2), ("done", None),
    ]  # fmt: skip
    assert events[-1] == {"type": "done", "completed": 2, "failed": 1}


def test_a_generate_that_is_cancelled_stops(weathered: Caller, control: ServiceControl) -> None:
    job = weathered.running(training(), sampling())
    control.add("slow-operation", on="generate", seconds=0.3)
    reply = job.call("POST", "/generate", json={"prompts": ["a"]})
    job.operation("cancel-request", {"request_id": reply.json()["request_id"]})
    page = job.poll(reply)
    assert (page["status"], result_of(page)) == ("cancelled", None)
