"""The flow to copy, from rows in Snowflake to a published model, on a real Prefect server and the local service."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.states import Scheduled

from cortex_training.errors import ConfigurationError
from cortex_training.publication import PublicationLog, SaveManifest
from cortex_training.training import status
from demo.prefect_server import PrefectServer
from prefect_cortex_training.labels import PREFIX, jobs_in

from .conftest import PAT
from .execute_flow_run import load_flow

EXECUTE = Path(__file__).with_name("execute_flow_run.py")
REPOSITORY = Path(__file__).parents[2]


def create_flow_run(parameters: dict[str, Any]) -> UUID:
    with get_client(sync_client=True) as client:
        return client.create_flow_run(load_flow(), parameters=parameters).id


def start(flow_run_id: UUID, server: PrefectServer, folder: Path) -> subprocess.Popen[str]:
    """Execute the flow run in a process of its own, with results in `folder`."""
    environment = server.environment() | {
        "PREFECT_LOCAL_STORAGE_PATH": str(folder),
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.Popen(
        [sys.executable, str(EXECUTE), str(flow_run_id)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def steps_of(service: Any, job_id: str | None = None) -> list[int]:
    return [entry["global_steps"] for entry in service.execution_log(job_id) if entry["op"] == "step"]


def steps_in(service: Any, root: str) -> list[int]:
    """Steps that the jobs of a training run have taken.

    A driver that is killed between a step's record and its request costs its job: the next one goes on from a save of
    it, and no step is lost or taken twice.
    """
    if not Path(root, "run.json").exists():
        return []
    return [step for job_id in status(root).state.job_ids for step in steps_of(service, job_id)]


def jobs_of(flow_run_id: UUID) -> list[str]:
    with get_client(sync_client=True) as client:
        labels = client.read_flow_run(flow_run_id).labels
    return [job.job_id for job in jobs_in({key.removeprefix(PREFIX): value for key, value in labels.items()})]


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = 240.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {patience_s} s"
        time.sleep(0.02)


def job_status(service: Any, job_id: str) -> str:
    from cortex_training import CortexTrainingClient

    with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
        return str(client.get_job(job_id)["status"])


def test_rows_become_a_published_model(
    flow_parameters: dict[str, Any], local_service: Any, on_server: PrefectServer, results_folder: Path
) -> None:
    flow_run_id = create_flow_run(flow_parameters)
    first = start(flow_run_id, on_server, results_folder)
    output, _ = first.communicate(timeout=240)
    assert first.returncode == 0, output
    (job_id,) = jobs_of(flow_run_id)

    assert steps_of(local_service, job_id) == [1, 2, 3, 4, 5, 6]
    assert job_status(local_service, job_id) == "cancelled"
    log = PublicationLog(flow_parameters["models"])
    entry = log.latest()
    assert entry is not None
    manifest = SaveManifest.read(log.store, entry.save)
    assert (manifest.job_id, manifest.checkpoint_type, manifest.global_steps) == (job_id, "weights-only", 6)
    assert {"config.json", "model.safetensors"} <= {file.path for file in manifest.files}
    for name in ("before", "after"):
        (sample,) = json.loads(Path(flow_parameters["root"], f"samples-{name}.json").read_text())
        assert sample["text"]

    executed = len(local_service.execution_log(job_id))
    retry(flow_run_id)
    again = start(flow_run_id, on_server, results_folder)
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert len(local_service.execution_log(job_id)) == executed
    assert jobs_of(flow_run_id) == [job_id]
    assert len(log.entries()) == 1

    look_for_the_secret(flow_run_id, on_server, [results_folder, Path(flow_parameters["root"]).parent])


def look_for_the_secret(flow_run_id: UUID, server: PrefectServer, folders: list[Path]) -> None:
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
        of_the_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]))
        logs = "\n".join(log.message for log in client.read_logs(of_the_run))
    assert "train 6/6" in logs
    assert PAT not in logs
    assert PAT not in run.model_dump_json()
    files = [path for folder in [*folders, server.home] for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if PAT.encode() in path.read_bytes()]


def retry(flow_run_id: UUID) -> None:
    """What the Retry button does."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Scheduled(name="AwaitingRetry"), force=True)


@pytest.mark.parametrize("results", ["kept", "lost"])
def test_a_killed_flow_goes_on_and_takes_each_step_once(
    results: str,
    flow_parameters: dict[str, Any],
    local_service: Any,
    on_server: PrefectServer,
    results_folder: Path,
    tmp_path: Path,
) -> None:
    """The machine goes away in the middle of the training: nobody is left to run a hook."""
    flow_parameters |= {"steps": 40, "save_every_steps": 20}
    flow_run_id = create_flow_run(flow_parameters)
    process = start(flow_run_id, on_server, results_folder)
    before = len(steps_of(local_service))
    wait_until(lambda: len(steps_of(local_service)) >= before + 3 or process.poll() is not None, "three steps")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    (job_id,) = jobs_of(flow_run_id)
    assert len(steps_of(local_service, job_id)) < 40

    retry(flow_run_id)
    again = start(flow_run_id, on_server, results_folder if results == "kept" else tmp_path / "other-results")
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert jobs_of(flow_run_id) == [job_id]
    assert steps_in(local_service, flow_parameters["root"]) == list(range(1, 41))
    assert {job_status(local_service, job) for job in status(flow_parameters["root"]).state.job_ids} == {"cancelled"}
    assert len(PublicationLog(flow_parameters["models"]).entries()) == 1


def test_a_job_that_is_lost_in_training_costs_no_flow(
    flow_parameters: dict[str, Any], local_service: Any, on_server: PrefectServer, results_folder: Path
) -> None:
    from cortex_training import CortexTrainingClient

    flow_parameters |= {"steps": 40, "save_every_steps": 5}
    flow_run_id = create_flow_run(flow_parameters)
    process = start(flow_run_id, on_server, results_folder)
    root = flow_parameters["root"]
    wait_until(lambda: len(steps_in(local_service, root)) >= 8 or process.poll() is not None, "eight steps")
    (job_id,) = jobs_of(flow_run_id)
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        client.cancel_job(job_id)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    lost, replacement = status(root).state.job_ids
    assert lost == job_id
    assert steps_of(local_service, replacement)[-1] == 40
    assert job_status(local_service, replacement) == "cancelled"
    log = PublicationLog(flow_parameters["models"])
    entry = log.latest()
    assert entry is not None
    assert (entry.step, SaveManifest.read(log.store, entry.save).job_id) == (40, replacement)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cortex": "nobody-saved-this"}, "nobody-saved-this"),
        ({"snowflake": "nobody-saved-this"}, "nobody-saved-this"),
        ({"table": "NO_SUCH_TABLE"}, "NO_SUCH_TABLE"),
        ({"table": "T; DROP TABLE X"}, "give a table's name"),
        ({"warmup_steps": 7}, "warmup_steps"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"models": "/nowhere/models"}, "/nowhere/models"),
        ({"root": "/nowhere/runs/nightly"}, "/nowhere/runs"),
        ({"max_seq_len": 16, "overlong": "error"}, "max_seq_len"),
    ],
)
def test_bad_input_is_named_before_a_job_exists(
    changed: dict[str, Any], message: str, flow_parameters: dict[str, Any], local_service: Any, on_server: PrefectServer
) -> None:
    from cortex_training import CortexTrainingClient

    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        jobs = {job["job_id"] for job in client.list_jobs()}
        with pytest.raises(ConfigurationError, match=message):
            load_flow()(**{**flow_parameters, **changed})
        assert {job["job_id"] for job in client.list_jobs()} == jobs
