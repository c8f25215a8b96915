"""A job around other tasks: created before them, cancelled after them, whatever happens in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup

from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor

if TYPE_CHECKING:
    from airflow.sdk import XComArg

    from cortex_training.config import SubJobConfig


@dataclass(frozen=True)
class JobGroup:
    """What `cortex_training_job` gives its block. `job_id` goes into the arguments of the tasks inside."""

    job_id: XComArg
    group: TaskGroup
    create: CortexTrainingCreateJobOperator
    wait: CortexTrainingWaitForRunningSensor
    cancel: CortexTrainingCancelJobOperator


@contextlib.contextmanager
def cortex_training_job(
    group_id: str = "cortex_training_job",
    *,
    sub_jobs: Sequence[SubJobConfig | Mapping[str, Any]],
    conn_id: str = CortexTrainingHook.default_conn_name,
    database: str | None = None,
    schema: str | None = None,
    endpoint: str | None = None,
    root: str | None = None,
    credentials: str | None = None,
    wait_timeout_s: float = 86_400.0,
    deferrable: bool | None = None,
    **create: Any,
) -> Iterator[JobGroup]:
    """A task group whose tasks have a running job.

    ::

        with cortex_training_job(sub_jobs=[...], idle_timeout_seconds=7200) as job:
            step = CortexTrainingStepOperator(task_id="step", job_id=job.job_id)

    Two setups, ``create_job`` and ``wait_until_running``, come before every task of the block, and a teardown,
    ``cancel_job``, after all of them: it runs when the tasks succeeded, failed, were skipped, or when the job was
    created and never ran. What comes after the group does not wait for the teardown, and does not fail with it.

    Args:
        group_id: of the task group.
        sub_jobs: as in `CortexTrainingCreateJobOperator`.
        conn_id, database, schema, endpoint: for all three tasks.
        root: root of a training run inside the block: its teardown cancels replacements of the job as well.
        credentials: for a root in a bucket, as the training plan has it.
        wait_timeout_s: how long to wait for the job to run, over retries.
        deferrable: wait in the triggerer; default is Airflow's ``[operators] default_deferrable``.
        **create: further arguments of `CortexTrainingCreateJobOperator`.
    """
    where: dict[str, Any] = {"conn_id": conn_id, "database": database, "schema": schema, "endpoint": endpoint}
    with TaskGroup(group_id=group_id) as group:
        # Two tasks, because a teardown runs when at least one of its setups succeeded: a job that was created and
        # waited for in vain must be cancelled, and a setup that does both would have failed as a whole.
        creating = CortexTrainingCreateJobOperator(task_id="create_job", sub_jobs=sub_jobs, **where, **create)
        # An argument like any other: Airflow puts the id in its place before the task runs.
        job_id: Any = creating.job_id_output
        waiting = CortexTrainingWaitForRunningSensor(
            task_id="wait_until_running",
            job_id=job_id,
            timeout=wait_timeout_s,
            deferrable=deferrable,
            **where,
        )
        cancelling = CortexTrainingCancelJobOperator(
            task_id="cancel_job", job_id=job_id, root=root, credentials=credentials, **where
        )
        creating.as_setup() >> waiting.as_setup()
        cancelling.as_teardown(setups=[creating, waiting])
        yield JobGroup(job_id, group, creating, waiting, cancelling)
        _put_between(waiting, group, cancelling, own={creating.task_id, waiting.task_id, cancelling.task_id})


def _put_between(first: Any, group: TaskGroup, last: Any, own: set[str]) -> None:
    """Set every task of the block after `first` and before `last`.

    Not by ``with teardown:``: of several setups that one lets the first tasks of a block wait for any one.
    """
    block = {task.task_id: task for task in group.iter_tasks() if task.task_id not in own}
    for task in block.values():
        if not task.upstream_task_ids & block.keys():
            task.set_upstream(first)
        if not task.downstream_task_ids & block.keys():
            task.set_downstream(last)
