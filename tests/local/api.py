"""A plain HTTP caller for the service's own tests: no client of this repository stands between them and the API."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import requests
import torch

from cortex_training import wire

_RESPONSE_OPTIONS = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
_PATIENCE_S = 120.0


def training(**changes: Any) -> dict[str, Any]:
    """A training sub-job; `config` entries go into its training_config."""
    config = {"optimizer": {"name": "AdamW", "lr": 1e-3}, "max_seq_len": 128, "train_batch_size": 4, "n_gpus": 1}
    config |= changes.pop("config", {})
    return {"job_type": "training", "model_name": "tiny", "training_config": config, **changes}


def sampling(**changes: Any) -> dict[str, Any]:
    config = {"max_seq_len": 128, "n_gpus": 1, **changes.pop("config", {})}
    return {"job_type": "sampling", "model_name": "tiny", "inference_config": config, **changes}


LORA = {"peft_type": "Lora", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def token_batch(rows: int = 4, length: int = 32, seed: int = 0) -> torch.Tensor:
    """Token ids int64 [rows, length] of the tiny vocabulary."""
    return torch.randint(4, 512, (rows, length), generator=torch.Generator().manual_seed(seed))


def masked_frame(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **changes: Any,
) -> bytes:
    """A frame in the form that datasets make; entries of `kwargs`, `context` and `processing` can be added."""
    mask = torch.ones(input_ids.shape) if loss_mask is None else loss_mask
    kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if position_ids is not None:
        kwargs["position_ids"] = position_ids
    value = {
        "args": (),
        "kwargs": kwargs | changes.get("kwargs", {}),
        "context": {"input_ids": input_ids, "loss_mask": mask} | changes.get("context", {}),
        "processing": {"loss_fn": "causal_cross_entropy", "post": [], "config": {}} | changes.get("processing", {}),
    }
    return wire.dumps(value, metadata=_RESPONSE_OPTIONS)


def chunks_of(frame: bytes, *, group_id: str | None = None, max_bytes: int = 0) -> list[bytes]:
    return wire.encode_byte_chunks(
        frame, kind="request", operation="fwd-bwd", max_bytes=max_bytes, chunk_group_id=group_id, force_chunk=True
    )


def result_of(page: dict[str, Any]) -> Any:
    """The result in a poll's page, decoded if it is a frame."""
    result = page["result"]
    if isinstance(result, dict) and result.get("wire_format") == "DSSST1":
        return wire.loads(base64.b64decode(result["payload_b64"]), framework="torch")
    return result


@dataclass
class Caller:
    """Calls one service; `url` is the prefix of all its paths."""

    url: str
    session: requests.Session = field(default_factory=requests.Session)

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.session.request(method, self.url + path, timeout=60, **options)

    def create(self, *sub_jobs: dict[str, Any], **fields: Any) -> requests.Response:
        body = {"job_id": str(uuid.uuid4()), "sub_job_configs": list(sub_jobs) or [training()], **fields}
        return self.call("POST", "", json=body)

    def running(self, *sub_jobs: dict[str, Any], **fields: Any) -> RunningJob:
        """Create a job and wait until it runs."""
        reply = self.create(*sub_jobs, **fields)
        assert reply.status_code == 200, reply.text
        job = RunningJob(self, reply.json()["job_id"])
        described = job.wait_for("running", "failed")
        assert described["status"] == "running", described
        return job


@dataclass
class RunningJob:
    caller: Caller
    job_id: str

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.caller.call(method, f"/{self.job_id}{path}", **options)

    def describe(self) -> dict[str, Any]:
        reply = self.call("GET", "")
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def wait_for(self, *states: str) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while (described := self.describe())["status"] not in states:
            assert time.monotonic() < deadline, described
            time.sleep(0.01)
        return described

    def post_frame(self, frame: bytes, *, path: str = "/forward-backward") -> requests.Response:
        return self.call("POST", path, data=frame, headers={"content-type": "application/octet-stream"})

    def poll(self, reply: requests.Response) -> dict[str, Any]:
        """Poll the request that a call answered with, to its end."""
        assert reply.status_code == 200, reply.text
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = self.call("GET", f"/requests/{reply.json()['request_id']}")
            assert answer.status_code == 200, answer.text
            page: dict[str, Any] = answer.json()
            if page["status"] in ("done", "failed", "cancelled"):
                return page
            assert time.monotonic() < deadline, page
            time.sleep(0.005)

    def done(self, reply: requests.Response) -> Any:
        """The result of a call that must succeed."""
        page = self.poll(reply)
        assert page["status"] == "done", page
        return result_of(page)

    def forward_backward(self, frame: bytes, *, group_id: str | None = None) -> dict[str, Any]:
        return dict(self.done(self.post_frame(chunks_of(frame, group_id=group_id)[0])))

    def step(self, **body: Any) -> dict[str, Any]:
        return dict(self.done(self.call("POST", "/step", json=body)))

    def save(self, kind: str = "resumable") -> str:
        return str(self.done(self.call("POST", "/save", json={"checkpoint_type": kind}))["checkpoint_id"])

    def load(self, checkpoint_id: str, **body: Any) -> dict[str, Any]:
        return dict(self.done(self.call("POST", "/load", json={"checkpoint_id": checkpoint_id, **body})))

    def generate(self, prompts: Sequence[Any], **fields: Any) -> list[dict[str, Any]]:
        return list(self.done(self.call("POST", "/generate", json={"prompts": prompts, **fields}))["results"])

    def sync(self, weight_format: str | None = None) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "source_sub_job_id": f"{self.job_id}:training:0",
            "target_sub_job_ids": [f"{self.job_id}:sampling:0"],
        }
        if weight_format:
            payload["weight_format"] = weight_format
        return dict(self.done(self.operation("weight-sync", payload)))

    def operation(self, kind: str, payload: dict[str, Any], **hints: str) -> requests.Response:
        return self.call("POST", "/operation", json={"operation_type": kind, "payload": payload, **hints})

    def exported(self, checkpoint_id: str) -> dict[str, bytes]:
        """Every file of a checkpoint, fetched by its link without credentials."""
        reply = self.call("POST", f"/checkpoints/{checkpoint_id}:export")
        assert reply.status_code == 200, reply.text
        return {file["filename"]: requests.get(file["url"], timeout=60).content for file in reply.json()["files"]}
