"""What a flow run wrote down before it did it.

A flow run's labels live on the Prefect server. They outlast the process, the machine and its stored results, and they
can be read by whoever cleans up after a run that is no longer running. So every name that must survive a crash is put
there first: the id of a job before it is created, the intent of an optimizer step before it is sent.

    job.<name>.<generation>.<job id>   a job; the value is the credentials block that can cancel it
    finished.<job id>                  the flow run needed nothing more of this job
    waiting_since.<job id>.<claim>     when waiting for the job began, UTC epoch seconds
    ran.<job id>                       the job ran when it was waited for
    awaited.<job id>.<request id>      numbers and ids of the result of a request that was awaited, as JSON
    <verb>.<job id>.<seq>              an operation: the id of its request
    result.<verb>.<digest>             what a task on a job, or `resolve`, gave, as JSON; the digest is of its
                                       arguments
    forward_backward.<job id>.<step>.<micro-batch>.failed.<n>
                                       the service said that attempt n at this micro-batch failed
    step.<job id>.<seq>.<claim>        an optimizer step: "intent", "not sent", or the id of its request
    handover.<training>.<try>.<claim>  nonce of a plan that was left for a driver
    driver.<training>                  the driver that trains it, and when it last said so
    trained.<training>.<try>           how a training ended, as JSON
    reconciled.<try>                   the jobs of this ended flow run were cancelled, or had ended
    root.<digest>                      root of a training run, whose journal names further jobs
    root_owner.<digest>                credentials block that can cancel those
    root_places.<digest>               where the credentials of a root in a bucket are: kind:location,...
    epoch.<digest>.<claim>             epoch that the run's exports into a root are published under
    artifact.<key>                     id of an artifact that shows a training run
    asset.<job id>                     what the job was trained from, as the key of an asset
    part_of                            the flow run that this one is a subflow of, in whose process it runs
    subflow.<flow run id>              a subflow of this flow run that has labels of its own
    lease.<holder>.<claim>             slots of a GPU limit that are held for a job or a root: lease, number, limit; or
                                       "released"

each with ``cortex_training.`` in front. The server merges labels, so what must not be lost when one flow run is
executed by two processes at once has the writer's own name in its key: neither can overwrite the other, and both see
both.

Whoever has such labels also has the tag ``cortex-training``, because Prefect finds flow runs by tags and not by labels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run

from cortex_training.errors import ConfigurationError
from cortex_training.identity import new_token
from prefect_cortex_training.patience import waits_for_server

PREFIX = "cortex_training."
TAG = "cortex-training"
Label = str | int | float | bool
_PART_OF = "part_of"


@dataclass(frozen=True)
class JobLabel:
    """A job of a flow run: its id, the name and generation it was created under, the block that can reach it."""

    name: str
    generation: int
    job_id: str
    credentials: str | None
    finished: bool


@dataclass(frozen=True)
class RootLabel:
    """A training run that a flow run drove: its root, the block that can reach its jobs, and for a root in a bucket
    where the credentials of that are.
    """

    root: str
    credentials: str | None
    root_credentials: str | None = None


class RunLabels:
    """The labels of one flow run. Keys are given and returned without the package's prefix."""

    def __init__(self, flow_run_id: UUID | str) -> None:
        self.flow_run_id = UUID(str(flow_run_id))

    @classmethod
    def of_current_run(cls, wanted_for: str) -> RunLabels:
        """The labels of the flow run this is called in; raises ConfigurationError outside of one."""
        found = flow_run.id
        if not found:
            raise ConfigurationError(
                f"{wanted_for} was called outside a flow run: it writes down what it is about to do in the labels of "
                "the flow run first, so that a retry can find it. Call it in a function decorated with @flow"
            )
        return cls(found)

    @waits_for_server
    async def read(self) -> dict[str, Label]:
        """Every label that this package wrote."""
        async with get_client() as client:
            return labels_of(await client.read_flow_run(self.flow_run_id))

    @waits_for_server
    async def run_count(self) -> int:
        """Which try of the flow run this is. Coming back from a suspension is not another."""
        async with get_client() as client:
            return (await client.read_flow_run(self.flow_run_id)).run_count

    @waits_for_server
    async def back_from_suspension(self) -> bool:
        """Whether this try of the flow run was suspended: Prefect keeps the keys of its pauses until another begins."""
        async with get_client() as client:
            return bool((await client.read_flow_run(self.flow_run_id)).empirical_policy.pause_keys)

    @waits_for_server
    async def write(self, labels: Mapping[str, Label]) -> dict[str, Label]:
        """Add `labels`, replacing those of the same key; on return they are stored. Returns every label."""
        async with get_client() as client:
            for _ in range(3):
                await client.update_flow_run_labels(self.flow_run_id, {PREFIX + key: labels[key] for key in labels})
                run = await client.read_flow_run(self.flow_run_id)
                if TAG not in run.tags:
                    await client.update_flow_run(self.flow_run_id, tags=[*run.tags, TAG])
                stored = labels_of(run)
                # The server merges by reading and writing: another task's labels, written at the same moment, can undo
                # ours.
                if all(stored.get(key) == value for key, value in labels.items()):
                    return stored if _PART_OF in stored else await self._tell_flow_around(client, run)
        raise RuntimeError(
            f"labels {', '.join(sorted(labels))} of flow run {self.flow_run_id} were written three times and are not "
            "stored; another process writes the same labels. Is the same flow run executed twice?"
        )

    async def _tell_flow_around(self, client: PrefectClient, run: FlowRun) -> dict[str, Label]:
        """Note a subflow in the flow run around it: they die together, and only that one's end is seen by anybody.

        A run of a deployment is nobody's part, also when a flow started it: it has a process and an end of its own.
        """
        if run.parent_task_run_id is None or run.deployment_id is not None:
            return labels_of(run)
        around = (await client.read_task_run(run.parent_task_run_id)).flow_run_id
        assert around is not None, "a subflow's task belongs to the flow around it"
        await RunLabels(around).write({f"subflow.{run.id}": True})
        return await self.write({_PART_OF: str(around)})

    async def remember(self, key: str, value: Label) -> Label:
        """The value under `key`, which is `value` if nothing was written there yet. Values of one key are comparable.

        Two processes that find nothing at the same moment both claim, and from then on the smallest claim counts. The
        first to look may already have gone on with its own, so this is for values of which two do no harm.
        """
        claims = _claims(await self.read(), key)
        if not claims:
            claims = _claims(await self.write({f"{key}.{new_token()[:8]}": value}), key)
        smallest: Label = min(claims)
        return smallest


