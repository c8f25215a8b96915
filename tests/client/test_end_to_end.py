"""Every call of both clients, against the local service that really trains."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cortex_training import SubJobConfig, identity, wire
from cortex_training.errors import ApiError, ConflictError, JobFailed, NotFoundError, RequestFailed
from cortex_training.protocol.results import checkpoint_id

LORA = {"peft_type": "Lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj"]}


def frame(seed: int, weight: float = 1.0) -> bytes:
    """A batch of shape `[2, 32]` of the tiny model's tokens, each with this weight in the loss."""
    ids = np.random.default_rng(seed).integers(4, 500, (2, 32)).astype(np.int64)
    mask = np.full((2, 32), weight, dtype=np.float32)
    mask[:, -1] = 0
    positions = np.broadcast_to(np.arange(32, dtype=np.int64), (2, 32))
    batch = {
        "args": (),
        "kwargs": {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": positions,
            "use_cache": False,
        },
        "context": {"input_ids": ids, "loss_mask": mask},
        "processing": {"loss_fn": "causal_cross_entropy", "post": [], "config": {}},
    }
    return wire.dumps(batch, {"response_options": {"format": "dssst1", "delivery": "chunked"}})


def sub_jobs() -> list[SubJobConfig]:
    training = SubJobConfig.training_job(
        "tiny",
        {"name": "AdamW", "lr": 1e-2},
        max_seq_len=64,
        train_batch_size=2,
        n_gpus=1,
        extra_training={"peft_config": LORA},
        seed=7,
    )
    return [training, SubJobConfig.sampling_job("tiny", 64, 1, extra_sampling={"peft_config": LORA}, seed=7)]


@pytest.fixture
def client(clients: Any, local_service: Any) -> Any:
    return clients(local_service.base_url)


@pytest.fixture
def job(client: Any) -> Any:
    """A running job with a training and a sampling sub-job, cancelled at the end."""
    job_id = identity.new_job_id()
    assert client.create_job(sub_jobs(), job_id=job_id, experiment_name="e2e") == job_id
    client.wait_for_job(job_id, timeout_s=120)
    yield job_id
    client.cancel_job(job_id)


def test_a_job_from_creation_to_a_checkpoint_and_back(client: Any, job: str, local_service: Any) -> None:
    losses = []
    for step in range(1, 4):
        group = identity.group_id(job, 0, step, 0)
        request = client.forward_backward(job, frame(1), chunk_group_id=group)
        losses.append(client.poll_request(job, request)["avg_loss"])
        again = client.forward_backward(job, frame(1), chunk_group_id=group)
        assert client.poll_request(job, again)["avg_loss"] == losses[-1]
        assert client.poll_request(job, client.step(job))["global_steps"] == step
    assert losses[-1] < losses[0]

    saved = client.poll_request(job, client.save(job, checkpoint_type="resumable"))
    checkpoint = checkpoint_id(saved)
    assert checkpoint in {listed["checkpoint_id"] for listed in client.list_checkpoints(job)}
    client.poll_request(job, client.load(job, checkpoint, target_sub_job_id=f"{job}:training:0"))

    weights = checkpoint_id(client.poll_request(job, client.save(job, checkpoint_type="weights-only")))
    files = client.export_checkpoint(job, weights)["files"]
    assert {"model.safetensors", "config.json"} <= {file["filename"] for file in files}
    client.delete_checkpoint(job, weights)
    with pytest.raises(NotFoundError):
        client.delete_checkpoint(job, weights)

    executed = [entry["op"] for entry in local_service.execution_log(job)]
    assert executed.count("forward-backward") == 3, executed
    assert executed.count("step") == 3, executed


