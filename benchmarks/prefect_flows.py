"""Flows that `prefect_waits.py` deploys: the same wait, with and without a process."""

from __future__ import annotations

from typing import Any

from prefect import flow

from prefect_cortex_training import await_remote, create_job, jobs_cancelled_at_end, wait_until_running


@flow(persist_result=True, result_serializer="json")
def suspended(sub_jobs: list[dict[str, Any]]) -> str:
    """Waits for its job without a process."""
    with jobs_cancelled_at_end():
        job_id = create_job("cortex", sub_jobs)
        await_remote("cortex", job_id, poll_s=1.0)
    return job_id


@flow(persist_result=True, result_serializer="json")
def polling(sub_jobs: list[dict[str, Any]]) -> str:
    """Waits for its job in its process."""
    with jobs_cancelled_at_end():
        job_id = create_job("cortex", sub_jobs)
        wait_until_running("cortex", job_id)
    return job_id
