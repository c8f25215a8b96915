"""What the status page shows: jobs, their newest requests and losses, and who uses the GPUs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from cortex_training.local.capacity import HARDWARE
from cortex_training.local.jobs import Job
from cortex_training.local.service import Service

_JOBS, _REQUESTS, _POINTS = 100, 50, 400
_EVERY_S, _KEPT = 2.0, 300


class Status:
    """Facts for the page, as plain JSON values. Used by the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = time.time()
        self._gpus: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    async def watch(self) -> None:
        """Note the use of GPUs every two seconds, for ten minutes back."""
        while True:
            use = {hardware: self._service.capacity_report(hardware)["in_use_gpus"] for hardware in HARDWARE}
            self._gpus.append({"at": time.time(), **use})
            await asyncio.sleep(_EVERY_S)

    def overview(self, selected: str | None) -> dict[str, Any]:
        """Everything the page draws at once. `selected` is the id of the job to show in full; any other id: none."""
        jobs = list(self._service.jobs.values())
        chosen = self._service.jobs.get(selected) if selected else None
        return {
            "now": time.time(),
            "began": self._began,
            "endpoint": self._service.settings.endpoint,
            "gpus": {hardware: self._service.capacity_report(hardware) for hardware in HARDWARE},
            "gpu_history": list(self._gpus),
            "jobs_in_all": len(jobs),
            "jobs": [self._row(job) for job in reversed(jobs[-_JOBS:])],
            "job": None if chosen is None else self._in_full(chosen),
        }

    def _row(self, job: Job) -> dict[str, Any]:
        return {
            "job_id": job.job_id,
            "place": f"{job.database}.{job.schema}",
            "status": str(job.state),
            "reason": job.reason,
            "created_at": job.created_at,
            "updated_at": job.updated_at,
            "hardware": job.spec.hardware,
            "gpus": job.spec.n_gpus,
            "gpu_seconds": round(job.gpu_seconds, 1),
            "in_flight": job.in_flight,
            "experiment_name": job.spec.experiment_name or "",
            "sub_jobs": [
                {"sub_job_id": one.sub_job_id, "job_type": one.spec.kind, "model_name": one.spec.model_name}
                for one in job.sub_jobs
            ],
        }

    def _in_full(self, job: Job) -> dict[str, Any]:
        losses = self._service.requests.losses(job.job_id)
        saved = self._service.checkpoints.of_job(job.job_id)
        return {
            **self._row(job),
            "losses": thinned(losses, _POINTS),
            "forward_backwards": len(losses),
            "requests": self._service.requests.newest(job.job_id, _REQUESTS),
            "checkpoints": [checkpoint.summary() for checkpoint in reversed(saved[-_REQUESTS:])],
        }


def thinned(values: Sequence[float | None], most: int) -> list[tuple[int, float]]:
    """(number counted from 1, value) of at most `most` values: means of neighbours when there are more.

    None, a loss that was no number, is left out.
    """
    width = max(1, -(-len(values) // most))
    points = []
    for first in range(0, len(values), width):
        known = [value for value in values[first : first + width] if value is not None]
        if known:
            points.append((first + 1 + (width - 1) // 2, sum(known) / len(known)))
    return points