def test_sampling_sees_the_trained_weights_after_a_sync(client: Any, job: str) -> None:
    prompts: list[Any] = ["Write", [5, 6, 7]]
    greedy = {"max_tokens": 6, "temperature": 0}
    before = client.poll_request(job, client.generate(job, prompts, greedy))
    assert all(isinstance(sample["token_ids"], list) for sample in before["results"])
    client.poll_request(job, client.forward_backward(job, frame(2)))
    client.poll_request(job, client.step(job, 5e-1))
    source, target = f"{job}:training:0", f"{job}:sampling:0"
    client.poll_request(job, client.weight_sync(job, source, [target], weight_format="lora"))
    after = client.poll_request(job, client.generate(job, prompts, [greedy, greedy], routing_key="k", strict=False))
    assert [len(result["results"]) for result in (before, after)] == [2, 2]
    assert before["results"] != after["results"]


def test_a_request_can_be_looked_at_cancelled_and_fail(client: Any, job: str) -> None:
    request = client.step(job)
    client.poll_request(job, request)
    assert client.get_request_status(job, request)["status"]
    assert isinstance(client.cancel_request(job, request), dict)
    with pytest.raises(RequestFailed, match="weight") as caught:
        client.poll_request(job, client.forward_backward(job, frame(1, weight=0.0)))
    assert caught.value.state == "failed"


def test_jobs_are_listed_and_counted(client: Any, job: str) -> None:
    assert job in {listed["job_id"] for listed in client.list_jobs()}
    assert client.get_job(job)["sub_jobs"][0]["model_name"] == "tiny"
    assert client.get_capacity()["in_use_gpus"] >= 2
    assert client.get_experiment_run(job)["experiment_name"]


def test_logs_are_paged_and_streamed(client: Any, job: str) -> None:
    client.poll_request(job, client.forward_backward(job, frame(3)))
    page = client.tail_logs(job, sub_job_id=f"{job}:training:0", max_lines=1)
    assert page["entries"]
    entries = list(client.stream_logs(job, follow=False, sub_job_id=f"{job}:training:0"))
    assert len(entries) >= 1


def test_creating_the_same_job_twice_adopts_it(client: Any, job: str) -> None:
    assert client.create_job(sub_jobs(), job_id=job, experiment_name="e2e") == job
    with pytest.raises(ApiError):
        client.create_job_from_body({"sub_job_configs": [{"job_type": "sampling", "model_name": "no/such-model"}]})


def test_a_cancelled_job_says_so_to_whoever_waits(client: Any) -> None:
    job_id = client.create_job(sub_jobs()[1:])
    client.wait_for_job(job_id, timeout_s=120)
    request = client.generate(job_id, ["hello"])
    client.cancel_job(job_id)
    client.cancel_job(job_id)
    with pytest.raises(JobFailed, match="cancel"):
        client.wait_for_job(job_id, timeout_s=60)
    with pytest.raises(JobFailed):
        client.poll_request(job_id, request, timeout_s=60)
    with pytest.raises(ConflictError):
        client.generate(job_id, ["hello"])


async def test_many_waits_at_once_on_one_async_client(local_service: Any) -> None:
    from cortex_training import AsyncCortexTrainingClient

    async with AsyncCortexTrainingClient(local_service.base_url, "DB", "PUBLIC") as client:
        job_ids = [identity.new_job_id() for _ in range(3)]
        try:
            for job_id in job_ids:
                await client.create_job(sub_jobs()[:1], job_id=job_id)
                await client.wait_for_job(job_id, timeout_s=120)

            async def loss(job_id: str, seed: int) -> float:
                result = await client.poll_request(job_id, await client.forward_backward(job_id, frame(seed)))
                return float(result["avg_loss"])

            batches = [(job_id, seed) for job_id in job_ids for seed in range(5)]
            losses = await asyncio.gather(*(loss(*batch) for batch in batches))
        finally:
            for job_id in job_ids:
                await client.cancel_job(job_id)
    by_seed = {seed: {found for (_, s), found in zip(batches, losses, strict=True) if s == seed} for seed in range(5)}
    assert all(len(found) == 1 for found in by_seed.values()), "the same batch on the same weights has one loss"
    assert len(set(losses)) == 5