def labels_of(run: FlowRun) -> dict[str, Label]:
    """The labels of a flow run that this package wrote, without its prefix."""
    return {key.removeprefix(PREFIX): value for key, value in run.labels.items() if key.startswith(PREFIX)}


def _claims(labels: Mapping[str, Label], key: str) -> list[Any]:
    return [value for name, value in labels.items() if name.startswith(f"{key}.")]


_JOB_KEY = re.compile(r"job\.(?P<name>[^.]+)\.(?P<generation>[0-9]+)\.(?P<job_id>.+)")


def job_key(name: str, generation: int, job_id: str) -> str:
    return f"job.{name}.{generation}.{job_id}"


def finished_key(job_id: str) -> str:
    return f"finished.{job_id}"


def root_labels(root: str, credentials: str, root_credentials: str | None = None) -> dict[str, Label]:
    """The labels of a training run's root."""
    digest = root_digest(root)
    labels: dict[str, Label] = {f"root.{digest}": root, f"root_owner.{digest}": credentials}
    return labels if root_credentials is None else {**labels, f"root_places.{digest}": root_credentials}


def root_digest(root: str) -> str:
    """A short name for a root: label keys stay short and readable whatever the path."""
    return hashlib.sha256(root.encode()).hexdigest()[:12]


def jobs_in(labels: Mapping[str, Any]) -> list[JobLabel]:
    """Every job that the labels name, in order of name and generation.

    A label of another form is passed over: one flow run with a label that somebody else wrote must not keep a watcher
    from all the others.
    """
    found = []
    for key, value in labels.items():
        if named := _JOB_KEY.fullmatch(key):
            job_id = named["job_id"]
            finished = is_finished(labels, job_id)
            found.append(JobLabel(named["name"], int(named["generation"]), job_id, str(value) or None, finished))
    return sorted(found, key=lambda job: (job.name, job.generation, job.job_id))


def is_finished(labels: Mapping[str, Any], job_id: str) -> bool:
    """Whether an earlier try came to the end of its work on the job, which was cancelled for that reason alone."""
    return bool(labels.get(finished_key(job_id), False))


def roots_in(labels: Mapping[str, Any]) -> list[RootLabel]:
    """Every root of a training run that the labels name."""
    digests = sorted(key.removeprefix("root.") for key in labels if key.startswith("root."))
    return [
        RootLabel(str(labels[f"root.{d}"]), labels.get(f"root_owner.{d}"), labels.get(f"root_places.{d}"))
        for d in digests
    ]


def subflows_in(labels: Mapping[str, Any]) -> list[UUID]:
    """The flow runs that the labels name as subflows of theirs."""
    return [UUID(key.removeprefix("subflow.")) for key in sorted(labels) if key.startswith("subflow.")]
