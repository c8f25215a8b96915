"""Saving, loading and exporting: what comes back is what was there, to the bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load
from transformers import AutoTokenizer

from cortex_training.local.models import model_folder
from tests.local.api import LORA, Caller, RunningJob, masked_frame, sampling, token_batch, training
from tests.local.reference import masked_loss, opened, weights_of

LORA_WITH_DROPOUT = {**LORA, "lora_dropout": 0.2}


def train(job: RunningJob, steps: range) -> list[float]:
    """Losses of some steps, each on a batch of its own."""
    losses = []
    for seed in steps:
        losses.append(job.forward_backward(masked_frame(token_batch(seed=seed)))["avg_loss"])
        job.step()
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("peft_config", [None, LORA_WITH_DROPOUT], ids=["full", "lora"])
def test_resuming_goes_on_bit_for_bit(caller: Caller, dtype: str, peft_config: dict[str, object] | None) -> None:
    sub_job = training(dtype=dtype, config={"peft_config": peft_config} if peft_config else {})
    job = caller.running(sub_job)
    train(job, range(3))
    checkpoint = job.save()
    expected = train(job, range(3, 6))
    assert train(job, range(6, 7)) != expected

    assert job.load(checkpoint)["global_steps"] == 3
    assert train(job, range(3, 6)) == expected

    job.call("POST", ":cancel")
    source = {"checkpoint_id": checkpoint, "source_job_id": job.job_id}
    successor = caller.running({**sub_job, "source_checkpoint_info": source})
    assert train(successor, range(3, 6)) == expected
    assert successor.step()["global_steps"] == 7


def test_gradients_outlive_a_load(caller: Caller) -> None:
    """Nothing in the API clears accumulated gradients, and a load does not either."""
    job, other = caller.running(), caller.running()
    checkpoint = job.save()
    job.forward_backward(masked_frame(token_batch()))
    job.load(checkpoint)
    other.forward_backward(masked_frame(token_batch()))
    assert job.step()["metrics"] == other.step()["metrics"]


def test_loading_can_clear_gradients_and_keep_counting(contrary: Caller) -> None:
    job = contrary.running()
    train(job, range(2))
    assert saved_by_step(job) == "global_step2"
    train(job, range(2, 3))
    job.forward_backward(masked_frame(token_batch()))
    assert job.load("global_step2")["global_steps"] == 3
    assert job.step() == {"global_steps": 4, "last_lr": 1e-3, "metrics": {"grad_norm": 0.0}}
    assert [saved_by_step(job) for _ in range(2)] == ["global_step4", "global_step4"]
    assert [one["checkpoint_id"] for one in checkpoints(job)] == ["global_step2", "global_step4"]


def saved_by_step(job: RunningJob) -> str:
    """Save where the result holds the stage path alone, and find the checkpoint in the list."""
    result = job.done(job.call("POST", "/save", json={"checkpoint_type": "resumable"}))
    assert set(result) == {"job_id", "stage_path", "checkpoint_path", "checkpoint_tag", "version"}
    newest = str(checkpoints(job)[-1]["checkpoint_id"])
    assert result["stage_path"].split("/")[-3] == newest
    return newest


def test_weights_only_opens_in_plain_transformers(caller: Caller, tmp_path: Path) -> None:
    job = caller.running(training(config={"peft_config": LORA}))
    train(job, range(2))
    for name, content in job.exported(job.save("weights-only")).items():
        (tmp_path / name).write_bytes(content)
    ids = token_batch(seed=7)
    expected = job.forward_backward(masked_frame(ids))["avg_loss"]
    with torch.no_grad():
        assert masked_loss(opened(tmp_path), ids, torch.ones(ids.shape)).item() == pytest.approx(expected, rel=1e-5)
    own, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, model_folder("tiny")))
    assert own("Return the length.")["input_ids"] == original("Return the length.")["input_ids"]
    assert own.chat_template == original.chat_template


def test_no_file_of_a_checkpoint_is_pickle(caller: Caller) -> None:
    job = caller.running()
    train(job, range(1))
    for kind in ("resumable", "weights-only"):
        files = job.exported(job.save(kind))
        assert {Path(name).suffix for name in files} <= {".json", ".safetensors", ".jinja"}
        for name, content in files.items():
            assert name.endswith((".json", ".jinja")) or load(content)


def test_an_adapter_remembers_the_weights_under_it(caller: Caller) -> None:
    """LoRA on top of loaded weights: resuming it must not put the adapter on the original model."""
    base = caller.running()
    train(base, range(3))
    source = {"checkpoint_id": base.save("weights-only"), "source_job_id": base.job_id}
    job = caller.running(training(config={"peft_config": LORA}, source_checkpoint_info=source))
    train(job, range(2))
    checkpoint = job.save()
    expected = train(job, range(2, 4))
    successor = caller.running(
        training(
            config={"peft_config": LORA},
            source_checkpoint_info={"checkpoint_id": checkpoint, "source_job_id": job.job_id},
        )
    )
    assert train(successor, range(2, 4)) == expected

    plain = caller.running(training(config={"peft_config": LORA}))
    on_original = plain.save()
    expected = train(plain, range(2))
    successor.load(on_original, source_job_id=plain.job_id)
    assert train(successor, range(2)) == expected


def test_sampling_starts_from_saved_weights(caller: Caller) -> None:
    trainer = caller.running(training(), sampling())
    for seed in range(10):
        trainer.forward_backward(masked_frame(token_batch(seed=seed)))
        trainer.step(learning_rate=2e-2)
    trainer.sync()
    greedy = {"sampling_params": {"max_tokens": 12, "temperature": 0}}
    expected = trainer.generate([[5, 6, 7]], **greedy)
    resumable, weights = trainer.save(), trainer.save("weights-only")
    trainer.call("POST", ":cancel")

    source = {"checkpoint_id": weights, "source_job_id": trainer.job_id}
    sampler = caller.running(sampling(source_checkpoint_info=source))
    assert sampler.generate([[5, 6, 7]], **greedy) == expected

    refused = caller.create(sampling(source_checkpoint_info={**source, "checkpoint_id": resumable}))
    assert refused.status_code == 400
    assert "weights-only" in refused.json()["message"]


def test_load_says_what_it_cannot_load(caller: Caller) -> None:
    job = caller.running(training(), sampling())
    train(job, range(1))
    checkpoint = job.save()

    def refusal(**body: object) -> tuple[int, str]:
        reply = job.call("POST", "/load", json={"checkpoint_id": checkpoint, **body})
        return reply.status_code, reply.json()["message"]

    assert refusal(checkpoint_id="cp_missing")[0] == 404
    assert refusal(source_job_id="no-such-job")[0] == 404
    status, message = refusal(target_sub_job_id="elsewhere:training:0")
    assert (status, "does not belong to session" in message) == (400, True)
    assert refusal(target_sub_job_id=f"{job.job_id}:sampling:0")[0] == 501
    assert refusal(checkpoint_id=7)[0] == 400

    bigger = caller.running(training(config={"n_gpus": 2}))
    reply = bigger.call("POST", "/load", json={"checkpoint_id": checkpoint, "source_job_id": job.job_id})
    assert reply.status_code == 400
    assert "load_optimizer_states: false" in reply.json()["message"]
    weights_alone = caller.running(training(config={"n_gpus": 2, "load_optimizer_states": False}))
    weights_alone.load(checkpoint, source_job_id=job.job_id)

    lora = caller.running(training(config={"peft_config": LORA}))
    page = lora.poll(lora.call("POST", "/load", json={"checkpoint_id": checkpoint, "source_job_id": job.job_id}))
    assert (page["status"], "other parameters" in page["error"]) == ("failed", True)


def test_checkpoints_are_listed_and_deleted(caller: Caller) -> None:
    job = caller.running()
    train(job, range(2))
    first = job.save()
    loss = job.forward_backward(masked_frame(token_batch(seed=5)))["avg_loss"]
    second = job.save("WEIGHTS-ONLY")
    listed = checkpoints(job)
    assert [one["checkpoint_id"] for one in listed] == [first, second]
    assert [one["checkpoint_type"] for one in listed] == ["resumable", "weights-only"]
    assert [one["global_steps"] for one in listed] == [2, 2]
    assert listed[1]["avg_loss"] == loss
    assert job.call("DELETE", f"/checkpoints/{first}").status_code == 204
    assert job.call("DELETE", f"/checkpoints/{first}").status_code == 404
    assert [one["checkpoint_id"] for one in checkpoints(job)] == [second]
    assert job.call("POST", f"/checkpoints/{first}:export").status_code == 404


def test_export_links_serve_ranges_and_expire(contrary: Caller) -> None:
    job = contrary.running()
    checkpoint = saved_by_step(job)
    exported = job.call("POST", f"/checkpoints/{checkpoint}:export").json()
    weights = next(file for file in exported["files"] if file["filename"] == "model.safetensors")
    whole = requests.get(weights["url"], timeout=60)
    assert (whole.status_code, len(whole.content)) == (200, weights["size_bytes"])
    part = requests.get(weights["url"], headers={"range": "bytes=100-199"}, timeout=60)
    assert (part.status_code, part.content) == (206, whole.content[100:200])
    rest = requests.get(weights["url"], headers={"range": f"bytes={weights['size_bytes'] - 10}-"}, timeout=60)
    assert rest.content == whole.content[-10:]
    beyond = requests.get(weights["url"], headers={"range": f"bytes={weights['size_bytes']}-"}, timeout=60)
    assert beyond.status_code == 416
    links, name = weights["url"].rsplit("/", 1)
    for escape in ("..%2f..%2fcheckpoint.json", "%2e%2e/checkpoint.json", "checkpoint.json", "a%00b", "..%5cx", ""):
        assert requests.get(f"{links}/{escape}", timeout=60).status_code in (400, 403, 404)
    assert requests.get(f"{links}x/{name}", timeout=60).status_code == 403
    deadline = time.monotonic() + 30
    while requests.get(weights["url"], timeout=60).status_code != 403:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_save_ignores_the_callers_checkpoint_id(caller: Caller) -> None:
    job = caller.running()
    result = job.done(job.call("POST", "/save", json={"checkpoint_id": "mine"}))
    assert result["checkpoint_id"].startswith("cp_")
    assert job.call("POST", "/save", json={"checkpoint_type": "pickle"}).status_code == 400


def checkpoints(job: RunningJob) -> list[dict[str, object]]:
    return list(job.call("GET", "/checkpoints").json()["checkpoints"])


def test_lora_sync_moves_the_adapter_alone(caller: Caller) -> None:
    job = caller.running(training(config={"peft_config": LORA}), sampling(config={"peft_config": LORA}))
    greedy = {"sampling_params": {"max_tokens": 12, "temperature": 0}}
    before = job.generate([[5, 6, 7]], **greedy)
    for seed in range(10):
        job.forward_backward(masked_frame(token_batch(seed=seed)))
        job.step(learning_rate=5e-2)
    moved = job.sync("lora")
    assert moved["tensors"] == 8
    adapted = job.generate([[5, 6, 7]], **greedy)
    assert adapted[0]["token_ids"] != before[0]["token_ids"]
    assert job.sync("hf")["tensors"] > 20
    merged = job.generate([[5, 6, 7]], **greedy)
    assert merged[0]["token_ids"] == adapted[0]["token_ids"]
    assert merged[0]["logprobs"] == pytest.approx(adapted[0]["logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    ("trained", "sampled", "says"),
    [
        (None, LORA, "training_config.peft_config"),
        (LORA, None, "inference_config.peft_config"),
        (LORA, {**LORA, "r": 8}, "r is 4"),
        (LORA, {**LORA, "target_modules": ["q_proj"]}, "target_modules"),
    ],
)
def test_lora_sync_needs_matching_adapters(
    caller: Caller, trained: dict[str, object] | None, sampled: dict[str, object] | None, says: str
) -> None:
    job = caller.running(
        training(config={"peft_config": trained} if trained else {}),
        sampling(config={"peft_config": sampled} if sampled else {}),
    )
    reply = job.operation(
        "weight-sync",
        {
            "source_sub_job_id": f"{job.job_id}:training:0",
            "target_sub_job_ids": [f"{job.job_id}:sampling:0"],
            "weight_format": "lora",
        },
    )
    assert (reply.status_code, says in reply.json()["message"]) == (400, True), reply.text


def test_exported_weights_of_a_job_without_training(caller: Caller) -> None:
    """Weights that never moved come out as they went in."""
    job = caller.running()
    files = job.exported(job.save("weights-only"))
    assert "config.json" in files
    saved = weights_of(files)
    original = load((model_folder("tiny") / "model.safetensors").read_bytes())
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
