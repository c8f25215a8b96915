"""A job as a block: configured in the user interface, triggered from code."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prefect.blocks.abstract import JobBlock, JobRun
from prefect.runtime import flow_run
from pydantic import Field

from cortex_training.answers import Checkpoint
from cortex_training.errors import DeadlineExceeded, JobFailed
from cortex_training.identity import new_job_id
from cortex_training.states import JobState, is_terminal_job, job_state
from prefect_cortex_training.credentials import DOCUMENTATION_URL, LOGO_URL, CortexTrainingCredentials
from prefect_cortex_training.dispatch import dual, run_to_end
from prefect_cortex_training.jobs import cancel_if_alive, find_or_create, once_known
from prefect_cortex_training.labels import RunLabels

Checkpoints = list[Checkpoint]
LOOK_EVERY_S = 5.0


class CortexTrainingJobRun(JobRun[Checkpoints]):
    """A job on the service. It works until it is cancelled, fails or is torn down; its results are its checkpoints."""

    def __init__(self, job_id: str, credentials: CortexTrainingCredentials) -> None:
        self.job_id = job_id
        self._credentials = credentials

    async def await_until_running(self, timeout_s: float | None = None) -> None:
        """Wait until the job takes requests; raises JobFailed with the service's reason when it ends instead."""
        async with await self._credentials.aget_client() as client:
            await once_known(lambda: client.wait_for_job(self.job_id, timeout_s=timeout_s), time.time())

    @dual(await_until_running)
    def wait_until_running(self, timeout_s: float | None = None) -> None:
        """Wait until the job takes requests; raises JobFailed with the service's reason when it ends instead."""
        run_to_end(self.await_until_running(timeout_s))

    async def await_for_completion(self, timeout_s: float | None = None) -> None:
        """Wait until the job has ended. Cancelled and torn-down jobs have completed; raises JobFailed for one that
        failed.
        """
        try:
            async with asyncio.timeout(timeout_s), await self._credentials.aget_client() as client:
                job = await once_known(lambda: client.get_job(self.job_id), time.time())
                while not is_terminal_job(job.get("status")):
                    await asyncio.sleep(LOOK_EVERY_S)
                    job = await client.get_job(self.job_id)
        except TimeoutError:
            raise DeadlineExceeded(
                f"job {self.job_id} has not ended within {timeout_s} s; it works on", timeout_s=timeout_s
            ) from None
        if job_state(job.get("status")) == JobState.FAILED:
            raise JobFailed(job_id=self.job_id, state=JobState.FAILED, reason=str(job.get("reason") or ""))

    @dual(await_for_completion)
    def wait_for_completion(self, timeout_s: float | None = None) -> None:  # type: ignore[override]
        """Wait until the job has ended. Cancelled and torn-down jobs have completed; raises JobFailed for one that
        failed.
        """
        run_to_end(self.await_for_completion(timeout_s))

    async def afetch_result(self) -> Checkpoints:
        """The job's checkpoints, as the service lists them."""
        async with await self._credentials.aget_client() as client:
            return await client.list_checkpoints(self.job_id)

    @dual(afetch_result)
    def fetch_result(self) -> Checkpoints:  # type: ignore[override]
        """The job's checkpoints, as the service lists them."""
        return run_to_end(self.afetch_result())

    async def acancel(self) -> None:
        """Cancel the job; one that has ended is left as it is."""
        async with await self._credentials.aget_client() as client:
            await cancel_if_alive(client, self.job_id)

    @dual(acancel)
    def cancel(self) -> None:
        """Cancel the job; one that has ended is left as it is."""
        run_to_end(self.acancel())


class CortexTrainingJob(JobBlock[Checkpoints]):
    """
    Creates a job on Snowflake Cortex Training.

    Inside a flow run the job's id is written into the run's labels before the job is created: triggering again in a
    rerun finds the job.

    Example:
        Trigger a stored job and wait until it runs:
        ```python
        from prefect_cortex_training import CortexTrainingJob

        job = CortexTrainingJob.load("BLOCK_NAME")
        run = job.trigger()
        run.wait_until_running()
        ```
    """

    _block_type_name = "Cortex Training Job"
    _block_type_slug = "cortex-training-job"
    _logo_url = LOGO_URL
    _documentation_url = DOCUMENTATION_URL

    credentials: CortexTrainingCredentials = Field(default=..., description="Where the service is and how to get in.")
    sub_jobs: list[dict[str, Any]] = Field(
        default=..., description="Wire bodies of the sub-jobs, e.g. one with job_type training and one with sampling."
    )
    name: str = Field(default="training", description="Tells several jobs of one flow run apart.")
    experiment_name: str | None = Field(default=None, description="Experiment that the job's logs belong to.")
    hardware: str | None = Field(default=None, description="GPU type: H200, B200 or B300.")
    idle_timeout_seconds: int | None = Field(
        default=None, description="Seconds without work after which the service ends the job."
    )
    pending_timeout_seconds: int | None = Field(
        default=None, description="Seconds of waiting for GPUs after which the service gives up."
    )

    async def atrigger(self) -> CortexTrainingJobRun:
        """Create the job, or find the one that this flow run created before."""
        options = ("experiment_name", "hardware", "idle_timeout_seconds", "pending_timeout_seconds")
        body: dict[str, Any] = {"sub_job_configs": self.sub_jobs}
        body |= {option: getattr(self, option) for option in options if getattr(self, option) is not None}
        async with await self.credentials.aget_client() as client:
            if flow_run.id:
                owner = self.credentials._block_document_name
                labels = RunLabels.of_current_run("trigger")
                job_id = await find_or_create(client, labels, self.name, body, owner=owner, logger=self.logger)
            else:
                answer = await client.create_job_from_body({**body, "job_id": new_job_id()})
                job_id = str(answer["job_id"])
        return CortexTrainingJobRun(job_id, self.credentials)

    @dual(atrigger)
    def trigger(self) -> CortexTrainingJobRun:  # type: ignore[override]
        """Create the job, or find the one that this flow run created before."""
        return run_to_end(self.atrigger())
