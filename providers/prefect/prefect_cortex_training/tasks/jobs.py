"""Jobs: create one, wait for it, end it."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from cortex_training.answers import Job
from cortex_training.errors import ConfigurationError
from cortex_training.states import job_state
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.durable import task_pair
from prefect_cortex_training.gpu_lease import hold_gpus, release_gpus
from prefect_cortex_training.jobs import cancel_if_alive, find_or_create, once_known
from prefect_cortex_training.labels import RunLabels, is_finished, jobs_in

DAY_S = 86_400.0


async def _create_job(
    credentials: str,
    sub_jobs: list[dict[str, Any]],
    *,
    name: str = "training",
    experiment_name: str | None = None,
    hardware: str | None = None,
    idle_timeout_seconds: int | None = None,
    pending_timeout_seconds: int | None = None,
    gpu_limit: str | None = None,
) -> str:
    """Create a job, or find the one that this flow run created before; returns its id.

    The id is written into the flow run's labels before the job is created. A rerun therefore finds the job and asks
    the service: one that is alive is used again, one that ended without having finished its work is replaced under the
    next generation, and one that was never created is created now. A flow run that comes back from a suspension is no
    rerun: it gets the job that it suspended with, also one that ended since, and the wait for that raises JobFailed.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        sub_jobs: wire bodies of the sub-jobs, e.g. ``[SubJobConfig.training_job(...).to_wire()]``.
        name: tells several jobs of one flow run apart.
        experiment_name, hardware, idle_timeout_seconds, pending_timeout_seconds: as the service has them.
        gpu_limit: name of a global concurrency limit of the Prefect server, whose slots are GPUs. The job is created
            once it has as many free as the sub-jobs use. They are the flow run's until its jobs are cancelled, also
            while it is suspended; a flow run that crashes loses them after five minutes.
    """
    labels = RunLabels.of_current_run("create_job")
    if gpu_limit is not None:
        await _hold_gpus(labels, name, gpu_limit, sub_jobs)
    options = {
        "experiment_name": experiment_name,
        "hardware": hardware,
        "idle_timeout_seconds": idle_timeout_seconds,
        "pending_timeout_seconds": pending_timeout_seconds,
    }
    body = {"sub_job_configs": sub_jobs, **{key: value for key, value in options.items() if value is not None}}
    async with connected(credentials) as client:
        return await find_or_create(client, labels, name, body, owner=credentials, logger=get_run_logger())


async def _hold_gpus(labels: RunLabels, name: str, gpu_limit: str, sub_jobs: list[dict[str, Any]]) -> None:
    from cortex_training.training.plan import gpus_of

    # A job whose work is finished is only looked up.
    if not any(job.name == name and job.finished for job in jobs_in(await labels.read())):
        await hold_gpus(labels, name, gpu_limit, gpus_of(sub_jobs), get_run_logger())


async def _wait_until_running(credentials: str, job_id: str, *, timeout_s: float = DAY_S) -> str:
    """Wait in this process until a job runs; returns its id.

    `timeout_s` counts from the first wait of the flow run for this job, not from each retry. A rerun whose work on the
    job is finished waits for nothing. Raises JobFailed with the service's reason when the job ends instead,
    DeadlineExceeded when the time is over.
    """
    if timeout_s <= 0:
        raise ConfigurationError.of("timeout_s", timeout_s, "give seconds above 0")
    logger = get_run_logger()
    labels = RunLabels.of_current_run("wait_until_running")
    if is_finished(await labels.read(), job_id):
        return job_id
    since = float(await labels.remember(f"waiting_since.{job_id}", time.time()))
    seen: list[str] = []

    def report(job: Job) -> None:
        state = job_state(job.get("status"))
        if seen[-1:] != [state]:
            seen.append(state)
            logger.info("job %s is %s", job_id, state)

    async with connected(credentials) as client:

        def look() -> Awaitable[Job]:
            # A moment is left even to a wait that is over: the job may be running by now.
            return client.wait_for_job(job_id, timeout_s=max(since + timeout_s - time.time(), 1.0), progress=report)

        await once_known(look, since)
    return job_id


async def _cancel_job(credentials: str, job_id: str) -> str:
    """Cancel a job and give its GPUs back; returns its id. A job that has ended, or that nobody knows, is left as it
    is.
    """
    async with connected(credentials) as client:
        await cancel_if_alive(client, job_id)
    if flow_run.id:
        labels = RunLabels.of_current_run("cancel_job")
        for job in jobs_in(await labels.read()):
            if job.job_id == job_id:
                await release_gpus(labels, job.name)
    get_run_logger().info("job %s is cancelled", job_id)
    return job_id


create_job, acreate_job = task_pair("create_job", retries=2, cached=False)(_create_job)
wait_until_running, await_until_running = task_pair("wait_until_running", retries=2)(_wait_until_running)
cancel_job, acancel_job = task_pair("cancel_job", retries=2)(_cancel_job)
