"""Runs in a Python with the public client: every call it has, against the service whose URL is the argument.

Prints one JSON object with what came back.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import torch

from cortex_training import wire
from cortex_training.client import CortexTrainingClient, JobType, SubJobConfig

assert version("cortex-training") == "0.0.3"

LORA = {
    "peft_type": "Lora",
    "r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def batch(seed: int) -> dict:
    ids = torch.randint(4, 512, (4, 64), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(4, 64)
    mask[:, -1] = 0
    return {
        "args": (),
        "kwargs": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False},
        "context": {"input_ids": ids, "loss_mask": mask},
        "processing": {"loss_fn": "causal_cross_entropy", "post": ["compute_logprobs"], "config": {}},
    }


def main(base_url: str) -> None:
    seen: dict = {}
    client = CortexTrainingClient(base_url, "DB", "PUBLIC", poll_interval=0.05)
    training = SubJobConfig.training_job(
        model_name="Qwen/Qwen3-1.7B",
        optimizer={"name": "AdamW", "lr": 1e-4},
        max_seq_len=2048,
        train_batch_size=8,
        n_gpus=8,
        dtype="bfloat16",
        extra_training={"peft_config": LORA},
    )
    sampling = SubJobConfig.sampling_job(
        model_name="Qwen/Qwen3-1.7B", max_seq_len=2048, n_gpus=1, dtype="bfloat16", extra_sampling={"peft_config": LORA}
    )
    seen["types"] = [str(JobType.TRAINING.value), str(JobType.SAMPLING.value)]
    job = client.create_job(sub_jobs=[training, sampling], experiment_name="walk")
    seen["job"] = client.wait_for_job(job)
    training_id, sampling_id = f"{job}:training:0", f"{job}:sampling:0"
    seen["listed"] = [one["job_id"] for one in client.list_jobs("running")]
    seen["capacity"] = client.get_capacity()
    seen["experiment_run"] = client.get_experiment_run(job)

    seen["losses"], seen["steps"] = [], []
    for seed in range(3):
        frame = wire.dumps(batch(seed), metadata={"response_options": {"format": "dssst1", "delivery": "chunked"}})
        seen["losses"].append(client.poll_request(job, client.forward_backward(job, frame))["avg_loss"])
        seen["steps"].append(client.poll_request(job, client.step(job, learning_rate=1e-2)))
    seen["saved"] = client.poll_request(job, client.save(job, checkpoint_type="resumable"))
    checkpoint = seen["saved"]["checkpoint_id"]
    seen["loaded"] = client.poll_request(job, client.load(job, checkpoint, target_sub_job_id=training_id))
    weights = client.poll_request(job, client.save(job, checkpoint_type="weights-only"))["checkpoint_id"]
    seen["checkpoints"] = client.list_checkpoints(job)
    seen["export"] = client.export_checkpoint(job, weights)

    prompts = ["Write a short proof.", [5, 6, 7]]
    params = {"max_tokens": 8, "temperature": 0}
    seen["before"] = client.poll_request(job, client.generate(job, prompts, params, routing_key="k", strict=False))
    seen["sync"] = client.poll_request(job, client.weight_sync(job, training_id, [sampling_id], weight_format="lora"))
    seen["after"] = client.poll_request(job, client.generate(job, prompts, [params, params]))
    seen["reset"] = client.reset_prefix_cache(job)
    seen["tail"] = client.tail_logs(job, sub_job_id=training_id, max_lines=5)
    seen["streamed"] = len(list(client.stream_logs(job, sub_job_id=training_id, max_lines=3, follow=False)))
    request_id = client.generate(job, ["to be cancelled"] * 16, {"max_tokens": 1500, "ignore_eos": True})
    seen["cancelled_request"] = client.cancel_request(job, request_id)
    client.delete_checkpoint(job, checkpoint)
    seen["left"] = [one["checkpoint_id"] for one in client.list_checkpoints(job)]
    seen["cancel"] = client.cancel_job(job)
    seen["ended"] = client.get_job(job)["status"]

    source = {"checkpoint_id": weights, "source_job_id": job}
    second = client.create_job_from_body(
        {
            "sub_job_configs": [
                {
                    "job_type": "sampling",
                    "model_name": "Qwen/Qwen3-1.7B",
                    "inference_config": {"max_seq_len": 2048, "n_gpus": 1},
                    "dtype": "bfloat16",
                    "source_checkpoint_info": source,
                }
            ]
        }
    )["job_id"]
    client.wait_for_job(second)
    seen["from_saved"] = client.poll_request(second, client.generate(second, prompts, params))
    client.cancel_job(second)
    client.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
