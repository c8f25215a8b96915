"""Prompts are checked before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cortex_training import wire
from cortex_training.errors import ConfigurationError, NotFoundError, OutcomeUnknown
from cortex_training.protocol import generation

JOB = {
    "sub_jobs": [
        {"job_type": "log_probability", "inference_config": {"max_seq_len": 4}},
        {"job_type": "training", "training_config": {"max_seq_len": 3}},
        {"job_type": "JOB_TYPE_SAMPLING", "inference_config": {"max_seq_len": 16.0}},
    ]
}


def sent_object(request: Any) -> dict[str, Any]:
    value: dict[str, Any] = wire.loads(request.body, framework="numpy")
    return value


def test_the_frame_holds_what_was_asked_and_asks_for_a_chunked_result(world: Any, say: Any) -> None:
    request_id = world.run(
        generation.generate(world.context, "j", ["Hello"], {"max_tokens": 4}, "key", False),
        [say.accepted],
    )
    assert request_id == "r"
    assert world.sent == ["POST /j/generate"]
    assert sent_object(world.requests[0]) == {
        "prompts": ["Hello"],
        "sampling_params": {"max_tokens": 4},
        "routing_key": "key",
        "strict": False,
    }
    options = wire.read_metadata(world.requests[0].body)["response_options"]
    assert options == {"format": "dssst1", "delivery": "chunked"}


def test_only_prompts_are_sent_when_nothing_else_is_asked(world: Any, say: Any) -> None:
    world.run(generation.generate(world.context, "j", ["a"]), [say.accepted])
    assert sent_object(world.requests[0]) == {"prompts": ["a"]}


def test_per_prompt_parameters_keep_their_order(world: Any, say: Any) -> None:
    world.run(
        generation.generate(world.context, "j", ["a", "b"], [{"max_tokens": 1}, None], ["x", None]),
        [say.accepted],
    )
    sent = sent_object(world.requests[0])
    assert sent["sampling_params"] == [{"max_tokens": 1}, None]
    assert sent["routing_key"] == ["x", None]


@pytest.mark.parametrize(
    ("prompts", "hint"),
    [
        ("hello", r"\[prompt\]"),
        ([], "at least one"),
        ([1, 2, 3], r"\[\[1, 2, 3\]\]"),
        (np.array([1, 2, 3]), r"\[\[1, 2, 3\]\]"),
        (None, "list of strings"),
        ({"a": 1}, "list of strings"),
        ([["a"]], r"prompts\[0\]\[0\]"),
        ([[1, True]], r"prompts\[0\]\[1\]"),
        ([[1.0]], r"prompts\[0\]\[0\]"),
        ([[-1]], r"prompts\[0\]\[0\]"),
        ([[]], r"prompts\[0\]"),
        (["a", None], r"prompts\[1\]"),
        (["a", b"b"], r"prompts\[1\]"),
    ],
)
def test_prompts_of_another_shape_are_refused(world: Any, prompts: Any, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        world.run(generation.generate(world.context, "j", prompts))
    assert world.requests == []


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_params": "x"},
        {"sampling_params": [{}]},
        {"sampling_params": [{}, 1]},
        {"routing_key": ["a"]},
        {"routing_key": 5},
        {"strict": "no"},
    ],
)
def test_parameters_that_do_not_fit_the_prompts_are_refused(world: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        world.run(generation.generate(world.context, "j", ["a", "b"], **options))


@pytest.mark.parametrize("prompt", [list(range(15)), tuple(range(15)), np.arange(15), np.arange(15, dtype=np.int32)])
def test_a_token_prompt_that_just_fits_the_sampling_window_is_sent(world: Any, say: Any, prompt: Any) -> None:
    world.run(generation.generate(world.context, "j", [prompt]), [say.reply(JOB), say.accepted])
    assert sent_object(world.requests[-1])["prompts"] == [list(range(15))]


@pytest.mark.parametrize("call", [generation.generate, generation.generate_stream])
@pytest.mark.parametrize("prompt", [list(range(16)), tuple(range(16)), np.arange(16)])
def test_a_token_prompt_that_fills_the_sampling_window_is_refused(world: Any, say: Any, call: Any, prompt: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"prompts\[1\]: 16 tokens .* window of 16"):
        world.run(call(world.context, "j", ["text", prompt]), [say.reply(JOB)])
    assert world.sent == ["GET /j"]


def test_the_window_is_asked_once_per_job(world: Any, say: Any) -> None:
    world.run(generation.generate(world.context, "j", [[1]]), [say.reply(JOB), say.accepted])
    world.run(generation.generate(world.context, "j", [[1]]), [say.accepted])
    world.run(generation.generate(world.context, "k", [[1]]), [say.reply({"sub_jobs": []}), say.accepted])
    world.run(generation.generate(world.context, "k", [[1]]), [say.accepted])
    assert [line for line in world.sent if line.startswith("GET")] == ["GET /j", "GET /k"]


def test_a_window_that_could_not_be_asked_is_asked_again_next_time(world: Any, say: Any) -> None:
    world.run(generation.generate(world.context, "j", [list(range(16))]), [say.reply({}, 403), say.accepted])
    with pytest.raises(ConfigurationError):
        world.run(generation.generate(world.context, "j", [list(range(16))]), [say.reply(JOB)])


def test_a_lookup_in_bad_weather_does_not_hold_up_the_call(world: Any, say: Any) -> None:
    def respond(sent: Any) -> Any:
        return say.reply({}, 503) if sent.method == "GET" else say.accepted

    world.run(generation.generate(world.context, "j", [[1]]), respond)
    assert world.now - 1000 <= 10.1


def test_a_job_that_does_not_exist_is_an_error_at_once(world: Any, say: Any) -> None:
    with pytest.raises(NotFoundError):
        world.run(generation.generate(world.context, "j", [[1]]), [say.reply({}, 404)])


@pytest.mark.parametrize(
    ("sub_jobs", "window"),
    [
        (None, None),
        ([], None),
        (["x", {"job_type": "sampling"}], None),
        ([{"job_type": "sampling", "inference_config": {"max_seq_len": "2048"}}], 2048),
        ([{"job_type": "sampling", "inference_config": {"max_seq_len": True}}], None),
        ([{"job_type": "sampling", "inference_config": {"max_seq_len": float("nan")}}], None),
        ([{"job_type": "sampling", "inference_config": {"max_seq_len": n}} for n in (64, 32.0)], 32),
    ],
)
def test_the_window_is_read_from_whatever_the_service_sends(sub_jobs: Any, window: int | None) -> None:
    assert generation.sampling_window({"sub_jobs": sub_jobs}) == window


def test_token_prompts_can_be_packed_as_tensors(make_world: Any, say: Any) -> None:
    world = make_world(token_prompts="tensor")
    world.run(generation.generate(world.context, "j", ["a", [1, 2]]), [say.reply(JOB), say.accepted])
    text, tokens = sent_object(world.requests[-1])["prompts"]
    assert text == "a"
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [1, 2]


def test_a_generation_is_sent_at_most_once(world: Any, say: Any) -> None:
    with pytest.raises(OutcomeUnknown, match="generate on job j"):
        world.run(generation.generate(world.context, "j", ["a"]), [say.lost])


def test_a_generation_beyond_the_limit_goes_in_chunks(world: Any, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_REQUEST_BYTES", 100)
    world.run(generation.generate(world.context, "j", ["long " * 100]), [say.accepted])
    described = wire.read_byte_chunk_metadata(world.requests[0].body) or {}
    assert described["operation"] == "generate"
    assert described["chunk_group_id"]
    frame = wire.decode_byte_chunks([world.requests[0].body])
    assert wire.loads(frame)["prompts"] == ["long " * 100]


def test_a_stream_is_json_and_never_chunked(world: Any, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = world.run(
        generation.generate_stream(world.context, "j", ["a", [1]], {"max_tokens": 3}),
        [say.reply(JOB), say.reply({"request_id": "r", "count": 2})],
    )
    assert reply == {"request_id": "r", "count": 2}
    assert world.requests[-1].content_type == "application/octet-stream"
    assert json.loads(world.requests[-1].body) == {"prompts": ["a", [1]], "sampling_params": {"max_tokens": 3}}
    monkeypatch.setattr(generation, "MAX_REQUEST_BYTES", 50)
    with pytest.raises(ConfigurationError, match="never cut into chunks"):
        world.run(generation.generate_stream(world.context, "j", ["long " * 100]))
