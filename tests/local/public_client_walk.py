"""Runs in a Python with the public client: every call it has, against the service whose URL is the argument.

Prints one JSON object with what came back. `missed` names the client's public methods that nothing here called.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import requests
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
FRAMED = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
PROMPTS = ["Write a short proof.", [5, 6, 7]]
PARAMS = {"max_tokens": 8, "temperature": 0}
_NOT_CALLS = {"close", "from_pat"}
"""The first ends the walk; the second needs https, and has a test of its own."""


class Walk:
    """Calls the client, remembers the method names, and keeps what came back in `seen`."""

    def __init__(self, base_url: str) -> None:
        self._client = CortexTrainingClient(base_url, "DB", "PUBLIC", poll_interval=0.05)
        self._called: set[str] = set()
        self.seen: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self._called.add(name)
        return getattr(self._client, name)

    def done(self, job: str, request_id: str) -> Any:
        return self.poll_request(job, request_id)

    def missed(self) -> list[str]:
        public = {name for name, value in vars(CortexTrainingClient).items() if name[0] != "_" and _is_method(value)}
        return sorted(public - self._called - _NOT_CALLS)


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, classmethod | staticmethod)


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


@contextlib.contextmanager
def refusal(seen: dict[str, Any], name: str) -> Iterator[None]:
    """What the client raised for a call that cannot be answered."""
    try:
        yield
    except requests.HTTPError as error:
        seen[name] = {"status": error.response.status_code, "body": error.response.json()}
    except RuntimeError as error:
        seen[name] = {"message": str(error)}
    else:
        seen[name] = "answered"


def begin(walk: Walk) -> str:
    seen = walk.seen
    training = SubJobConfig.training_job(
        model_name="Qwen/Qwen3-1.7B",
        optimizer={"name": "AdamW", "lr": 1e-4},
        max_seq_len=2048,
        train_batch_size=8,
        n_gpus=8,
        dtype="bfloat16",
        extra_training={"peft_config": LORA, "step_peak_memory_log": True},
    )
    sampling = SubJobConfig.sampling_job(
        model_name="Qwen/Qwen3-1.7B", max_seq_len=2048, n_gpus=1, dtype="bfloat16", extra_sampling={"peft_config": LORA}
    )
    seen["types"] = [str(JobType.TRAINING.value), str(JobType.SAMPLING.value)]
    job = walk.create_job(
        sub_jobs=[training, sampling],
        experiment_name="walk",
        hardware="B200",
        idle_timeout_seconds=600,
        pending_timeout_seconds=600,
    )
    seen["job"] = walk.wait_for_job(job)
    seen["got"] = walk.get_job(job)
    seen["jobs"] = walk.list_jobs("running")
    seen["capacity"] = walk.get_capacity()
    seen["capacity_of_one"] = walk.get_capacity("B200")
    seen["experiment_run"] = walk.get_experiment_run(job)
    walk.emit_metric("walk")
    return job


def train(walk: Walk, job: str) -> str:
    """Returns the id of a weights-only checkpoint."""
    seen, training_id = walk.seen, f"{job}:training:0"
    seen["forward_backwards"], seen["steps"] = [], []
    for seed in range(3):
        frame = wire.dumps(batch(seed), metadata=FRAMED)
        seen["forward_backwards"].append(walk.done(job, walk.forward_backward(job, frame)))
        seen["steps"].append(walk.done(job, walk.step(job, learning_rate=1e-2)))
    frame = wire.dumps(batch(0))
    seen["forwards"] = [
        walk.done(job, call(job, frame, sub_job_id=training_id)["request_id"])
        for call in (walk.forward, walk.fwd, walk.fwd_no_grad)
    ]
    seen["saved"] = walk.done(job, walk.save(job, checkpoint_type="resumable"))
    checkpoint = seen["saved"]["checkpoint_id"]
    seen["loaded"] = walk.done(job, walk.load(job, checkpoint, target_sub_job_id=training_id))
    weights = walk.done(job, walk.save(job, checkpoint_id="mine", checkpoint_type="weights-only"))["checkpoint_id"]
    seen["checkpoints"] = walk.list_checkpoints(job)
    seen["export"] = walk.export_checkpoint(job, weights)
    walk.delete_checkpoint(job, checkpoint)
    seen["left"] = [one["checkpoint_id"] for one in walk.list_checkpoints(job)]
    return str(weights)


def sample(walk: Walk, job: str) -> None:
    seen, training_id, sampling_id = walk.seen, f"{job}:training:0", f"{job}:sampling:0"
    request_id = walk.generate(job, PROMPTS, PARAMS, routing_key="k", strict=False)
    seen["before"] = walk.done(job, request_id)
    # The poll above took the result; the request is still there.
    seen["status"] = walk.get_request_status(job, request_id, max_events=8)
    seen["sync"] = walk.done(job, walk.weight_sync(job, training_id, [sampling_id], weight_format="lora"))
    seen["after"] = walk.done(job, walk.generate(job, PROMPTS, [PARAMS, PARAMS]))
    seen["stream"] = walk.generate_stream(job, PROMPTS, {**PARAMS, "dss_sample_id": "s"}, routing_key=["k", None])
    events: list[dict] = []
    while not events or events[-1]["type"] != "done":
        page = walk.get_request_status(job, seen["stream"]["request_id"], max_events=1)
        assert len(page["events"]) <= 1
        events += page["events"]
    seen["events"] = events
    seen["replay"] = walk.bootstrap_router_replay(
        job, sampling_id, training_id, max_cache_bytes=4096, sub_job_id=training_id
    )
    seen["discarded"] = walk.router_replay_discard(job, ["s", "t"], sub_job_id=sampling_id)
    seen["reset"] = walk.reset_prefix_cache(job)
    request_id = walk.generate(job, ["to be cancelled"] * 16, {"max_tokens": 1500, "ignore_eos": True})
    seen["cancelled_request"] = walk.cancel_request(job, request_id)
    with refusal(seen, "poll_of_cancelled"):
        walk.poll_request(job, request_id)


def read_logs(walk: Walk, job: str) -> None:
    seen, training_id = walk.seen, f"{job}:training:0"
    seen["tail"] = walk.tail_logs(job, sub_job_id=training_id, max_lines=5)
    seen["streamed"] = list(walk.stream_logs(job, sub_job_id=training_id, max_lines=3, follow=False))
    with refusal(seen, "tail_events"):
        walk.tail_events(job)
    with refusal(seen, "stream_events"):
        next(walk.stream_events(job))
    # These need a Snowflake session, which a client of a bare URL has not.
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in (
            ("fetch_execution_logs", (job,)),
            ("download_stdout_logs", (job, folder)),
            ("download_metrics", (job, folder)),
        ):
            with refusal(seen, name):
                getattr(walk, name)(*arguments)


def sample_from_saved(walk: Walk, job: str, weights: str) -> None:
    second = walk.create_job_from_body(
        {
            "sub_job_configs": [
                {
                    "job_type": "sampling",
                    "model_name": "Qwen/Qwen3-1.7B",
                    "inference_config": {"max_seq_len": 2048, "n_gpus": 1},
                    "dtype": "bfloat16",
                    "source_checkpoint_info": {"checkpoint_id": weights, "source_job_id": job},
                }
            ]
        }
    )["job_id"]
    walk.wait_for_job(second)
    walk.seen["from_saved"] = walk.done(second, walk.generate(second, PROMPTS, PARAMS))
    walk.cancel_job(second)


def main(base_url: str) -> None:
    walk = Walk(base_url)
    job = begin(walk)
    weights = train(walk, job)
    sample(walk, job)
    read_logs(walk, job)
    walk.seen["cancel"] = walk.cancel_job(job)
    walk.seen["ended"] = walk.get_job(job)["status"]
    sample_from_saved(walk, job, weights)
    walk.seen["missed"] = walk.missed()
    walk.close()
    print(json.dumps(walk.seen))


if __name__ == "__main__":
    main(sys.argv[1])
