"""Losses, gradients and optimizer steps against plain PyTorch on the same batches."""

from __future__ import annotations

import pytest
import torch

from cortex_training import wire
from tests.local.api import LORA, Caller, RunningJob, masked_frame, sampling, token_batch, training
from tests.local.reference import masked_loss, tiny, weights_of

LEARNING_RATE = 1e-3


def test_loss_and_weights_follow_plain_pytorch(caller: Caller) -> None:
    job = caller.running(training(config={"gradient_clipping": 0.3}))
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    mask = torch.rand(4, 32, generator=torch.Generator().manual_seed(1)).round()
    for seed in range(3):
        ids = token_batch(seed=seed)
        expected = masked_loss(model, ids, mask)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        result = job.forward_backward(masked_frame(ids, mask))
        assert result["avg_loss"] == pytest.approx(expected.item(), rel=1e-5)
        stepped = job.step()
        assert stepped["global_steps"] == seed + 1
        assert stepped["last_lr"] == LEARNING_RATE
        assert stepped["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    trained = weights_of(job.exported(job.save("weights-only")))
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_gradients_of_several_calls_add_undivided(caller: Caller) -> None:
    job = caller.running()
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for seed in range(3):
        ids = token_batch(rows=2 + seed, seed=seed)
        masked_loss(model, ids, torch.ones(ids.shape)).backward()
        job.forward_backward(masked_frame(ids))
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    optimizer.step()
    assert job.step()["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    trained = weights_of(job.exported(job.save("weights-only")))
    torch.testing.assert_close(
        trained["model.norm.weight"], model.state_dict()["model.norm.weight"], rtol=1e-4, atol=1e-6
    )


def test_step_takes_a_learning_rate_of_its_own(caller: Caller) -> None:
    job = caller.running(training(config={"optimizer": {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.5}}))
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2, weight_decay=0.5)
    ids = token_batch()
    masked_loss(model, ids, torch.ones(ids.shape)).backward()
    optimizer.step()
    job.forward_backward(masked_frame(ids))
    assert job.step(learning_rate=5e-2)["last_lr"] == 5e-2
    trained = weights_of(job.exported(job.save("weights-only")))
    torch.testing.assert_close(
        trained["model.norm.weight"], model.state_dict()["model.norm.weight"], rtol=1e-4, atol=1e-6
    )


def test_labels_mean_what_they_mean_to_a_hugging_face_model(caller: Caller) -> None:
    job = caller.running()
    ids = token_batch()
    labels = ids.clone()
    labels[:, :10] = -100
    attention = torch.ones_like(ids)
    attention[0, 20:] = 0
    labels[0, 20:] = -100
    expected = tiny()(input_ids=ids, attention_mask=attention, labels=labels).loss
    frame = wire.dumps({"args": (), "kwargs": {"input_ids": ids, "attention_mask": attention, "labels": labels}})
    assert job.forward_backward(frame)["avg_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_packed_documents_do_not_see_each_other(caller: Caller) -> None:
    """One packed row gives the loss, and the gradient, of its documents in rows of their own."""
    documents = [token_batch(1, length, seed)[0] for seed, length in enumerate((7, 12, 13))]
    packed = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    mask = torch.cat([torch.cat([torch.ones(len(document) - 1), torch.zeros(1)]) for document in documents])[None]

    model = tiny()
    predictions = sum(len(document) - 1 for document in documents)
    total = sum(
        masked_loss(model, document[None], torch.ones(1, len(document))) * (len(document) - 1) for document in documents
    )
    expected = total / predictions
    expected.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])

    job = caller.running()
    result = job.forward_backward(masked_frame(packed, mask, positions))
    assert result["avg_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert job.step()["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    # The proof that the documents would have seen each other without restarting positions.
    whole = job_loss_without_restarts(caller, packed, mask)
    assert abs(whole - expected.item()) > 1e-4


def job_loss_without_restarts(caller: Caller, packed: torch.Tensor, mask: torch.Tensor) -> float:
    return float(caller.running().forward_backward(masked_frame(packed, mask))["avg_loss"])


def test_padding_changes_nothing(caller: Caller) -> None:
    job = caller.running()
    ids, longer = token_batch(2, 20), torch.zeros(2, 32, dtype=torch.long)
    longer[:, :20] = ids
    attention = (torch.arange(32) < 20).long().expand(2, -1).contiguous()
    mask = (torch.arange(32) < 19).float().expand(2, -1).contiguous()
    bare = job.forward_backward(masked_frame(ids))["avg_loss"]
    padded = job.forward_backward(masked_frame(longer, mask, kwargs={"attention_mask": attention}))["avg_loss"]
    repeated = torch.cat([torch.arange(20), torch.ones(12, dtype=torch.long)]).expand(2, -1).contiguous()
    with_positions = masked_frame(longer, mask, repeated, kwargs={"attention_mask": attention})
    assert padded == pytest.approx(bare, rel=1e-5)
    assert job.forward_backward(with_positions)["avg_loss"] == pytest.approx(bare, rel=1e-5)


def test_bfloat16_keeps_small_updates(caller: Caller) -> None:
    """A step far below bfloat16's resolution still adds up, because it is taken in float32."""
    config = {"optimizer": {"name": "AdamW", "lr": 2e-5, "weight_decay": 0.0}}
    job = caller.running(training(dtype="bfloat16", config=config))
    frame = masked_frame(token_batch(8, 64))
    first = job.forward_backward(frame)["avg_loss"]
    for _ in range(20):
        job.step()
        last = job.forward_backward(frame)["avg_loss"]
    assert last < first - 0.01
    saved = weights_of(job.exported(job.save("weights-only")))
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_lora_trains_the_adapter_alone(caller: Caller) -> None:
    job = caller.running(training(config={"peft_config": LORA, "optimizer": {"name": "AdamW", "lr": 1e-2}}))
    frame = masked_frame(token_batch())
    losses = []
    for _ in range(5):
        losses.append(job.forward_backward(frame)["avg_loss"])
        job.step()
    assert losses[-1] < losses[0]
    merged, plain = weights_of(job.exported(job.save("weights-only"))), tiny().state_dict()
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, plain[name])}
    assert moved == {
        f"model.layers.{layer}.self_attn.{part}.weight" for layer in (0, 1) for part in ("q_proj", "v_proj")
    }


