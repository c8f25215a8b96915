"""Flows that the live tests deploy: each is about one way of waiting, or of ending."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from prefect import flow, suspend_flow_run, task
from prefect.cache_policies import INPUTS, RUN_ID
from prefect.deployments import run_deployment

from prefect_cortex_training import (
    aawait_remote,
    acreate_job,
    await_remote,
    cancel_remote_jobs,
    create_job,
    export,
    gpu_lease,
    jobs_cancelled_at_end,
    publish,
    save,
    submit_save,
    train,
    wait_for_capacity,
)

CORTEX = "cortex"

POLL_S = 5.0
"""Shorter than a flow's own, but no shorter than a look may take on a machine that has much to do."""

LONG_S = 3600.0
"""What no test takes."""

# The server's shortest lease, so that a test outlives it.
gpu_lease.LEASE_S, gpu_lease.RENEW_EVERY_S = 60.0, 15.0


@flow(persist_result=True, result_serializer="json")
def waits_for_the_queue(sub_jobs: list[dict[str, Any]], poll_s: float = POLL_S, timeout_s: float = LONG_S) -> str:
    """A job that has to queue, and a save that is waited for without a process too."""
    with jobs_cancelled_at_end():
        job_id = create_job(CORTEX, sub_jobs)
        await_remote(CORTEX, job_id, poll_s=poll_s, timeout_s=timeout_s)
        request_id = submit_save(CORTEX, job_id)
        await_remote(CORTEX, job_id, request_id, poll_s=poll_s)
        return save(CORTEX, job_id)


@flow(persist_result=True, result_serializer="json")
def waits_for_capacity(sub_jobs: list[dict[str, Any]], hardware: str) -> str:
    """A job that is asked for when there are GPUs of its kind."""
    wait_for_capacity(CORTEX, 1, hardware=hardware, poll_s=POLL_S)
    with jobs_cancelled_at_end():
        job_id = create_job(CORTEX, sub_jobs, hardware=hardware)
        await_remote(CORTEX, job_id)
    return job_id


@flow(persist_result=True, result_serializer="json")
async def awaits_the_queue(sub_jobs: list[dict[str, Any]]) -> str:
    """The same in a flow that awaits."""
    async with jobs_cancelled_at_end():
        job_id = await acreate_job(CORTEX, sub_jobs)
        await aawait_remote(CORTEX, job_id, poll_s=POLL_S)
    return job_id


@flow(
    persist_result=True, result_serializer="json", on_cancellation=[cancel_remote_jobs], on_crashed=[cancel_remote_jobs]
)
def holds_a_job(sub_jobs: list[dict[str, Any]]) -> None:
    """Runs until somebody ends it."""
    create_job(CORTEX, sub_jobs)
    time.sleep(LONG_S)


@flow(persist_result=True, result_serializer="json", on_cancellation=[cancel_remote_jobs])
def starts_another(sub_jobs: list[dict[str, Any]]) -> None:
    """A flow run that leaves the GPUs to another one, and stays."""
    create_job(CORTEX, sub_jobs)
    run_deployment("holds-a-job/live", parameters={"sub_jobs": sub_jobs}, timeout=0)
    time.sleep(LONG_S)


@task(cache_policy=RUN_ID + INPUTS, persist_result=True, result_serializer="json")
def writes_a_line(file: str, number: int) -> None:
    time.sleep(0.5)
    with Path(file).open("a") as lines:
        lines.write(f"{number}\n")


@flow(persist_result=True, result_serializer="json")
def goes_task_by_task(sub_jobs: list[dict[str, Any]], file: str, tasks: int) -> None:
    """Somebody may suspend it between two of its tasks."""
    with jobs_cancelled_at_end():
        create_job(CORTEX, sub_jobs)
        for number in range(tasks):
            writes_a_line(file, number)


@flow(persist_result=True, result_serializer="json", on_failure=[cancel_remote_jobs])
def asks_a_person(sub_jobs: list[dict[str, Any]], timeout_s: int) -> None:
    """Suspended until somebody answers, which nobody does."""
    with jobs_cancelled_at_end():
        create_job(CORTEX, sub_jobs)
        suspend_flow_run(timeout=timeout_s, key="a person's answer")


@flow(persist_result=True, result_serializer="json")
def trains(plan: dict[str, Any]) -> dict[str, Any]:
    """A training run that a driver may take over."""
    return train(CORTEX, plan)


@flow(persist_result=True, result_serializer="json")
def trains_on_slots(plan: dict[str, Any], limit: str) -> dict[str, Any]:
    """A training run whose GPUs are counted by a limit."""
    return train(CORTEX, plan, gpu_limit=limit)


@flow(persist_result=True, result_serializer="json")
def queues_on_slots(sub_jobs: list[dict[str, Any]], limit: str) -> None:
    """A job that queues, although its slots are free."""
    with jobs_cancelled_at_end():
        await_remote(CORTEX, create_job(CORTEX, sub_jobs, gpu_limit=limit), poll_s=POLL_S)


@flow(persist_result=True, result_serializer="json")
def holds_slots(sub_jobs: list[dict[str, Any]], limit: str) -> None:
    """Runs until somebody kills it, and nobody cleans up."""
    create_job(CORTEX, sub_jobs, gpu_limit=limit)
    time.sleep(LONG_S)


@flow(persist_result=True, result_serializer="json")
def makes_a_candidate(sub_jobs: list[dict[str, Any]], root: str) -> str:
    """A model to be promoted, without any training."""
    with jobs_cancelled_at_end():
        job_id = create_job(CORTEX, sub_jobs)
        await_remote(CORTEX, job_id)
        exported = export(CORTEX, job_id, save(CORTEX, job_id), root=root)
        return publish(root, exported["save"], epoch=exported["epoch"], step=exported["step"])
