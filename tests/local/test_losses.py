"""grpo, and batches that are measured without learning, against the formulas written out in plain PyTorch."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch

from cortex_training import wire
from tests.local.api import Caller, RunningJob, masked_frame, sampling, token_batch, training
from tests.local.reference import tiny

ROWS, LENGTH = 4, 24


def rollout(**changes: Any) -> dict[str, torch.Tensor]:
    """Completion masks, advantages and temperatures of a small group of samples."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.zeros(ROWS, LENGTH)
    for row, length in enumerate((5, 9, 12, 3)):
        mask[row, 6 : 6 + length] = 1
    advantages = torch.randn(ROWS, 1, generator=draw) * mask
    return {"loss_mask": mask, "advantages": advantages, **changes}


def shifted_log_probabilities(model: Any, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    logits = model(input_ids=ids).logits.float() / temperature
    following = torch.cat([ids[:, 1:], torch.zeros(len(ids), 1, dtype=torch.long)], dim=1)
    return torch.log_softmax(logits, dim=-1).gather(-1, following[..., None]).squeeze(-1)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_grpo_is_the_clipped_policy_gradient(caller: Caller, mode: str, off_policy: bool) -> None:
    ids, context = token_batch(ROWS, LENGTH), rollout()
    mask, advantages = context["loss_mask"], context["advantages"]
    model = tiny()
    new = shifted_log_probabilities(model, ids, 0.7)
    old = new.detach()
    if off_policy:
        old = old + 0.4 * torch.randn(old.shape, generator=torch.Generator().manual_seed(4))
        context["old_logprobs"] = old
    ratio = torch.exp(new - old)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
    expected = {
        "token-mean": losses.sum() / mask.sum(),
        "seq-mean-token-sum": losses.sum() / 16,
        "seq-mean-token-mean": (losses.sum(dim=1) / mask.sum(dim=1)).sum() / 16,
    }[mode]
    expected.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])

    config = {"eps_clip": 0.2, "loss_agg_mode": mode, "entropy_coeff": 0.0, "global_batch_size": 16}
    job = caller.running()
    result = job.forward_backward(
        masked_frame(
            ids,
            context=context,
            kwargs={"temperature": torch.full((ROWS, LENGTH), 0.7)},
            processing={"loss_fn": "grpo", "config": config, "post": ["compute_logprobs"]},
        )
    )
    assert result["avg_loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert result["post_process_outputs"] == {}
    assert job.step()["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_entropy_pulls_towards_itself(caller: Caller) -> None:
    ids, context = token_batch(ROWS, LENGTH), rollout(advantages=torch.zeros(ROWS, LENGTH))
    logs = torch.log_softmax(tiny()(input_ids=ids).logits.float(), dim=-1)
    entropy = -(logs.exp() * logs).sum(dim=-1)
    mask = context["loss_mask"]
    expected = -0.5 * (entropy * mask).sum() / mask.sum()
    frame = masked_frame(ids, context=context, processing={"loss_fn": "grpo", "config": {"entropy_coeff": 0.5}})
    assert caller.running().forward_backward(frame)["avg_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("context", "config", "names"),
    [
        ({"advantages": None}, {}, "advantages"),
        ({"advantages": torch.zeros(ROWS, 5)}, {}, "advantages"),
        ({"advantages": torch.full((ROWS, LENGTH), float("nan"))}, {}, "advantages"),
        ({}, {"loss_agg_mode": "median"}, "loss_agg_mode"),
        ({}, {"eps_clip": -1}, "eps_clip"),
        ({}, {"global_batch_size": 0}, "global_batch_size"),
        ({}, {"entropy_coeff": "much"}, "entropy_coeff"),
    ],
)
def test_bad_grpo_batches_name_what_is_wrong(
    caller: Caller, context: dict[str, Any], config: dict[str, Any], names: str
) -> None:
    job = caller.running()
    frame = masked_frame(
        token_batch(ROWS, LENGTH), context=rollout(**context), processing={"loss_fn": "grpo", "config": config}
    )
    page = job.poll(job.post_frame(frame))
    assert (page["status"], names in page["error"]) == ("failed", True), page


def forwarded(job: RunningJob, frame: bytes, how: str, **hints: str) -> dict[str, Any]:
    if how == "raw":
        return dict(job.done(job.post_frame(frame, path="/forward")))
    payload = {"payload_b64": base64.b64encode(frame).decode(), "content_type": "application/octet-stream"}
    return dict(job.done(job.operation("forward", payload, **hints)))


@pytest.mark.parametrize("how", ["raw", "operation"])
def test_forward_measures_and_learns_nothing(caller: Caller, how: str) -> None:
    ids = token_batch()
    frame = masked_frame(ids, processing={"post": ["compute_logprobs"]})
    job = caller.running(training(config={"peft_config": {"target_modules": ["q_proj"], "lora_dropout": 0.5}}))
    measured = forwarded(job, frame, how)
    with torch.no_grad():
        expected = shifted_log_probabilities(tiny().eval(), ids)[:, :-1]
    outputs = measured["post_process_outputs"]["logprobs_shifted"]
    torch.testing.assert_close(outputs[:, :-1], expected, rtol=1e-4, atol=1e-5)
    assert not outputs[:, -1].any()
    assert measured["avg_loss"] == pytest.approx(-expected.mean().item(), rel=1e-5)
    assert job.step()["metrics"]["grad_norm"] == 0.0


def test_a_log_probability_sub_job_measures(caller: Caller) -> None:
    scorer = {**sampling(), "job_type": "log_probability"}
    job = caller.running(scorer, training())
    assert job.describe()["sub_jobs"][0]["sub_job_id"] == f"{job.job_id}:log_prob:0"
    frame = masked_frame(token_batch())
    expected = forwarded(job, frame, "operation", sub_job_type="training")["avg_loss"]
    assert forwarded(job, frame, "operation", sub_job_type="log_probability")["avg_loss"] == expected
    assert forwarded(job, frame, "operation", sub_job_id=f"{job.job_id}:log_prob:0")["avg_loss"] == expected
    assert job.call("POST", "/generate", json={"prompts": ["a"]}).status_code == 400


def test_a_service_may_refuse_log_probability_sub_jobs(contrary: Caller) -> None:
    for spelling in ("log_probability", "LOG_PROB", "JOB_TYPE_LOG_PROBABILITY"):
        refused = contrary.create({**sampling(), "job_type": spelling})
        assert refused.status_code == 400
        assert "log_probability sub-jobs are not currently supported" in refused.json()["message"]


def test_an_operation_carries_a_frame_of_many_mebibytes(caller: Caller) -> None:
    """The reference's limit for a frame in the envelope is 60 MiB, which base64 makes 80."""
    job = caller.running()
    large = wire.dumps({**wire.loads(masked_frame(token_batch()), framework="torch"), "filling": torch.zeros(60 << 18)})
    measured = forwarded(job, large, "operation")
    assert measured["avg_loss"] == forwarded(job, masked_frame(token_batch()), "raw")["avg_loss"]


def test_forward_refuses_what_is_no_frame(caller: Caller) -> None:
    job = caller.running(training(), sampling())
    for payload in ({}, {"payload_b64": "***"}, {"payload_b64": 5}, {"payload_b64": base64.b64encode(b"x").decode()}):
        assert job.operation("forward", payload).status_code == 400
    frame = base64.b64encode(wire.dumps({"a": 1})).decode()
    assert job.operation("forward", {"payload_b64": frame}, sub_job_type="sampling").status_code == 400
    assert job.poll(job.operation("forward", {"payload_b64": frame}))["status"] == "failed"
