"""Which jobs of a deployment nobody owns any more. Whoever cancels them first asks here, so that the rules are one."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cortex_training.answers import ExperimentRun, Job, created_at
from cortex_training.errors import ApiError
from cortex_training.states import is_terminal_job, job_state

DAY_S = 24 * 3600.0


class ListingClient(Protocol):
    """The two calls that are needed of a client."""

    def list_jobs(self) -> list[Job]: ...
    def get_experiment_run(self, job_id: str) -> ExperimentRun: ...


@dataclass(frozen=True)
class SweepRule:
    """What makes a job one to be cancelled: old enough, and nobody's.

    `older_than_s` seconds since its creation; `user` submitted it, None: anybody; its experiment's name begins with one
    of `experiments`, none given: any name; `owned` are ids that somebody goes on with. Names are compared without
    regard to case and to the database and schema before them: the service writes them as Snowflake writes identifiers.
    """

    older_than_s: float = DAY_S
    user: str | None = None
    experiments: Sequence[str] = ()
    owned: frozenset[str] = field(default_factory=frozenset)

    def jobs(self, client: ListingClient) -> list[Job]:
        """The jobs that the rule is about, as the service lists them. Raises what the client raises."""
        found = [job for job in client.list_jobs() if self._is_old_and_ownerless(job)]
        if not self.experiments:
            return found
        prefixes = tuple(prefix.casefold() for prefix in self.experiments)
        return [job for job in found if _experiment(client, job["job_id"]).startswith(prefixes)]

    def _is_old_and_ownerless(self, job: Job) -> bool:
        state = job_state(job.get("status"))
        if is_terminal_job(state) or state == "cancelling" or not job.get("job_id") or job["job_id"] in self.owned:
            return False
        if self.user and str(job.get("submitted_by", "")).lower() != self.user.lower():
            return False
        age_s = _age_s(job)
        # A job whose age is not known may be a minute old and somebody's.
        return age_s is not None and age_s >= self.older_than_s


def owned_jobs(roots: Iterable[str], credentials: str | None = None) -> frozenset[str]:
    """Jobs that the runs in `roots` go on with; those of a run that has done all it was asked for are nobody's.

    `credentials` is for roots in a bucket. Raises RootError for a root that is not there: its run may well have jobs.
    """
    from cortex_training.training.teardown import status

    owned: set[str] = set()
    for root in roots:
        state = status(root, credentials).state
        if state.current is not None and not state.current.complete:
            owned.update(set(state.job_ids) - state.cancelled)
    return frozenset(owned)


def _age_s(job: Job) -> float | None:
    created = created_at(job)
    return None if created is None else (datetime.datetime.now(datetime.UTC) - created).total_seconds()


def _experiment(client: ListingClient, job_id: str) -> str:
    """The name of a job's experiment without its database and schema, in lower case; "" when there is none."""
    try:
        name = str(client.get_experiment_run(job_id).get("experiment_name") or "")
    except ApiError:
        return ""
    return name.rpartition(".")[2].casefold()
