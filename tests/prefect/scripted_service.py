"""A service that does what a test tells it to, for the moments that the local service can't be asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from cortex_training.errors import ConflictError, JobFailed, NotFoundError, RequestFailed
from cortex_training.states import is_terminal_job

Progress = Callable[[dict[str, Any]], None]


class ScriptedService:
    """Stands where an `AsyncCortexTrainingClient` does. `calls` is what reached it; `before` and `after` step in."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.results: dict[str, dict[str, Any] | Exception] = {}
        self.before: dict[str, Callable[..., None]] = {}
        self.after: dict[str, Callable[..., None]] = {}
        self.own_job_ids: list[str] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.capacities: list[dict[str, Any]] = []
        self.global_steps = 0
        self._ids = itertools.count(1)

    def named(self, verb: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == verb]

    async def create_job_from_body(self, body: dict[str, Any]) -> dict[str, Any]:
        self._called("create", body["job_id"])
        job_id = self.own_job_ids.pop(0) if self.own_job_ids else body["job_id"]
        if job_id in self.jobs:
            raise ConflictError(status=409, message="duplicate job_id")
        self.jobs[job_id] = {"job_id": job_id, "status": "running", "sub_jobs": body["sub_job_configs"]}
        self._done("create", job_id)
        return {"job_id": job_id}

    async def aclose(self) -> None:
        """As the client that it stands for."""

    async def get_job(self, job_id: str) -> dict[str, Any]:
        self._called("get", job_id)
        if job_id not in self.jobs:
            raise NotFoundError(status=404, message="no such job")
        return self.jobs[job_id]

    async def wait_for_job(
        self, job_id: str, *, timeout_s: float | None = None, progress: Progress | None = None
    ) -> dict[str, Any]:
        self._called("wait", job_id, timeout_s)
        self._refuse_if_ended(job_id)
        return self.jobs[job_id]

    async def cancel_job(self, job_id: str) -> None:
        self._called("cancel", job_id)
        if job_id not in self.jobs:
            raise NotFoundError(status=404, message="no such job")
        if self.jobs[job_id]["status"] in ("failed", "terminated"):
            raise ConflictError(status=409, message="the job has ended")
        self.jobs[job_id]["status"] = "cancelled"

    async def step(self, job_id: str, learning_rate: float | None = None) -> str:
        self._called("step", job_id, learning_rate)
        self.global_steps += 1
        return self._request("step", {"global_steps": self.global_steps, "last_lr": learning_rate})

    async def forward_backward(self, job_id: str, frame: bytes, *, chunk_group_id: str) -> str:
        self._called("forward_backward", job_id, chunk_group_id, frame)
        return self._request("forward_backward", {"avg_loss": 1.5, "metrics": {"tokens": 10}})

    async def save(self, job_id: str, *, checkpoint_type: str) -> str:
        self._called("save", job_id, checkpoint_type)
        checkpoint = f"cp_{len(self.named('save'))}"
        self.checkpoints.append({"checkpoint_id": checkpoint, "global_steps": self.global_steps})
        return self._request("save", {"checkpoint_id": checkpoint})

    async def load(
        self, job_id: str, checkpoint_id: str, source_job_id: str | None = None, *, target_sub_job_id: str | None = None
    ) -> str:
        self._called("load", job_id, checkpoint_id, source_job_id)
        return self._request("load", {"global_steps": self.global_steps})

    async def weight_sync(
        self, job_id: str, source: str, targets: list[str], *, weight_format: str | None = None
    ) -> str:
        self._called("weight_sync", job_id, source, targets)
        return self._request("weight_sync", {})

    async def generate(
        self, job_id: str, prompts: list[Any], sampling_params: dict[str, Any] | None, routing_key: str | None
    ) -> str:
        self._called("generate", job_id, prompts)
        return self._request("generate", {"results": [{"text": "a completion"} for _ in prompts]})

    async def list_checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        return self.checkpoints

    async def get_capacity(self, hardware: str | None = None) -> dict[str, Any]:
        self._called("capacity", hardware)
        return self.capacities.pop(0) if len(self.capacities) > 1 else self.capacities[0]

    async def get_request_status(
        self, job_id: str, request_id: str, *, max_events: int | None = None
    ) -> dict[str, Any]:
        self._called("status", request_id)
        if is_terminal_job(self.jobs.get(job_id, {}).get("status")):
            raise ConflictError(status=409, message="the job has ended")
        if request_id not in self.results:
            raise NotFoundError(status=404, message="no such request")
        return {"status": "failed" if isinstance(self.results[request_id], Exception) else "done"}

    async def poll_request(self, job_id: str, request_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        self._called("poll", request_id)
        self._refuse_if_ended(job_id)
        if request_id not in self.results:
            raise NotFoundError(status=404, message="no such request")
        result = self.results[request_id]
        if isinstance(result, Exception):
            raise result
        return result

    def fail_request(self, job_id: str, request_id: str) -> None:
        self.results[request_id] = RequestFailed(job_id=job_id, request_id=request_id, state="failed", error="boom")

    def _refuse_if_ended(self, job_id: str) -> None:
        state = self.jobs.get(job_id, {}).get("status")
        if is_terminal_job(state):
            raise JobFailed(job_id=job_id, state=str(state), reason="the job has ended")

    def _request(self, verb: str, result: dict[str, Any]) -> str:
        request_id = f"r{next(self._ids)}"
        self.results[request_id] = result
        self._done(verb, request_id)
        return request_id

    def _called(self, verb: str, *facts: Any) -> None:
        self.calls.append((verb, *facts))
        self.before.get(verb, lambda *_: None)(*facts)

    def _done(self, verb: str, *facts: Any) -> None:
        self.after.get(verb, lambda *_: None)(*facts)
