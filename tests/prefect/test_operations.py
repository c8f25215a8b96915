"""Every verb against the local service, from a flow that blocks and from one that awaits."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

import prefect_cortex_training as ct
from cortex_training import CortexTrainingClient, SubJobConfig
from cortex_training.datasets import build_dataset
from cortex_training.errors import JobFailed
from cortex_training.local.models import model_folder
from cortex_training.publication import PublicationLog
from demo.prefect_server import PrefectServer
from prefect_cortex_training import CortexTrainingCredentials, CortexTrainingJob, CortexTrainingJobRun
from prefect_cortex_training.labels import root_digest
from prefect_cortex_training.tasks import operations

from .conftest import PAT

SUB_JOBS = [
    SubJobConfig.training_job("tiny", {"name": "AdamW", "lr": 1e-3}, 128, 2, 1).to_wire(),
    SubJobConfig.sampling_job("tiny", 128, 1).to_wire(),
]


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    rows = [{"prompt": f"question {n}? ", "completion": f"answer {n}."} for n in range(20)]
    build_dataset(rows, tmp_path / "dataset", tokenizer=model_folder("tiny"), max_seq_len=128)
    return str(tmp_path / "dataset" / "manifest.json")


@pytest.fixture
def credentials(on_server: PrefectServer, local_service: Any) -> CortexTrainingCredentials:
    block = CortexTrainingCredentials(host=local_service.base_url, database="TESTS", schema_="PUBLIC", pat=PAT)
    block.save("cortex", overwrite=True)
    return block


def works(dataset: str, folder: str) -> dict[str, Any]:
    with ct.jobs_cancelled_at_end():
        job_id = ct.create_job("cortex", SUB_JOBS)
        ct.wait_until_running("cortex", job_id)
        losses = []
        for number in (1, 2):
            batch = ct.forward_backward("cortex", job_id, dataset, step=number, micro_batch_size=2)
            losses.append(batch["avg_loss"])
            ct.step("cortex", job_id, seq=number, expected_global_step=number, learning_rate=1e-3)
        checkpoint = ct.save("cortex", job_id)
        exported = ct.export("cortex", job_id, checkpoint, root=folder)
        entry = ct.publish(folder, exported["save"], epoch=exported["epoch"], step=exported["step"])
        ct.weight_sync("cortex", job_id)
        made = ct.generate("cortex", job_id, ["question 1? "], out=f"{folder}/out.json", seq=1)
    return {"job_id": job_id, "losses": losses, "entry": entry, "made": made}


blocking = flow(works)


@flow
async def awaiting(dataset: str, folder: str) -> dict[str, Any]:
    async with ct.jobs_cancelled_at_end():
        job_id = await ct.acreate_job("cortex", SUB_JOBS)
        await ct.await_until_running("cortex", job_id)
        losses = []
        for number in (1, 2):
            batch = await ct.aforward_backward("cortex", job_id, dataset, step=number, micro_batch_size=2)
            losses.append(batch["avg_loss"])
            await ct.astep("cortex", job_id, seq=number, expected_global_step=number, learning_rate=1e-3)
        checkpoint = await ct.asave("cortex", job_id)
        exported = await ct.aexport("cortex", job_id, checkpoint, root=folder)
        entry = await ct.apublish(folder, exported["save"], epoch=exported["epoch"], step=exported["step"])
        await ct.aweight_sync("cortex", job_id)
        made = await ct.agenerate("cortex", job_id, ["question 1? "], out=f"{folder}/out.json", seq=1)
    return {"job_id": job_id, "losses": losses, "entry": entry, "made": made}


def check(told: dict[str, Any], folder: Path, service: Any) -> None:
    executed = service.execution_log(told["job_id"])
    assert [entry["global_steps"] for entry in executed if entry["op"] == "step"] == [1, 2]
    batches = [entry for entry in executed if entry["op"] == "forward-backward"]
    assert [entry["loss"] for entry in batches] == pytest.approx(told["losses"])
    assert len({entry["chunk_group"] for entry in batches}) == 2
    latest = PublicationLog(folder).latest()
    assert latest is not None
    assert (latest.name, latest.step) == (told["entry"], 2)
    (completion,) = json.loads((folder / "out.json").read_text())
    assert completion["prompt"] == "question 1? "
    assert told["made"] == {"request_id": told["made"]["request_id"], "count": 1, "path": str(folder / "out.json")}
    with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
        assert client.get_job(told["job_id"])["status"] == "cancelled"


def test_every_verb_blocks(
    dataset: str, tmp_path: Path, credentials: CortexTrainingCredentials, local_service: Any, results_folder: Path
) -> None:
    """And what is stored of each is ids, numbers and paths, however large what it made is."""
    check(blocking(dataset, str(tmp_path)), tmp_path, local_service)
    sizes = [path.stat().st_size for path in results_folder.rglob("*") if path.is_file()]
    assert len(sizes) >= 10
    assert max(sizes) < 4096


def test_a_rerun_of_finished_work_gets_what_it_got_and_sends_nothing_although_every_result_is_lost(
    dataset: str, tmp_path: Path, credentials: CortexTrainingCredentials, local_service: Any, results_folder: Path
) -> None:
    """What failed came after the work, and the rerun is on another machine: the job is gone, and so are the results."""
    told: list[dict[str, Any]] = []
    executed: list[int] = []

    @flow(retries=1, result_serializer="json")
    def fails_after_its_work() -> None:
        told.append(works(dataset, str(tmp_path)))
        executed.append(len(local_service.execution_log(told[0]["job_id"])))
        shutil.rmtree(results_folder)
        if len(told) == 1:
            raise RuntimeError("nobody could be told")

    fails_after_its_work()
    check(told[0], tmp_path, local_service)
    assert told[1] == told[0]
    assert executed[1] == executed[0]


def test_what_was_never_done_on_a_job_that_is_finished_says_so(
    dataset: str, credentials: CortexTrainingCredentials
) -> None:
    @flow(result_serializer="json")
    def another_deployment() -> None:
        with ct.jobs_cancelled_at_end():
            job_id = ct.create_job("cortex", SUB_JOBS)
            ct.wait_until_running("cortex", job_id)
        ct.create_job("cortex", SUB_JOBS)
        ct.save.with_options(retries=0)("cortex", job_id, seq=7)

    with pytest.raises(JobFailed, match=r"was finished.*no result of this save.*start another flow run"):
        another_deployment()


async def test_every_verb_can_be_awaited(
    dataset: str, tmp_path: Path, credentials: CortexTrainingCredentials, local_service: Any
) -> None:
    check(await awaiting(dataset, str(tmp_path)), tmp_path, local_service)


def test_training_shows_its_progress_in_one_artifact(
    flow_parameters: dict[str, Any], dataset: str, local_service: Any
) -> None:
    from cortex_training.training import TrainingPlan

    @flow(result_serializer="json")
    def only_train() -> str:
        with ct.jobs_cancelled_at_end():
            job_id = ct.create_job("cortex", SUB_JOBS)
            ct.wait_until_running("cortex", job_id)
            plan = TrainingPlan(
                root=flow_parameters["root"], dataset=dataset, job_id=job_id, steps=4, micro_batch_size=2
            ).to_dict()
            ct.train("cortex", plan)
            # The same run again, under another key: it is finished, and says so in the artifact that is there.
            ct.train("cortex", {**plan, "patience_s": 60.0})
        return job_id

    job_id = only_train()
    assert [e["global_steps"] for e in local_service.execution_log(job_id) if e["op"] == "step"] == [1, 2, 3, 4]
    with get_client(sync_client=True) as client:
        key = f"training-{root_digest(flow_parameters['root'])}"
        found = [artifact for artifact in client.read_artifacts() if artifact.key == key]
    assert len(found) == 1
    assert found[0].type == "progress"
    assert found[0].data == 100.0


def test_a_job_block_blocks(credentials: CortexTrainingCredentials, local_service: Any) -> None:
    @flow
    def around() -> list[str]:
        block = CortexTrainingJob(credentials=CortexTrainingCredentials.load("cortex"), sub_jobs=SUB_JOBS)
        run = block.trigger()
        run.wait_until_running()
        assert block.trigger().job_id == run.job_id
        assert run.fetch_result() == []
        run.cancel()
        run.wait_for_completion(timeout_s=240)
        return [run.job_id]

    (job_id,) = around()
    with CortexTrainingClient(local_service.base_url, "TESTS", "PUBLIC") as client:
        assert client.get_job(job_id)["status"] == "cancelled"


async def test_a_job_block_can_be_awaited_outside_a_flow(credentials: CortexTrainingCredentials) -> None:
    run = await CortexTrainingJob(credentials=credentials, sub_jobs=SUB_JOBS).atrigger()
    await run.await_until_running()
    assert await run.afetch_result() == []
    await run.acancel()
    await run.await_for_completion(timeout_s=240)


async def test_a_job_that_ends_while_it_is_waited_for_is_an_error_with_its_reason(
    credentials: CortexTrainingCredentials,
) -> None:
    run = await CortexTrainingJob(credentials=credentials, sub_jobs=SUB_JOBS).atrigger()
    await run.acancel()
    with pytest.raises(JobFailed, match="cancelled"):
        await CortexTrainingJobRun(run.job_id, credentials).await_until_running()


def test_completions_survive_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is synced under another name, then takes the name, then the name is synced."""
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        sync(handle)

    def renamed(source: Any, target: Any) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    target = tmp_path / "two words.json"
    target.write_bytes(b"old")
    operations._write_durably(target, b"new")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert done == ["sync file", "rename", "sync folder"]
