"""Router replay of mixture-of-experts models, and the prefix cache: upkeep of a job's sampling side.

Each call may be repeated without harm, ends soon, and is waited for on the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.links import CortexTrainingJobLink, job_url, note
from airflow_cortex_training.operators.base import CortexTrainingOperator, require_text, with_fields
from cortex_training.config import JobType, canonical_job_type
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.client import CortexTrainingClient


class CortexTrainingBootstrapRouterReplayOperator(CortexTrainingOperator):
    """Connect a sampling sub-job, whose expert routing is recorded, to the training sub-job that replays it.

    Args:
        job_id: a running job with a training and a sampling sub-job.
        source_sub_job_id: default the job's first sampling sub-job.
        target_sub_job_id: default the job's training sub-job.
        max_cache_bytes: how much routing is kept; default the service's.

    Returns (XCom): ``job_id``, ``source_sub_job_id``, ``target_sub_job_id``.
    """

    template_fields = (
        *CortexTrainingOperator.template_fields,
        "job_id",
        "source_sub_job_id",
        "target_sub_job_id",
        "max_cache_bytes",
    )
    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(
        self,
        *,
        job_id: str,
        source_sub_job_id: str | None = None,
        target_sub_job_id: str | None = None,
        max_cache_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.job_id = job_id
        self.source_sub_job_id = source_sub_job_id
        self.target_sub_job_id = target_sub_job_id
        self.max_cache_bytes = max_cache_bytes

    def execute(self, context: Context) -> dict[str, Any]:
        with clear_failures(names=lambda: {"job": str(self.job_id)}):
            job_id = require_text(self, "job_id", self.job_id)
            with self.hook.get_conn() as client:
                note(self, CortexTrainingJobLink, job_url(client, job_id))
                source, target = self._ends(client, job_id)
                client.bootstrap_router_replay(
                    job_id,
                    source,
                    target,
                    max_cache_bytes=None if self.max_cache_bytes is None else int(self.max_cache_bytes),
                    # The target receives the call.
                    sub_job_id=target,
                )
        return {"job_id": job_id, "source_sub_job_id": source, "target_sub_job_id": target}

    def _ends(self, client: CortexTrainingClient, job_id: str) -> tuple[str, str]:
        if self.source_sub_job_id and self.target_sub_job_id:
            return self.source_sub_job_id, self.target_sub_job_id
        sub_jobs = client.get_job(job_id).get("sub_jobs") or []
        source = self.source_sub_job_id or _first(sub_jobs, JobType.SAMPLING)
        target = self.target_sub_job_id or _first(sub_jobs, JobType.TRAINING)
        if not source or not target:
            raise ConfigurationError.of(
                f"task {self.task_id}: job_id", job_id, "router replay needs a training and a sampling sub-job"
            )
        return source, target


class CortexTrainingDiscardRouterReplayOperator(CortexTrainingOperator):
    """Forget the recorded routing of samples that will not be trained on.

    Args:
        job_id: a running job with a sampling sub-job.
        sample_ids: the samples, as they were named when they were generated.
        sub_job_id: default the job's first sampling sub-job.

    Returns (XCom): ``job_id``, ``samples`` (how many were named).
    """

    template_fields = (*CortexTrainingOperator.template_fields, "job_id", "sample_ids", "sub_job_id")
    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(self, *, job_id: str, sample_ids: Sequence[str], sub_job_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**with_fields(kwargs))
        self.job_id = job_id
        self.sample_ids = sample_ids
        self.sub_job_id = sub_job_id

    def execute(self, context: Context) -> dict[str, Any]:
        with clear_failures(names=lambda: {"job": str(self.job_id)}):
            job_id = require_text(self, "job_id", self.job_id)
            if isinstance(self.sample_ids, str) or not all(isinstance(one, str) for one in self.sample_ids):
                raise ConfigurationError.of(
                    f"task {self.task_id}: sample_ids", self.sample_ids, "give a list of sample ids"
                )
            sample_ids = list(self.sample_ids)
            with self.hook.get_conn() as client:
                note(self, CortexTrainingJobLink, job_url(client, job_id))
                if sample_ids:
                    client.router_replay_discard(job_id, sample_ids, sub_job_id=self.sub_job_id)
        return {"job_id": job_id, "samples": len(sample_ids)}


class CortexTrainingResetPrefixCacheOperator(CortexTrainingOperator):
    """Empty the prefix cache of a sampling sub-job, e.g. after its weights changed.

    Args:
        job_id: a running job with a sampling sub-job.
        sub_job_id: default the job's first sampling sub-job.
        drain: wait for what is being generated first.
        drain_timeout_s: how long the service may wait for that, seconds.

    Returns (XCom): ``job_id``.
    """

    template_fields = (*CortexTrainingOperator.template_fields, "job_id", "sub_job_id")
    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(
        self,
        *,
        job_id: str,
        sub_job_id: str | None = None,
        drain: bool = True,
        drain_timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.job_id = job_id
        self.sub_job_id = sub_job_id
        self.drain = drain
        self.drain_timeout_s = drain_timeout_s

    def execute(self, context: Context) -> dict[str, Any]:
        with clear_failures(names=lambda: {"job": str(self.job_id)}):
            job_id = require_text(self, "job_id", self.job_id)
            with self.hook.get_conn() as client:
                note(self, CortexTrainingJobLink, job_url(client, job_id))
                client.reset_prefix_cache(
                    job_id, sub_job_id=self.sub_job_id, drain=self.drain, timeout_s=float(self.drain_timeout_s)
                )
        return {"job_id": job_id}


def _first(sub_jobs: Sequence[Mapping[str, Any]], kind: JobType) -> str | None:
    return next((str(s["sub_job_id"]) for s in sub_jobs if canonical_job_type(s.get("job_type")) == kind), None)