def test_the_same_seed_repeats_bit_for_bit(caller: Caller) -> None:
    """Also with dropout, and while another job draws random numbers at the same time."""
    lora = {**LORA, "lora_dropout": 0.3}

    def losses(seed: int) -> list[float]:
        job = caller.running(training(seed=seed, config={"peft_config": lora}))
        other = caller.running(training(seed=99, config={"peft_config": lora}))
        measured = []
        for step in range(3):
            noise = other.post_frame(masked_frame(token_batch(seed=100 + step)))
            measured.append(job.forward_backward(masked_frame(token_batch(seed=step)))["avg_loss"])
            job.step()
            other.poll(noise)
        return measured

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_jobs_that_start_do_not_disturb_one_that_trains(caller: Caller) -> None:
    """Though loading a model changes settings of the whole process for a moment."""

    def losses(others: int) -> list[float]:
        job = caller.running(training(config={"peft_config": LORA}))
        measured = []
        for step in range(6):
            starting = [caller.create(training(dtype="bfloat16", config={"peft_config": LORA})) for _ in range(others)]
            for repeat in range(4):
                measured.append(job.forward_backward(masked_frame(token_batch(seed=4 * step + repeat)))["avg_loss"])
            job.step()
            for reply in starting:
                other = RunningJob(caller, reply.json()["job_id"])
                assert other.wait_for("running", "failed")["status"] == "running"
                assert 5 < other.forward_backward(masked_frame(token_batch()))["avg_loss"] < 8
                other.call("POST", ":cancel")
        return measured

    assert losses(others=3) == losses(others=0)


def test_a_failed_batch_leaves_no_gradient(caller: Caller) -> None:
    job = caller.running()
    job.forward_backward(masked_frame(token_batch()))
    for broken in (
        masked_frame(token_batch() + 600),
        masked_frame(token_batch(), torch.zeros(4, 32)),
        masked_frame(token_batch(), processing={"loss_fn": "no_such_loss"}),
        masked_frame(token_batch(2, 129)),
        masked_frame(token_batch(), position_ids=torch.arange(31)[None].expand(4, -1).contiguous()),
        masked_frame(token_batch(), kwargs={"surprise": 1}),
        wire.dumps({"kwargs": {"input_ids": token_batch()}}),
        wire.dumps(["not", "an", "object"]),
    ):
        page = job.poll(job.post_frame(broken))
        assert page["status"] == "failed"
        assert page["error"]
    alone = caller.running()
    alone.forward_backward(masked_frame(token_batch()))
    assert job.step() == alone.step()


def test_a_batch_whose_logits_do_not_fit_is_taken_in_parts() -> None:
    """Rows in several groups give the same loss and gradient as all rows at once."""
    from cortex_training.local.assumptions import Assumptions
    from cortex_training.local.engine import scoring
    from cortex_training.local.engine.training import TrainingEngine
    from cortex_training.local.job_spec import read_job_spec
    from cortex_training.local.models import model_folder

    spec = read_job_spec({"sub_job_configs": [training()]}).sub_jobs[0]
    frame = wire.loads(masked_frame(token_batch(5)), framework="torch")
    whole = TrainingEngine(spec, model_folder("tiny"), Assumptions())
    parts = TrainingEngine(spec, model_folder("tiny"), Assumptions())
    expected = whole.forward_backward(frame)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_LOGITS_AT_ONCE", 2 * 32 * 512)
        measured = parts.forward_backward(frame)
    assert measured.avg_loss == pytest.approx(expected.avg_loss, rel=1e-6)
    assert parts.step(None)["metrics"]["grad_norm"] == pytest.approx(whole.step(None)["metrics"]["grad_norm"], rel=1e-4)


def test_accumulation_can_be_refused(contrary: Caller) -> None:
    job = contrary.running()
    job.forward_backward(masked_frame(token_batch()))
    page = job.poll(job.post_frame(masked_frame(token_batch(seed=1))))
    assert page["status"] == "failed"
    assert "step first" in page["error"]
    job.step()
    job.forward_backward(masked_frame(token_batch(seed=1)))


def test_sampling_weights_move_only_with_a_sync(caller: Caller) -> None:
    job = caller.running(training(), sampling())
    greedy = {"sampling_params": {"max_tokens": 12, "temperature": 0}}
    before = job.generate([[5, 6, 7]], **greedy)
    for seed in range(10):
        job.forward_backward(masked_frame(token_batch(seed=seed)))
        job.step(learning_rate=2e-2)
    assert job.generate([[5, 6, 7]], **greedy) == before
    job.sync()
    after = job.generate([[5, 6, 7]], **greedy)
    assert after[0]["token_ids"] != before[0]["token_ids"]
