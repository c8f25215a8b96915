"""Router replay of mixture-of-experts models, and the prefix cache: upkeep of a job's sampling side.

The service answers each of these calls at once, or after its own drain, with the result; where it gives a request
instead, that is waited for like any other. Each may be repeated without harm, so a retry or a clear sends it again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.operators.base import BACKSTOP_S, DEFER_GRACE_S
from airflow_cortex_training.operators.request_leg import CortexTrainingRequestOperator
from airflow_cortex_training.triggers.drains import CortexTrainingDrainTrigger
from airflow_cortex_training.triggers.events import Status, is_of_another_wait
from cortex_training.config import JobType, canonical_job_type
from cortex_training.errors import ConfigurationError, ConflictError, DeadlineExceeded, JobFailed
from cortex_training.states import is_terminal_job, job_state

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
        drain: wait for what is being generated first; in the triggerer when the task is deferrable and it takes longer
            than `inline_s`.
        drain_timeout_s: how long to wait for that, seconds; ``execution_timeout`` shortens it.

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

    def check(self) -> None:
        try:
            self.drain_timeout_s = float(self.drain_timeout_s)
        except (TypeError, ValueError):
            raise ConfigurationError.of(
                f"task {self.task_id}: drain_timeout_s", self.drain_timeout_s, "give a number of seconds"
            ) from None

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str | dict[str, Any]:
        limit_s = self.time_limit_s(self.drain_timeout_s)
        wait_s = min(self.inline_s, limit_s) if self.drain and self.deferrable else limit_s
        try:
            reply = client.reset_prefix_cache(
                self.job_id, sub_job_id=self.sub_job_id, drain=self.drain, timeout_s=wait_s
            )
        except ConflictError:
            job = client.get_job(self.job_id)
            if is_terminal_job(job.get("status")):
                raise _job_ended(self.job_id, job) from None
            if not self.drain:
                raise
            if wait_s >= limit_s:
                raise self._still_sampling() from None
            self._defer_drain(limit_s - wait_s)
        return _request_or_result(reply)

    def _defer_drain(self, left_s: float) -> NoReturn:
        now = time.time()
        self.defer(
            trigger=CortexTrainingDrainTrigger(
                target=self.target.to_kwargs(),
                job_id=self.job_id,
                sub_job_id=self.sub_job_id,
                started=now,
                not_before=now + DEFER_GRACE_S,
                deadline=now + left_s,
            ),
            method_name="drained",
            kwargs={"job_id": self.job_id},
            timeout=timedelta(seconds=left_s + BACKSTOP_S),
        )

    def drained(self, context: Context, event: dict[str, Any] | None = None, job_id: str | None = None) -> Any:
        """The worker leg after the drain. An event about another job is no word about this one."""
        event = event or {}
        self.job_id = job_id or event.get("job_id") or self.job_id
        request_id, status = event.get("request_id"), event.get("status", Status.SETTLED)
        if is_of_another_wait(event, job_id=self.job_id):
            self.log.warning("draining again: %s is about another job than %s", event, self.job_id)
            return self.execute(context)
        if request_id:
            # The deployment made a request of the call: that is what is waited for now.
            DurableRecord(context).update(request_id=request_id, started=time.time())
            return self.execute(context)
        if status == Status.SETTLED:
            return {"job_id": self.job_id}
        if status == Status.TIMEOUT:
            raise self._still_sampling()
        error = str(event.get("error") or "")
        if status == Status.ENDED:
            raise AirflowFailException(str(_job_ended(self.job_id, {"status": event.get("state"), "reason": error})))
        raise AirflowFailException(f"{self.operation} of job {self.job_id}: {error or 'the wait ended'}")

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        return {"job_id": self.job_id}

    def _still_sampling(self) -> DeadlineExceeded:
        limit_s = self.time_limit_s(self.drain_timeout_s)
        return DeadlineExceeded(
            f"{self.operation} of job {self.job_id}: it was still sampling after {limit_s:g} s, and its cache is as it "
            "was; a retry waits again, drain=False does not wait",
            timeout_s=limit_s,
        )


def _job_ended(job_id: str, job: Mapping[str, Any]) -> JobFailed:
    return JobFailed(job_id=job_id, state=str(job_state(job.get("status"))), reason=str(job.get("reason") or ""))


def _request_or_result(reply: Mapping[str, Any]) -> str | dict[str, Any]:
    """The id of the request that a deployment makes of the call, or else the reply, which is the result."""
    request_id = reply.get("request_id")
    return request_id if isinstance(request_id, str) and request_id else dict(reply)


def _first(sub_jobs: Sequence[Mapping[str, Any]], kind: JobType) -> str | None:
    return next((str(s["sub_job_id"]) for s in sub_jobs if canonical_job_type(s.get("job_type")) == kind), None)
