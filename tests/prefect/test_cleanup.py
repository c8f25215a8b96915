"""What a flow run began is ended for good, also where somebody still works on it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.runtime import flow_run

from cortex_training import AsyncCortexTrainingClient, SubJobConfig
from cortex_training.datasets import build_dataset
from cortex_training.local.models import model_folder
from cortex_training.training import Progress, Superseded, TrainingPlan, run, status
from demo.prefect_server import PrefectServer
from prefect_cortex_training import CortexTrainingCredentials, atrain
from prefect_cortex_training.cleanup import cancel_jobs_of_run
from prefect_cortex_training.handover import attempt_of
from prefect_cortex_training.labels import RunLabels, root_labels
from tests.publication.conftest import bucket, creds, s3_root, s3_server  # noqa: F401

from .conftest import PAT


@flow
async def flow_run_with_root(root: str) -> str:
    await RunLabels.of_current_run("a test").write(root_labels(root, "cortex"))
    return str(flow_run.id)


async def test_a_driver_that_is_still_alive_stops_and_creates_no_other_job(
    on_server: PrefectServer, local_service: Any, tmp_path: Path
) -> None:
    """As after a crash of the flow's process whose training goes on in another, or after a partition.

    An earlier flow run on the same root is cleaned up first: it has lost the root, and may not end its successor.
    """
    block = CortexTrainingCredentials(host=local_service.base_url, database="TESTS", schema_="PUBLIC", pat=PAT)
    await block.save("cortex", overwrite=True)
    rows = [{"prompt": f"question {n}? ", "completion": f"answer {n}."} for n in range(20)]
    build_dataset(rows, tmp_path / "dataset", tokenizer=model_folder("tiny"), max_seq_len=128)
    plan = TrainingPlan(
        root=str(tmp_path / "run"),
        dataset=str(tmp_path / "dataset" / "manifest.json"),
        steps=400,
        micro_batch_size=2,
        sub_jobs=(SubJobConfig.training_job("tiny", {"name": "AdamW", "lr": 1e-3}, 128, 2, 1).to_wire(),),
        save_every_steps=400,
    )
    (tmp_path / "run").mkdir()
    labels = RunLabels(await flow_run_with_root(plan.root))
    earlier = RunLabels(await flow_run_with_root(plan.root))
    trains = asyncio.Event()

    def progress(told: Progress) -> None:
        if told.step:
            trains.set()

    async with AsyncCortexTrainingClient(local_service.base_url, "TESTS", "PUBLIC") as client:
        driver = asyncio.create_task(run(plan, client, progress, attempt=attempt_of(labels.flow_run_id, plan.root)))
        try:
            waiting = asyncio.create_task(trains.wait())
            await asyncio.wait({driver, waiting}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
            assert trains.is_set(), driver
            assert await cancel_jobs_of_run(earlier, logging.getLogger("a-test"))
            trains.clear()
            await asyncio.wait_for(trains.wait(), 60)
            assert await cancel_jobs_of_run(labels, logging.getLogger("a-test"))
            with pytest.raises(Superseded):
                await asyncio.wait_for(driver, 120)
        finally:
            driver.cancel()
        (job_id,) = [segment.job_id for segment in status(plan.root).state.segments]
        assert (await client.get_job(job_id))["status"] in ("cancelling", "cancelled")


@flow
async def flow_that_trains(plan: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(flow_run.id), await atrain("cortex", plan)


async def test_a_run_in_a_bucket_trains_and_its_job_is_found_there(
    on_server: PrefectServer,
    local_service: Any,
    tmp_path: Path,
    s3_root: str,  # noqa: F811
    creds: str,  # noqa: F811
) -> None:
    block = CortexTrainingCredentials(host=local_service.base_url, database="TESTS", schema_="PUBLIC", pat=PAT)
    await block.save("cortex", overwrite=True)
    rows = [{"prompt": f"question {n}? ", "completion": f"answer {n}."} for n in range(20)]
    build_dataset(rows, tmp_path / "dataset", tokenizer=model_folder("tiny"), max_seq_len=128)
    plan = TrainingPlan(
        root=s3_root,
        credentials=creds,
        dataset=str(tmp_path / "dataset" / "manifest.json"),
        steps=0,
        passes=0.5,
        micro_batch_size=2,
        sub_jobs=(SubJobConfig.training_job("tiny", {"name": "AdamW", "lr": 1e-3}, 128, 2, 1).to_wire(),),
        when_done="keep",
    )
    flow_run_id, result = await flow_that_trains(plan.to_dict())
    assert result["steps"] > 0
    assert status(s3_root, creds).entry == result["entry"]
    earlier = RunLabels(await flow_run_with_root(s3_root))
    await earlier.write(root_labels(s3_root, "cortex", creds))
    async with AsyncCortexTrainingClient(local_service.base_url, "TESTS", "PUBLIC") as client:
        assert await cancel_jobs_of_run(earlier, logging.getLogger("a-test"))
        assert (await client.get_job(result["job_id"]))["status"] == "running"
        assert await cancel_jobs_of_run(RunLabels(flow_run_id), logging.getLogger("a-test"))
        assert (await client.get_job(result["job_id"]))["status"] in ("cancelling", "cancelled")
