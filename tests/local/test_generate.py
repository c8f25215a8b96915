"""Sampling: what is drawn, when it ends, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from cortex_training import wire
from cortex_training.local.models import model_folder
from tests.local.api import Caller, RunningJob, chunks_of, sampling, training
from tests.local.reference import tiny


@pytest.fixture
def job(caller: Caller) -> RunningJob:
    return caller.running(sampling(seed=7))


def likeliest(prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, one full forward pass a token."""
    model, ids, logprobs = tiny().eval(), list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            scores = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], dim=-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(prompt) :], logprobs


def test_greedy_tokens_are_the_models_likeliest(job: RunningJob) -> None:
    """Also in a batch of prompts of different lengths."""
    prompts = [[5], [9, 10, 11, 12, 13, 14], [100, 200]]
    results = job.generate(prompts, sampling_params={"max_tokens": 10, "temperature": 0, "ignore_eos": True})
    for prompt, result in zip(prompts, results, strict=True):
        ids, logprobs = likeliest(prompt, 10)
        assert result["token_ids"] == ids
        assert result["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert result["finish_reason"] == "length"


def test_text_and_its_tokens_are_the_same_prompt(job: RunningJob) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("tiny"))
    ids = tokenizer.encode("Return the length")
    text, tokens = job.generate(["Return the length", ids], sampling_params={"max_tokens": 6, "temperature": 0})
    assert text == tokens
    assert text["text"] == tokenizer.decode(text["token_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prompts_may_come_as_tensors(job: RunningJob, dtype: torch.dtype, chunked: bool) -> None:
    params = {"max_tokens": 6, "temperature": 0}
    expected = job.generate([[5, 6, 7], "text"], sampling_params=params)
    frame = wire.dumps({"prompts": [torch.tensor([5, 6, 7], dtype=dtype), "text"], "sampling_params": params})
    bodies = chunks_of(frame, max_bytes=8192 + 200) if chunked else [frame]
    for body in bodies:
        reply = job.post_frame(body, path="/generate")
    assert job.done(reply)["results"] == expected


def test_a_framed_result_carries_tensors(job: RunningJob) -> None:
    asked = {"prompts": [[5, 6, 7]], "sampling_params": {"max_tokens": 4, "temperature": 0}}
    plain = job.generate(**asked)[0]
    frame = wire.dumps(asked, metadata={"response_options": {"format": "dssst1", "delivery": "chunked"}})
    framed = job.done(job.post_frame(frame, path="/generate"))["results"][0]
    assert framed["token_ids"].tolist() == plain["token_ids"]
    assert framed["token_ids"].dtype == torch.int64
    assert framed["logprobs"].tolist() == plain["logprobs"]


def test_each_prompt_can_have_its_own_parameters(job: RunningJob) -> None:
    results = job.generate(
        ["a", "b", "c"],
        sampling_params=[{"max_tokens": 3, "ignore_eos": True}, None, {"max_tokens": 7, "ignore_eos": True}],
        routing_key=["one", None, "three"],
        strict=False,
    )
    assert len(results[0]["token_ids"]) == 3
    assert len(results[2]["token_ids"]) == 7


def test_seeds_repeat_and_differ(caller: Caller, job: RunningJob) -> None:
    asked: dict[str, Any] = {"prompts": ["x"], "sampling_params": {"max_tokens": 20, "seed": 5, "ignore_eos": True}}
    assert job.generate(**asked) == job.generate(**asked)
    unseeded: dict[str, Any] = {"prompts": ["x", "x"], "sampling_params": {"max_tokens": 20, "ignore_eos": True}}
    one, other = job.generate(**unseeded)
    assert one != other
    # A job with the same seed draws the same samples when it is asked the same things.
    twin = caller.running(sampling(seed=7))
    for _ in range(2):
        twin.generate(**asked)
    assert twin.generate(**unseeded) == [one, other]


def test_temperature_top_p_and_top_k_narrow_the_choice(job: RunningJob) -> None:
    greedy = job.generate([[5, 6, 7]], sampling_params={"max_tokens": 8, "temperature": 0, "ignore_eos": True})
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        params = {"max_tokens": 8, "ignore_eos": True, **narrow}
        assert job.generate([[5, 6, 7]], sampling_params=params) == greedy


def test_samples_end_where_they_are_told_to(job: RunningJob) -> None:
    ids, _ = likeliest([5, 6, 7], 12)
    tokenizer = AutoTokenizer.from_pretrained(model_folder("tiny"))
    params = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = job.generate([[5, 6, 7]], sampling_params=params)[0]
    at_token = job.generate([[5, 6, 7]], sampling_params={**params, "stop_token_ids": [ids[3]]})[0]
    first = ids.index(ids[3])
    assert at_token["token_ids"] == ids[: first + 1]
    assert at_token["text"] == tokenizer.decode(ids[:first])
    assert at_token["finish_reason"] == "stop"
    stop = whole["text"][2:4]
    at_text = job.generate([[5, 6, 7]], sampling_params={**params, "stop": [stop]})[0]
    assert at_text["text"] == whole["text"].partition(stop)[0]
    assert at_text["finish_reason"] == "stop"
    assert len(at_text["token_ids"]) <= len(whole["token_ids"])


def test_the_window_ends_a_sample(caller: Caller) -> None:
    job = caller.running(sampling(config={"max_seq_len": 20}))
    [result] = job.generate([[5] * 15], sampling_params={"max_tokens": 100, "ignore_eos": True})
    assert (len(result["token_ids"]), result["finish_reason"]) == (5, "length")
    page = job.poll(job.call("POST", "/generate", json={"prompts": ["x", [5] * 20]}))
    assert page["status"] == "failed"
    assert "prompts[1]: 20 tokens" in page["error"]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"prompts": [1, 2, 3]}, "[[1, 2, 3]]"),
        ({"prompts": []}, "prompts"),
        ({"prompts": "hello"}, "prompts"),
        ({"prompts": [""]}, "prompts.0"),
        ({"prompts": [[]]}, "prompts.0"),
        ({"prompts": [[1, "2"]]}, "prompts.0.1"),
        ({"prompts": [[1.5]]}, "prompts.0.0"),
        ({"prompts": [[True]]}, "prompts.0.0"),
        ({"prompts": [[-1]]}, "prompts.0.0"),
        ({"prompts": ["a"], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"prompts": ["a"], "routing_key": ["x", "y"]}, "routing_key"),
        ({"prompts": ["a"], "routing_key": 5}, "routing_key"),
        ({"prompts": ["a"], "strict": "yes"}, "strict"),
        ({"prompts": ["a"], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"prompts": ["a"], "sampling_params": {"max_tokens": True}}, "max_tokens"),
        ({"prompts": ["a"], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompts": ["a"], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"prompts": ["a"], "sampling_params": {"n": 2}}, "n"),
        ({"prompts": ["a"], "sampling_params": {"stop": [5]}}, "stop"),
        ({"prompts": ["a"], "sampling_params": {"best_of": 5}}, "best_of"),
        ({"prompts": ["a"], "sampling_params": "greedy"}, "sampling_params"),
        ({}, "prompts"),
    ],
)
def test_bad_requests_name_what_is_wrong(job: RunningJob, asked: dict[str, Any], names: str) -> None:
    for body in ({"json": asked}, {"data": wire.dumps(asked), "headers": {"content-type": "application/octet-stream"}}):
        reply = job.call("POST", "/generate", **body)
        assert reply.status_code == 400, reply.text
        assert names in reply.json()["message"]


def test_a_job_without_sampling_does_not_generate(caller: Caller) -> None:
    reply = caller.running(training()).call("POST", "/generate", json={"prompts": ["a"]})
    assert reply.status_code == 400
    assert "no sampling sub-job" in reply.json()["message"]
