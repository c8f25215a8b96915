"""Flows that the live tests deploy: each is about one way of waiting, or of ending."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow, suspend_flow_run

from prefect_cortex_training import (
    aawait_remote,
    acreate_job,
    await_remote,
    cancel_remote_jobs,
    create_job,
    export,
    jobs_cancelled_at_end,
    publish,
    save,
    submit_save,
    train,
)

CORTEX = "cortex"


@flow(persist_result=True, result_serializer="json")
def waits_for_the_queue(sub_jobs: list[dict[str, Any]], poll_s: float = 1.0, timeout_s: float = 600.0) -> str:
    """A job that has to queue, and a save that is waited for without a process too."""
    with jobs_cancelled_at_end():
        job_id = create_job(CORTEX, sub_jobs)
        await_remote(CORTEX, job_id, poll_s=poll_s, timeout_s=timeout_s)
        request_id = submit_save(CORTEX, job_id)
        await_remote(CORTEX, job_id, request_id, poll_s=poll_s)
        return save(CORTEX, job_id)


@flow(persist_result=True, result_serializer="json")
def waits_for_the_queue_without_cleanup(sub_jobs: list[dict[str, Any]]) -> str:
    """Nothing in the flow cancels the job: only whoever watches can."""
    job_id = create_job(CORTEX, sub_jobs)
    await_remote(CORTEX, job_id, poll_s=1.0)
    return job_id


@flow(persist_result=True, result_serializer="json")
async def awaits_the_queue(sub_jobs: list[dict[str, Any]]) -> str:
    """The same in a flow that awaits."""
    async with jobs_cancelled_at_end():
        job_id = await acreate_job(CORTEX, sub_jobs)
        await aawait_remote(CORTEX, job_id, poll_s=1.0)
    return job_id


@flow(
    persist_result=True, result_serializer="json", on_cancellation=[cancel_remote_jobs], on_crashed=[cancel_remote_jobs]
)
def holds_a_job(sub_jobs: list[dict[str, Any]]) -> None:
    """Runs until somebody ends it."""
    create_job(CORTEX, sub_jobs)
    time.sleep(600)


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
def makes_a_candidate(sub_jobs: list[dict[str, Any]], root: str) -> str:
    """A model to be promoted, without any training."""
    with jobs_cancelled_at_end():
        job_id = create_job(CORTEX, sub_jobs)
        await_remote(CORTEX, job_id)
        exported = export(CORTEX, job_id, save(CORTEX, job_id), root=root)
        return publish(root, exported["save"], epoch=exported["epoch"], step=exported["step"])
