"""Runs in a Python with the public client: the reference's end-to-end examples, call for call, argument for argument.

`documented_examples.py loop` creates a job, trains, syncs, saves, loads and starts sampling from saved weights;
`documented_examples.py lora` trains and syncs an adapter. Where the service is comes from the environment. Prints one
JSON object with the answers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from cortex_training import wire
from cortex_training.client import CortexTrainingClient, SubJobConfig, serialize_forward_backward_args

HOST, PAT, DATABASE, SCHEMA = (os.environ[name] for name in ("HOST", "PAT", "DATABASE", "SCHEMA"))


def connected() -> CortexTrainingClient:
    return CortexTrainingClient.from_pat(host=HOST, pat=PAT, database=DATABASE, schema=SCHEMA)


def basic_frame() -> bytes:
    """The batch of the reference's minimal shape."""
    input_ids = torch.arange(4, 4 + 8 * 32).view(8, 32)
    labels = input_ids.clone()
    return serialize_forward_backward_args(args=(), kwargs={"input_ids": input_ids, "labels": labels})


def extended_frame() -> bytes:
    """The batch that asks for its result in frames."""
    batch = {
        "args": (),
        "kwargs": {"input_ids": torch.arange(4, 260).view(8, 32), "labels": torch.arange(4, 260).view(8, 32)},
    }
    return wire.dumps(batch, metadata={"response_options": {"format": "dssst1", "delivery": "chunked"}})


def loop() -> dict[str, Any]:
    fwd_bwd_dssst1_frame = basic_frame()
    client = connected()

    training = SubJobConfig.training_job(
        model_name="Qwen/Qwen3-1.7B",
        optimizer={"name": "AdamW", "lr": 1e-4},
        max_seq_len=2048,
        train_batch_size=8,
        n_gpus=8,
        dtype="bfloat16",
    )
    sampling = SubJobConfig.sampling_job(
        model_name="Qwen/Qwen3-1.7B",
        max_seq_len=2048,
        n_gpus=1,
        dtype="bfloat16",
    )
    job_id = client.create_job(sub_jobs=[training, sampling])
    job = client.wait_for_job(job_id)
    training_id, sampling_id = f"{job_id}:training:0", f"{job_id}:sampling:0"

    request_id = client.generate(
        job_id, prompts=["Write a short proof."], sampling_params={"max_tokens": 256, "temperature": 0.7}
    )
    rollouts = client.poll_request(job_id, request_id)["results"]
    request_id = client.forward_backward(job_id, fwd_bwd_dssst1_frame)
    train_result = client.poll_request(job_id, request_id)
    request_id = client.step(job_id, learning_rate=1e-4)
    step_result = client.poll_request(job_id, request_id)
    request_id = client.weight_sync(job_id, source_sub_job_id=training_id, target_sub_job_ids=[sampling_id])
    synced = client.poll_request(job_id, request_id)

    request_id = client.save(job_id, checkpoint_type="resumable")
    resumable = client.poll_request(job_id, request_id)
    request_id = client.load(job_id, checkpoint_id=resumable["checkpoint_id"])
    loaded = client.poll_request(job_id, request_id)

    training_job_id = job_id
    request_id = client.save(training_job_id, checkpoint_type="weights-only")
    checkpoint = client.poll_request(training_job_id, request_id)
    sampling = SubJobConfig.sampling_job(
        model_name="Qwen/Qwen3-1.7B",
        max_seq_len=2048,
        n_gpus=1,
        source_checkpoint_info={"checkpoint_id": checkpoint["checkpoint_id"], "source_job_id": training_job_id},
    )
    sampling_job_id = client.create_job(sub_jobs=[sampling])
    sampler = client.wait_for_job(sampling_job_id)

    for one in (job_id, sampling_job_id):
        client.cancel_job(one)
    return {
        "job": job,
        "rollouts": rollouts,
        "train_result": train_result,
        "step_result": step_result,
        "synced": synced,
        "resumable": resumable,
        "loaded": loaded,
        "checkpoint": checkpoint,
        "sampler": sampler,
    }


def lora() -> dict[str, Any]:
    fwd_bwd_dssst1_frame = extended_frame()
    client = connected()
    lora_config = {
        "peft_type": "Lora",
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    training = SubJobConfig.training_job(
        model_name="Qwen/Qwen3-1.7B",
        optimizer={"name": "AdamW", "lr": 1e-4},
        max_seq_len=2048,
        train_batch_size=8,
        n_gpus=8,
        dtype="bfloat16",
        extra_training={"peft_config": lora_config},
    )
    sampling = SubJobConfig.sampling_job(
        model_name="Qwen/Qwen3-1.7B",
        max_seq_len=2048,
        n_gpus=1,
        dtype="bfloat16",
        extra_sampling={"peft_config": lora_config},
    )
    job_id = client.create_job(sub_jobs=[training, sampling])
    job = client.wait_for_job(job_id)
    training_id, sampling_id = f"{job_id}:training:0", f"{job_id}:sampling:0"

    request_id = client.forward_backward(job_id, fwd_bwd_dssst1_frame)
    train_result = client.poll_request(job_id, request_id)
    request_id = client.step(job_id, learning_rate=1e-4)
    step_result = client.poll_request(job_id, request_id)
    request_id = client.weight_sync(
        job_id, source_sub_job_id=training_id, target_sub_job_ids=[sampling_id], weight_format="lora"
    )
    synced = client.poll_request(job_id, request_id)
    request_id = client.generate(
        job_id, prompts=["Write a short proof."], sampling_params={"max_tokens": 256, "temperature": 0.7}
    )
    result = client.poll_request(job_id, request_id)

    client.cancel_job(job_id)
    return {"job": job, "train_result": train_result, "step_result": step_result, "synced": synced, "result": result}


if __name__ == "__main__":
    print(json.dumps({"loop": loop, "lora": lora}[sys.argv[1]]()))
