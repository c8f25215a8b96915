"""Router replay of mixture-of-experts models, and the prefix cache: upkeep of a job's sampling side.

The service answers each of these calls at once, or after its own drain, with the result; where it gives a request
instead, that is waited for like any other. Each may be repeated without harm, so a retry or a clear sends it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.operators.request_leg import CortexTrainingRequestOperator
from cortex_training.config import JobType, canonical_job_type
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.client import CortexTrainingClient


class CortexTrainingBootstrapRouterReplayOperator(CortexTrainingRequestOperator):
    """Connect a sampling sub-job, whose expert routing is recorded, to the training sub-job that replays it.

    Args:
        job_id: a running job with a training and a sampling sub-job.
        source_sub_job_id: default the job's first sampling sub-job.
        target_sub_job_id: default the job's training sub-job.
        max_cache_bytes: how much routing is kept; default the service's.

    Returns (XCom): ``job_id``, ``source_sub_job_id``, ``target_sub_job_id``.
    """

    template_fields = (
        *CortexTrainingRequestOperator.template_fields,
        "source_sub_job_id",
        "target_sub_job_id",
        "max_cache_bytes",
    )
    operation = "bootstrap-router-replay"

    def __init__(
        self,
        *,
        source_sub_job_id: str | None = None,
        target_sub_job_id: str | None = None,
        max_cache_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source_sub_job_id = source_sub_job_id
        self.target_sub_job_id = target_sub_job_id
        self.max_cache_bytes = max_cache_bytes

    def intent(self, client: CortexTrainingClient, record: DurableRecord) -> dict[str, Any]:
        source, target = self.source_sub_job_id, self.target_sub_job_id
        if not (source and target):
            sub_jobs = client.get_job(self.job_id).get("sub_jobs") or []
            source = source or _first(sub_jobs, JobType.SAMPLING)
            target = target or _first(sub_jobs, JobType.TRAINING)
        if not source or not target:
            raise ConfigurationError.of(
                f"task {self.task_id}: job_id", self.job_id, "router replay needs a training and a sampling sub-job"
            )
        return {"source_sub_job_id": source, "target_sub_job_id": target}

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str | dict[str, Any]:
        target = intent["target_sub_job_id"]
        reply = client.bootstrap_router_replay(
            self.job_id,
            intent["source_sub_job_id"],
            target,
            max_cache_bytes=None if self.max_cache_bytes is None else int(self.max_cache_bytes),
            # The target receives the call.
            sub_job_id=target,
        )
        return _request_or_result(reply)

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        sent = DurableRecord(context).current or {}
        return {"job_id": self.job_id, **{name: sent.get(name) for name in ("source_sub_job_id", "target_sub_job_id")}}


class CortexTrainingDiscardRouterReplayOperator(CortexTrainingRequestOperator):
    """Forget the recorded routing of samples that will not be trained on.

    Args:
        job_id: a running job with a sampling sub-job.
        sample_ids: the samples, as they were named when they were generated. Nothing is sent for an empty list.
        sub_job_id: default the job's first sampling sub-job.

    Returns (XCom): ``job_id``, ``samples`` (how many were named).
    """

    template_fields = (*CortexTrainingRequestOperator.template_fields, "sample_ids", "sub_job_id")
    operation = "router-replay-discard"

    def __init__(self, *, sample_ids: Sequence[str], sub_job_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sample_ids = sample_ids
        self.sub_job_id = sub_job_id

    def check(self) -> None:
        if isinstance(self.sample_ids, str) or not all(isinstance(one, str) for one in self.sample_ids):
            raise ConfigurationError.of(
                f"task {self.task_id}: sample_ids", self.sample_ids, "give a list of sample ids"
            )

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str | dict[str, Any]:
        if not self.sample_ids:
            return {}
        return _request_or_result(
            client.router_replay_discard(self.job_id, list(self.sample_ids), sub_job_id=self.sub_job_id)
        )

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        return {"job_id": self.job_id, "samples": len(self.sample_ids)}


class CortexTrainingResetPrefixCacheOperator(CortexTrainingRequestOperator):
    """Empty the prefix cache of a sampling sub-job, e.g. after its weights changed.

    Args:
        job_id: a running job with a sampling sub-job.
        sub_job_id: default the job's first sampling sub-job.
        drain: wait for what is being generated first. The service holds its answer back meanwhile, so the worker
            waits with it: keep `drain_timeout_s` short.
        drain_timeout_s: how long the service may wait for that, seconds.

    Returns (XCom): ``job_id``.
    """

    template_fields = (*CortexTrainingRequestOperator.template_fields, "sub_job_id")
    operation = "reset-prefix-cache"

    def __init__(
        self, *, sub_job_id: str | None = None, drain: bool = True, drain_timeout_s: float = 60.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.sub_job_id = sub_job_id
        self.drain = drain
        self.drain_timeout_s = drain_timeout_s

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str | dict[str, Any]:
        return _request_or_result(
            client.reset_prefix_cache(
                self.job_id, sub_job_id=self.sub_job_id, drain=self.drain, timeout_s=float(self.drain_timeout_s)
            )
        )

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        return {"job_id": self.job_id}


def _request_or_result(reply: Mapping[str, Any]) -> str | dict[str, Any]:
    """The id of the request that a deployment makes of the call, or else the reply, which is the result."""
    request_id = reply.get("request_id")
    return request_id if isinstance(request_id, str) and request_id else dict(reply)


def _first(sub_jobs: Sequence[Mapping[str, Any]], kind: JobType) -> str | None:
    return next((str(s["sub_job_id"]) for s in sub_jobs if canonical_job_type(s.get("job_type")) == kind), None)
