"""Bad weather for jobs: workers that restart, jobs that fail, capacity and credentials that go."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from dataclasses import dataclass

from cortex_training.local.assumptions import Assumptions
from cortex_training.local.credentials import SESSION_EXPIRED, session_token
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.lifecycle import LifeCycle
from cortex_training.local.refusals import Refusal
from cortex_training.local.requests import Execution
from cortex_training.local.sessions import Sessions
from cortex_training.local.weather import Active, Meeting, Weather
from cortex_training.local.weather_rules import ONCE_EXECUTED, Act, RuleError, what_is_lost
from cortex_training.states import JobState

_log = logging.getLogger("cortex_training.local")
_MOST_TOKENS = 10_000


@dataclass
class Fate:
    """What the weather has in store for one execution."""

    seconds: float = 0.0
    fails_before: str | None = None
    fails_after: str | None = None

    def before(self) -> None:
        """In the sub-job's thread, before the work. Raises ValueError when the request is to fail unexecuted."""
        if self.seconds:
            time.sleep(self.seconds)
        if self.fails_before is not None:
            raise ValueError(self.fails_before)


@dataclass
class _Expired:
    """A token that is refused from now on."""

    code: str
    left: float
    """How many more requests are refused."""


class Tokens:
    """Digests of the tokens that requests came with, and which of them are refused.

    With `sessions`, their tokens can expire for the connector too.
    """

    def __init__(self, sessions: Sessions | None = None) -> None:
        self._sessions = sessions
        self._seen: dict[str, None] = {}
        self._expired: dict[str, _Expired] = {}

    def check(self, authorization: str) -> None:
        """Raises Refusal (401) when the token has expired."""
        digest = _digest(authorization)
        self._seen[digest] = None
        if len(self._seen) > _MOST_TOKENS:
            self._seen.pop(next(iter(self._seen)))
        expired = self._expired.get(digest)
        if expired is None:
            return
        expired.left -= 1
        if expired.left <= 0:
            del self._expired[digest]
        raise Refusal(401, "the token has expired; log in again", code=expired.code)

    def expire(self, authorization: str | None, act: Act) -> None:
        """Refuse this token from now on, or every token that was ever presented."""
        left = act["requests"] or math.inf
        for digest in [_digest(authorization)] if authorization is not None else self._seen:
            self._expired[digest] = _Expired(act["code"], left)
        if self._sessions is not None and act["code"] == SESSION_EXPIRED and left == math.inf:
            self._sessions.expire(None if authorization is None else session_token(authorization))


@dataclass
class JobWeather:
    """Makes the weather happen to jobs. Used by the event loop."""

    weather: Weather
    lifecycle: LifeCycle
    assumptions: Assumptions
    tokens: Tokens

    def fate_of(self, execution: Execution) -> Fate:
        """Called for each operation that is put into a queue."""
        fate = Fate()
        for active in self.weather.submitted(Meeting((execution.operation,), job_id=execution.job_id)):
            if active.rule.act.action == "slow-operation":
                fate.seconds += active.seconds()
            elif active.rule.when == ONCE_EXECUTED:
                fate.fails_after = active.rule.act["error"]
            else:
                fate.fails_before = active.rule.act["error"]
        return fate

    def executed(self, job: Job, execution: Execution, global_steps: int | None) -> None:
        """Called for each operation that was executed, before anyone can see that it was."""
        meeting = Meeting((execution.operation,), job_id=job.job_id, global_steps=global_steps)
        for active in self.weather.executed(meeting):
            self.happen(active, job)

    def happen(self, active: Active, job: Job | None, authorization: str | None = None) -> None:
        """Let a rule that fired take effect. What cannot happen to this job is said in the log."""
        try:
            self.apply(active.rule.act, job, authorization)
        except RuleError as error:
            _log.warning("rule %s could not happen: %s", active.rule.name, error)

    def apply(self, act: Act, job: Job | None, authorization: str | None = None) -> None:
        """Let it happen. Raises RuleError when it needs a job and there is none, or names no sub-job of it."""
        if act.action == "set-capacity":
            self.lifecycle.set_capacity(act["gpus"], act["hardware"], evict=act["evict"])
            return
        if act.action == "expire-token":
            self.tokens.expire(authorization, act)
            return
        if job is None:
            raise RuleError(f"job_id: {act.action} happens to a job; name one that exists")
        match act.action:
            case "restart-worker":
                self._restart(job, act)
            case "forget-groups":
                for sub_job in _chosen(job, act):
                    sub_job.chunk_groups.lose(act["groups"])
            case "fail-job":
                if not job.has_ended():
                    self.lifecycle.fail(job, JobState(act["state"]), act["reason"])
            case "slow-cancel":
                job.slow_cancel_s = act["seconds"]

    def _restart(self, job: Job, act: Act) -> None:
        lost = what_is_lost(act["loses"] or self.assumptions.worker_restart)
        chosen = _chosen(job, act)
        for sub_job in chosen:
            if "groups" in lost:
                sub_job.chunk_groups.lose("all")
            if "gradients" in lost and sub_job.spec.kind == "training" and sub_job.engine is not None:
                # Its thread may be using them: they are gone before whatever it does next.
                sub_job.before_next.append(sub_job.engine.lose_gradients)
            sub_job.restarting_until = time.monotonic() + act["seconds"]
            sub_job.log.add("the worker restarted", level="WARNING")
        if act["requests"] == "failed":
            names = {sub_job.sub_job_id for sub_job in chosen}
            for request in job.requests.values():
                execution = request.execution
                if execution.sub_job_id in names and not execution.is_over:
                    execution.failure = "the worker restarted while the request waited or ran"
                    execution.drop_from_queue()


def _chosen(job: Job, act: Act) -> list[SubJob]:
    """The sub-jobs that an act names by id or kind; all without a name. Raises RuleError when there is none."""
    wanted = act["sub_job"]
    chosen = [one for one in job.sub_jobs if wanted in (None, one.sub_job_id, one.spec.kind)]
    if not chosen:
        raise RuleError(f"sub_job: {wanted!r} is no sub-job and no kind of sub-job of job {job.job_id}")
    return chosen


def _digest(authorization: str) -> str:
    return hashlib.sha256(authorization.encode(errors="surrogatepass")).hexdigest()
