"""Operators on the real local service, over tries, deferrals and clears."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.operators.checkpoints import (
    CortexTrainingExportOperator,
    CortexTrainingLoadOperator,
    CortexTrainingPublishOperator,
    CortexTrainingSaveOperator,
)
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.sampling import CortexTrainingGenerateOperator, CortexTrainingWeightSyncOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.operators.training import CortexTrainingForwardBackwardOperator, CortexTrainingStepOperator
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor
from cortex_training.client import CortexTrainingClient
from cortex_training.errors import JobFailed, TransportError
from cortex_training.payloads import build_forward_backward_payload
from cortex_training.publication import PublicationLog, SaveManifest
from cortex_training.states import is_terminal_job
from tests.faults.proxy import ANSWER, FaultProxy

TRAINING = {
    "job_type": "training",
    "model_name": "tiny",
    "dtype": "float32",
    "seed": 7,
    "training_config": {
        "optimizer": {"name": "AdamW", "lr": 3e-3},
        "max_seq_len": 128,
        "train_batch_size": 2,
        "n_gpus": 1,
    },
}
SAMPLING = {"job_type": "sampling", "model_name": "tiny", "inference_config": {"max_seq_len": 128, "n_gpus": 1}}
CANCELLED = {"status": "cancelled", "error": "by its owner"}
# Wants more GPUs than there are: a job that stays pending, for tests of which the model would be a waste.
PARKED = {"job_type": "sampling", "model_name": "tiny", "inference_config": {"max_seq_len": 128, "n_gpus": 100_000}}


@pytest.fixture
def client(local_service):
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        yield client


@pytest.fixture
def job_id(task_run, service_connection, client):
    """A running job with both sub-jobs, cancelled afterwards."""
    job_id = task_run("create").execute(create(service_connection, [TRAINING, SAMPLING]))
    task_run("wait").execute(
        CortexTrainingWaitForRunningSensor(
            task_id="wait", conn_id=service_connection, job_id=job_id, deferrable=False, poke_interval=0.2
        )
    )
    yield job_id
    client.cancel_job(job_id)


@pytest.fixture(scope="module")
def untouched_job(local_service):
    """A running job for tests that must send nothing to it."""
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING), copy.deepcopy(SAMPLING)]})[
            "job_id"
        ]
        client.wait_for_job(job_id)
        yield job_id
        client.cancel_job(job_id)


def create(conn_id: str, sub_jobs=None, **arguments):
    return CortexTrainingCreateJobOperator(
        task_id="create", conn_id=conn_id, sub_jobs=copy.deepcopy(sub_jobs or [PARKED]), **arguments
    )


def created(client, before: set[str]) -> list[str]:
    return [job["job_id"] for job in client.list_jobs() if job["job_id"] not in before]


class TestCreateJob:
    def test_writes_the_id_before_the_job_exists(self, task_run, service_connection, client) -> None:
        run = task_run("create")
        job_id = run.execute(create(service_connection))
        assert run.store.writes[0]["job_id"] == job_id
        assert run.xcoms["job_id"] == job_id
        assert run.xcoms["cortex_training_token"] == {"id": job_id, "generation": [2]}
        assert client.get_job(job_id)["job_id"] == job_id
        client.cancel_job(job_id)

    def test_a_retry_adopts_the_job(self, task_run, service_connection, client) -> None:
        run, before = task_run("create"), {job["job_id"] for job in client.list_jobs()}
        first = run.execute(create(service_connection))
        run.retry()
        assert run.execute(create(service_connection)) == first
        assert created(client, before) == [first]
        client.cancel_job(first)

    def test_a_retry_adopts_the_job_of_an_earlier_release(self, task_run, service_connection, client) -> None:
        run = task_run("create")
        job_id = run.execute(create(service_connection))
        # Earlier releases wrote down how often the DAG run had been cleared, too.
        run.store.set("cortex_training", {"v": 1, "generation": [2, 0], "job_id": job_id})
        run.retry()
        assert run.execute(create(service_connection)) == job_id

    def test_a_retry_creates_the_job_that_was_only_written_down(self, task_run, service_connection, client) -> None:
        run = task_run("create")
        run.store.set(
            "cortex_training", {"v": 1, "generation": [2, 0], "job_id": "11111111-2222-4333-8444-555555555555"}
        )
        run.retry()
        job_id = run.execute(create(service_connection))
        assert job_id == "11111111-2222-4333-8444-555555555555"
        client.cancel_job(job_id)

    def test_a_retry_replaces_a_job_that_ended(self, task_run, service_connection, client) -> None:
        run = task_run("create")
        first = run.execute(create(service_connection))
        client.cancel_job(first)
        run.retry()
        second = run.execute(create(service_connection))
        assert second != first
        client.cancel_job(second)

    def test_a_retry_replaces_a_job_that_is_about_to_end(self, task_run, connection, local_service, client) -> None:
        with FaultProxy(local_service.base_url) as proxy:
            where = {"database": local_service.database, "schema": local_service.schema}
            conn_id = connection("between", host=proxy.base_url, **where)
            run = task_run("create")
            job_id = run.execute(create(conn_id))
            # A worker that was told to stop cancelled it, and the service takes its time.
            proxy.add(f"GET .*/{job_id}$", ANSWER, status=200, body={**client.get_job(job_id), "status": "cancelling"})
            run.retry()
            another = run.execute(create(conn_id))
            assert another != job_id
            assert run.xcoms["job_id"] == another
        for one in (job_id, another):
            client.cancel_job(one)

    def test_a_clear_cancels_the_old_job_and_makes_another(self, task_run, service_connection, client) -> None:
        run = task_run("create")
        first = run.execute(create(service_connection))
        run.clear()
        second = run.execute(create(service_connection))
        assert second != first
        assert client.get_job(first)["status"] in ("cancelling", "cancelled", "terminated")
        client.cancel_job(second)

    def test_a_changed_dag_is_not_taken_for_the_same_job(self, task_run, service_connection, client) -> None:
        run = task_run("create")
        first = run.execute(create(service_connection))
        run.retry()
        with pytest.raises(AirflowFailException, match="is not what the DAG says now"):
            run.execute(create(service_connection, [TRAINING]))
        client.cancel_job(first)

    @pytest.mark.parametrize("sub_jobs", [[], "training", [{"job_type": "training"}, {"job_type": "training"}]])
    def test_bad_sub_jobs_create_nothing(self, task_run, service_connection, client, sub_jobs) -> None:
        before = {job["job_id"] for job in client.list_jobs()}
        operator = create(service_connection)
        operator.sub_jobs = sub_jobs
        with pytest.raises(AirflowFailException, match="sub_job"):
            task_run("create").execute(operator)
        assert created(client, before) == []

    def test_a_wrong_host_is_named(self, task_run, unreachable_connection) -> None:
        with pytest.raises(TransportError, match=r"127\.0\.0\.1|/api/v2/databases") as failure:
            task_run("create", retries=0).execute(create(unreachable_connection, timeout_s=1.0))
        assert "pat-0123456789" not in str(failure.value)

    def test_an_unknown_connection_is_named(self, task_run) -> None:
        with pytest.raises(AirflowFailException, match="'nowhere' does not exist"):
            task_run("create").execute(create("nowhere"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("deferrable", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda **arguments: CortexTrainingStepOperator(job_id="j", **arguments),
        lambda **arguments: CortexTrainingWeightSyncOperator(job_id="j", **arguments),
        lambda **arguments: CortexTrainingCreateJobOperator(sub_jobs=[PARKED], **arguments),
    ],
)
def test_nobody_there_is_found_out_within_the_tasks_own_time(
    task_run, unreachable_connection, make, deferrable
) -> None:
    """Not within the two minutes for which a client tries by itself."""
    operator = make(task_id="task", conn_id=unreachable_connection, timeout_s=1.0, deferrable=deferrable)
    with pytest.raises(TransportError):
        task_run("task").execute(operator)


class TestCancelJob:
    def test_cancels_and_succeeds_again(self, task_run, service_connection, client) -> None:
        job_id = task_run("create").execute(create(service_connection))
        operator = CortexTrainingCancelJobOperator(task_id="cancel", conn_id=service_connection, job_id=job_id)
        assert task_run("cancel").execute(operator) == [job_id]
        task_run("cancel").execute(operator)
        assert client.get_job(job_id)["status"] in ("cancelling", "cancelled", "terminated")

    @pytest.mark.parametrize("job_id", [None, "", [], [None, ""], "never-created"])
    def test_succeeds_when_there_is_nothing(self, task_run, service_connection, job_id, tmp_path) -> None:
        operator = CortexTrainingCancelJobOperator(
            task_id="cancel", conn_id=service_connection, job_id=job_id, root=str(tmp_path / "no-run")
        )
        assert task_run("cancel").execute(operator) == []

    def test_one_that_cannot_be_cancelled_keeps_no_other_alive(
        self, task_run, connection, service_connection, local_service, client, manifest, tmp_path
    ) -> None:
        root = str(tmp_path / "run")
        plan = {"root": root, "dataset": manifest, "steps": 1, "micro_batch_size": 2, "when_done": "keep"}
        plan["sub_jobs"] = [copy.deepcopy(TRAINING)]
        train = CortexTrainingTrainOperator(task_id="train", conn_id=service_connection, plan=plan, deferrable=False)
        of_the_run = task_run("train").execute(train)["job_id"]
        refused, other = (task_run("create").execute(create(service_connection)) for _ in range(2))
        with FaultProxy(local_service.base_url) as proxy:
            proxy.add(f"POST .*{refused}:cancel", ANSWER, status=403, body={"message": "it is somebody else's"})
            where = {"database": local_service.database, "schema": local_service.schema}
            operator = CortexTrainingCancelJobOperator(
                task_id="cancel",
                conn_id=connection("refusing", host=proxy.base_url, **where),
                job_id=[refused, other],
                root=root,
            )
            with pytest.raises(AirflowFailException, match="somebody else's"):
                task_run("cancel").execute(operator)
            assert not is_terminal_job(client.get_job(refused)["status"])
            for job_id in (other, of_the_run):
                assert client.get_job(job_id)["status"] in ("cancelling", "cancelled", "terminated")
            # A retry cancels what is left.
            assert refused in task_run("cancel").execute(operator)
            assert client.get_job(refused)["status"] in ("cancelling", "cancelled", "terminated")

    def test_an_unmounted_root_is_no_success(self, task_run, service_connection, tmp_path) -> None:
        operator = CortexTrainingCancelJobOperator(
            task_id="cancel", conn_id=service_connection, root=str(tmp_path / "not-mounted" / "run")
        )
        with pytest.raises(AirflowFailException, match="not-mounted"):
            task_run("cancel").execute(operator)


class TestWaitForRunning:
    def test_defers_and_comes_back(
        self, task_run, service_connection, client, no_grace, start_local_service, connection
    ) -> None:
        service = start_local_service(placing_seconds=2, simulate="0")
        conn_id = connection("slow", host=service.base_url, database=service.database, schema=service.schema)
        job_id = task_run("create").execute(create(conn_id, [SAMPLING]))
        run = task_run("wait")
        sensor = CortexTrainingWaitForRunningSensor(
            task_id="wait", conn_id=conn_id, job_id=job_id, deferrable=True, inline_s=0.1
        )
        assert run.execute(sensor) == job_id
        assert len(run.deferrals) == 1
        assert run.events[0]["status"] == "running"

    def test_a_job_that_ended_fails_for_good(self, task_run, service_connection, client) -> None:
        job_id = task_run("create").execute(create(service_connection))
        client.cancel_job(job_id)
        for deferrable in (True, False):
            sensor = CortexTrainingWaitForRunningSensor(
                task_id="wait", conn_id=service_connection, job_id=job_id, deferrable=deferrable, poke_interval=0.1
            )
            with pytest.raises(AirflowFailException, match=f"{job_id} is 'cancel"):
                task_run("wait").execute(sensor)

    def test_without_an_id_it_says_whose_xcom_is_missing(self, task_run, service_connection) -> None:
        sensor = CortexTrainingWaitForRunningSensor(task_id="wait", conn_id=service_connection, job_id=None)
        with pytest.raises(AirflowFailException, match="task wait: job_id"):
            task_run("wait").execute(sensor)


@pytest.fixture
def frame(manifest):
    """Arguments of a forward-backward at a position of the dataset."""
    return {"dataset": manifest, "step": 1, "micro_batch": 0, "micro_batch_size": 2}


def forward_backward(conn_id: str, job_id: str, **arguments):
    return CortexTrainingForwardBackwardOperator(
        task_id="forward_backward", conn_id=conn_id, job_id=job_id, deferrable=False, **arguments
    )


def step(conn_id: str, job_id: str, **arguments):
    return CortexTrainingStepOperator(
        task_id="step", conn_id=conn_id, job_id=job_id, **{"deferrable": False, **arguments}
    )


def executed(service, job_id: str, operation: str) -> int:
    return sum(1 for entry in service.execution_log(job_id) if entry["op"] == operation)


class TestTrainingCalls:
    def test_one_step_from_single_operators(
        self, task_run, service_connection, local_service, job_id, frame, tmp_path, no_grace, client
    ) -> None:
        loss = task_run("fb").execute(forward_backward(service_connection, job_id, **frame))["loss"]
        assert 0 < loss < 20
        run = task_run("step")
        stepped = run.execute(
            step(service_connection, job_id, learning_rate=1e-3, expected_global_step=1, deferrable=True, inline_s=0.0)
        )
        assert stepped["global_steps"] == 1
        assert stepped["last_lr"] == pytest.approx(1e-3)
        assert executed(local_service, job_id, "step") == 1

        saved = task_run("save").execute(
            CortexTrainingSaveOperator(
                task_id="save",
                conn_id=service_connection,
                job_id=job_id,
                checkpoint_type="weights-only",
                deferrable=False,
            )
        )
        assert saved["global_steps"] == 1
        root = tmp_path / "models"
        root.mkdir()
        exported = task_run("export").execute(
            CortexTrainingExportOperator(
                task_id="export",
                conn_id=service_connection,
                job_id=job_id,
                checkpoint_id=saved["checkpoint_id"],
                root=str(root),
                metrics={"loss": loss, "nan": float("nan")},
            )
        )
        log = PublicationLog(str(root))
        manifest = SaveManifest.read(log.store, exported["save"])
        assert manifest.metrics == {"loss": loss}
        assert {f.path for f in manifest.files} >= {"config.json", "model.safetensors"}

        publish = CortexTrainingPublishOperator(
            task_id="publish", root=str(root), save=exported["save"], step=exported["global_steps"], loss=loss
        )
        run = task_run("publish")
        first = run.execute(publish)
        run.retry()
        second = run.execute(publish)
        assert first["created"]
        assert not second["created"]
        assert first["entry"] == second["entry"] == log.latest().name
        assert len(log.entries()) == 1

    def test_a_cleared_export_neither_reuses_nor_rewrites_what_an_entry_names(
        self, task_run, connection, start_local_service, frame, tmp_path
    ) -> None:
        service = start_local_service(assume=["checkpoint-ids=global_step"])
        conn_id = connection("again", host=service.base_url, database=service.database, schema=service.schema)
        root = tmp_path / "models"
        root.mkdir()
        log = PublicationLog(str(root))
        exporting, publishing = task_run("export"), task_run("publish")

        def export(seed: int) -> dict[str, Any]:
            """A new job, trained for a step: its checkpoint has the name and the sizes of every other one."""
            with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
                job_id = client.create_job_from_body({"sub_job_configs": [{**TRAINING, "seed": seed}]})["job_id"]
                client.wait_for_job(job_id)
                task_run("fb").execute(forward_backward(conn_id, job_id, **frame))
                task_run("step").execute(step(conn_id, job_id, learning_rate=seed * 1e-3))
                client.poll_request(job_id, client.save(job_id, None, "weights-only"))
                exported = exporting.execute(
                    CortexTrainingExportOperator(
                        task_id="export",
                        conn_id=conn_id,
                        job_id=job_id,
                        checkpoint_id="global_step1",
                        root=str(root),
                    )
                )
                client.cancel_job(job_id)
            assert SaveManifest.read(log.store, exported["save"]).job_id == job_id
            return exported

        def publish(exported: dict[str, Any]) -> dict[str, Any]:
            fields = {name: exported[name] for name in ("save", "epoch")}
            return publishing.execute(
                CortexTrainingPublishOperator(task_id="publish", root=str(root), step=1, **fields)
            )

        def weights(exported: dict[str, Any]) -> str:
            """SHA-256 of the weights on disk, which must be what the manifest says."""
            (file,) = (f for f in SaveManifest.read(log.store, exported["save"]).files if f.path.endswith("tensors"))
            found = hashlib.sha256((root / exported["save"] / file.path).read_bytes()).hexdigest()
            assert found == file.sha256
            return found

        first = export(1)
        assert publish(first)["epoch"] == first["epoch"]
        kept = weights(first)
        # A retry of the same generation stays in its folder, but trusts no file of another job in it.
        exporting.retry()
        retried = export(2)
        assert (retried["save"], retried["epoch"]) == (first["save"], first["epoch"])
        assert weights(retried) != kept

        kept = weights(first)
        exporting.clear()
        publishing.clear()
        second = export(3)
        assert second["epoch"] > first["epoch"]
        assert publish(second)["created"]
        assert weights(first) == kept != weights(second)
        assert [entry.save for entry in log.entries()] == [first["save"], second["save"]]

    def test_a_retried_export_goes_on_with_its_download(
        self, task_run, service_connection, job_id, tmp_path, client
    ) -> None:
        client.poll_request(job_id, client.save(job_id, None, "weights-only"))
        (saved,) = client.list_checkpoints(job_id)
        export = CortexTrainingExportOperator(
            task_id="export",
            conn_id=service_connection,
            job_id=job_id,
            checkpoint_id=saved["checkpoint_id"],
            root=str(tmp_path),
        )
        run = task_run("export")
        first = run.execute(export)
        # What a worker leaves that died after its last file: everything but the manifest.
        (tmp_path / first["save"] / ".cortex-save.json").unlink()
        files = {path: path.stat().st_ino for path in (tmp_path / first["save"]).iterdir() if path.name[0] != "."}
        run.retry()
        assert run.execute(export) == first
        assert {path: path.stat().st_ino for path in files} == files
        assert len(PublicationLog(str(tmp_path)).store.names("epochs")) == 1

    def test_a_retried_forward_backward_is_the_same_execution(
        self, task_run, service_connection, local_service, job_id, frame
    ) -> None:
        run = task_run("fb")
        first = run.execute(forward_backward(service_connection, job_id, **frame))
        # The first try died between its POST and the note of the request id.
        record = {k: v for k, v in run.store.get("cortex_training").items() if k not in ("request_id", "started")}
        run.store.set("cortex_training", record)
        run.retry()
        assert run.execute(forward_backward(service_connection, job_id, **frame)) == first
        assert executed(local_service, job_id, "forward-backward") == 1

    def test_clearing_another_task_of_the_run_makes_no_clear_of_a_retry(
        self, task_run, service_connection, local_service, job_id, frame
    ) -> None:
        forward_backward = CortexTrainingForwardBackwardOperator(
            task_id="fb", conn_id=service_connection, job_id=job_id, **frame
        )
        step = CortexTrainingStepOperator(task_id="step", conn_id=service_connection, job_id=job_id)
        for operator, operation in ((forward_backward, "forward-backward"), (step, "step")):
            run = task_run(operator.task_id)
            first = run.execute(operator)
            run.retry()
            run.clear_another_task()
            assert run.execute(operator) == first
            executed = [e for e in local_service.execution_log() if e["op"] == operation and e["job_id"] == job_id]
            assert len(executed) == 1

    def test_a_retry_with_another_frame_is_refused(self, task_run, service_connection, job_id, frame) -> None:
        run = task_run("fb")
        run.execute(forward_backward(service_connection, job_id, **frame))
        record = {k: v for k, v in run.store.get("cortex_training").items() if k not in ("request_id", "started")}
        run.store.set("cortex_training", record)
        run.retry()
        with pytest.raises(AirflowFailException, match="another frame"):
            run.execute(forward_backward(service_connection, job_id, **{**frame, "step": 2}))

    def test_a_frame_comes_from_object_storage(
        self, task_run, service_connection, local_service, job_id, memory
    ) -> None:
        payload = {"input_ids": [[1, 2, 3, 4]], "labels": [[1, 2, 3, 4]]}
        memory.pipe_file("/frames/1.dssst", build_forward_backward_payload(payload))
        run = task_run("fb")
        stored = forward_backward(service_connection, job_id, frame_path="memory://frames/1.dssst")
        told = run.execute(stored)
        same = task_run("fb").execute(forward_backward(service_connection, job_id, payload=payload))
        assert told["loss"] == same["loss"] > 0
        # What was sent is what is on the job; other bytes under that name are another frame.
        memory.pipe_file("/frames/1.dssst", build_forward_backward_payload({**payload, "labels": [[1, 2, 3, 3]]}))
        run.store.set(
            "cortex_training", {k: v for k, v in run.store.get("cortex_training").items() if k != "request_id"}
        )
        run.retry()
        with pytest.raises(AirflowFailException, match="another frame"):
            run.execute(stored)
        with pytest.raises(AirflowFailException, match="frame_path"):
            task_run("fb").execute(
                forward_backward(service_connection, job_id, frame_path="memory://frames/not-there.dssst")
            )
        assert executed(local_service, job_id, "forward-backward") == 2

    def test_a_readable_payload_is_a_frame_too(self, task_run, service_connection, job_id) -> None:
        payload = {"input_ids": [[1, 2, 3, 4]], "labels": [[1, 2, 3, 4]]}
        assert task_run("fb").execute(forward_backward(service_connection, job_id, payload=payload))["loss"] > 0

    def test_a_loaded_checkpoint_gives_its_loss_again(
        self, task_run, service_connection, local_service, job_id, frame, client
    ) -> None:
        first = task_run("fb").execute(forward_backward(service_connection, job_id, **frame))["loss"]
        task_run("step").execute(step(service_connection, job_id, learning_rate=1e-2))
        saved = task_run("save").execute(
            CortexTrainingSaveOperator(task_id="save", conn_id=service_connection, job_id=job_id, deferrable=False)
        )
        trained = task_run("fb").execute(forward_backward(service_connection, job_id, **frame))["loss"]
        assert trained < first
        other = task_run("create").execute(create(service_connection, [TRAINING]))
        client.wait_for_job(other)
        loaded = task_run("load").execute(
            CortexTrainingLoadOperator(
                task_id="load",
                conn_id=service_connection,
                job_id=other,
                checkpoint_id=saved["checkpoint_id"],
                source_job_id=job_id,
                deferrable=False,
            )
        )
        assert loaded == {"job_id": other, "checkpoint_id": saved["checkpoint_id"]}
        assert task_run("fb").execute(forward_backward(service_connection, other, **frame))["loss"] == trained
        client.cancel_job(other)

    def test_exactly_one_source_of_the_frame(self, task_run, service_connection, untouched_job, frame) -> None:
        with pytest.raises(AirflowFailException, match="exactly one"):
            task_run("fb").execute(forward_backward(service_connection, untouched_job, frame_path="/x", **frame))
        with pytest.raises(AirflowFailException, match="frame_path"):
            task_run("fb").execute(forward_backward(service_connection, untouched_job, frame_path="/does/not/exist"))

    def test_a_step_whose_answer_may_be_lost_is_never_repeated(
        self, task_run, service_connection, local_service, job_id, frame
    ) -> None:
        task_run("fb").execute(forward_backward(service_connection, job_id, **frame))
        run = task_run("step")
        run.execute(step(service_connection, job_id))
        record = {k: v for k, v in run.store.get("cortex_training").items() if k not in ("request_id", "started")}
        run.store.set("cortex_training", record)
        run.retry()
        with pytest.raises(AirflowFailException, match="may have been executed"):
            run.execute(step(service_connection, job_id))
        assert executed(local_service, job_id, "step") == 1

    def test_a_retried_step_waits_for_the_same_request(
        self, task_run, service_connection, local_service, job_id, frame
    ) -> None:
        task_run("fb").execute(forward_backward(service_connection, job_id, **frame))
        run = task_run("step")
        first = run.execute(step(service_connection, job_id, expected_global_step=1))
        run.retry()
        assert run.execute(step(service_connection, job_id, expected_global_step=1)) == first
        assert executed(local_service, job_id, "step") == 1

    def test_a_cleared_step_refuses(self, task_run, service_connection, local_service, job_id, frame) -> None:
        task_run("fb").execute(forward_backward(service_connection, job_id, **frame))
        run = task_run("step")
        run.execute(step(service_connection, job_id, expected_global_step=1))
        run.clear()
        with pytest.raises(AirflowFailException, match="was cleared after it stepped"):
            run.execute(step(service_connection, job_id, expected_global_step=1))
        assert executed(local_service, job_id, "step") == 1

    def test_an_unexpected_count_fails_for_good(self, task_run, service_connection, job_id, frame) -> None:
        task_run("fb").execute(forward_backward(service_connection, job_id, **frame))
        with pytest.raises(AirflowFailException, match="global step 1 after this step, 5 was expected"):
            task_run("step").execute(step(service_connection, job_id, expected_global_step=5))

    def test_a_refused_call_may_be_sent_by_the_retry(self, task_run, service_connection, job_id, client) -> None:
        run = task_run("step")
        with pytest.raises(AirflowFailException):
            run.execute(step(service_connection, "never-created"))
        assert run.store.get("cortex_training")["ended"] == "refused"


class TestSampling:
    def test_generates_into_a_file_and_syncs_weights(
        self, task_run, service_connection, local_service, job_id, tmp_path, no_grace, monkeypatch
    ) -> None:
        output = tmp_path / "samples.jsonl"
        synced, sync = set(), os.fsync
        monkeypatch.setattr(os, "fsync", lambda handle: (sync(handle), synced.add(os.fstat(handle).st_ino)))
        run = task_run("generate")
        result = run.execute(
            CortexTrainingGenerateOperator(
                task_id="generate",
                conn_id=service_connection,
                job_id=job_id,
                prompts=["What comes after 1?", "And after 2?"],
                output_path=str(output),
                sampling_params={"max_tokens": 4, "temperature": 0.0},
                deferrable=True,
                inline_s=0.0,
            )
        )
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        # A later task may run on another machine, after this one lost its power.
        assert {output.stat().st_ino, tmp_path.stat().st_ino} <= synced
        assert [line["prompt"] for line in lines] == ["What comes after 1?", "And after 2?"]
        assert all(isinstance(line["token_ids"], list) for line in lines)
        assert result["count"] == 2
        assert "text" not in json.dumps(result)

        copied = task_run("sync").execute(
            CortexTrainingWeightSyncOperator(
                task_id="sync", conn_id=service_connection, job_id=job_id, deferrable=False
            )
        )
        assert copied == {"job_id": job_id}
        assert executed(local_service, job_id, "weight-sync") == 1

    @pytest.mark.parametrize("inline_s", [0.0, 12.0])
    def test_a_retry_sends_again_what_the_kill_of_the_try_before_it_cancelled(
        self, task_run, connection, local_service, job_id, tmp_path, no_grace, inline_s
    ) -> None:
        with FaultProxy(local_service.base_url) as proxy:
            where = {"database": local_service.database, "schema": local_service.schema}
            generate = CortexTrainingGenerateOperator(
                task_id="generate",
                conn_id=connection("stopping", host=proxy.base_url, **where),
                job_id=job_id,
                prompts=["What comes after 1?"],
                output_path=str(tmp_path / "samples.jsonl"),
                sampling_params={"max_tokens": 4, "temperature": 0.0},
                deferrable=True,
                inline_s=0.0,
            )
            run = task_run("generate", retries=1)
            with pytest.raises(TaskDeferred):
                generate.execute(run.context())
            generate.on_kill()
            # As if the service had been in the middle of it.
            cancelled = run.store.get("cortex_training")["request_id"]
            proxy.add(f"GET .*/{cancelled}", ANSWER, status=200, body=CANCELLED, times=10**6)
            generate.inline_s = inline_s
            run.retry()
            assert run.execute(generate)["count"] == 1
            assert proxy.count("POST .*/generate$") == 2

    def test_completions_go_to_object_storage_and_small_ones_into_the_xcom_too(
        self, task_run, service_connection, local_service, job_id, memory
    ) -> None:
        memory.pipe_file(
            "/generate/prompts.jsonl", b'{"prompt": "What comes after 1?"}\n"And after\xe2\x80\xa8 2?"\n[1, 2, 3]\n'
        )

        def generate(**arguments: Any) -> CortexTrainingGenerateOperator:
            return CortexTrainingGenerateOperator(
                task_id="generate",
                conn_id=service_connection,
                job_id=job_id,
                prompts_path="memory://generate/prompts.jsonl",
                output_path="memory://generate/deep/samples.jsonl",
                sampling_params={"max_tokens": 3, "temperature": 0.0},
                deferrable=False,
                **arguments,
            )

        run = task_run("generate")
        told = run.execute(generate())
        data = memory.cat_file("/generate/deep/samples.jsonl")
        assert told == {
            "job_id": job_id,
            "output_path": "memory://generate/deep/samples.jsonl",
            "count": 3,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        lines = [json.loads(line) for line in data.decode().split("\n") if line]
        assert [line["prompt"] for line in lines] == ["What comes after 1?", "And after\u2028 2?", [1, 2, 3]]
        # The same request again: what changes is only what is told of it.
        run.retry()
        assert run.execute(generate(xcom_max_bytes=len(data))) == {**told, "completions": lines}
        run.retry()
        assert run.execute(generate(xcom_max_bytes=len(data) - 1)) == told
        assert executed(local_service, job_id, "generate") == 1

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"prompts": ["x"], "output_path": "nowhere://bucket/out"}, "output_path"),
            ({"prompts": ["x"], "output_path": "s3://user:hunter2@bucket/out"}, "holds a password"),
            ({"prompts": None, "prompts_path": "memory://generate/missing.jsonl"}, "prompts_path"),
            ({"prompts": ["x"], "wait_for_completion": False}, "completions to nobody"),
            ({"prompts": None}, "prompts"),
            ({"prompts": []}, "at least one prompt"),
            ({"prompts": ["x"], "prompts_path": "/x"}, "prompts"),
            ({"prompts": None, "prompts_path": "/does/not/exist"}, "prompts_path"),
            ({"prompts": ["x"], "output_path": "/does/not/exist/out"}, "output_path"),
        ],
    )
    def test_bad_arguments_send_nothing(
        self, task_run, service_connection, untouched_job, local_service, tmp_path, arguments, named
    ) -> None:
        operator = CortexTrainingGenerateOperator(
            task_id="generate",
            conn_id=service_connection,
            job_id=untouched_job,
            **{"output_path": str(tmp_path / "out"), **arguments},
        )
        with pytest.raises(AirflowFailException, match=named):
            task_run("generate").execute(operator)
        assert executed(local_service, untouched_job, "generate") == 0


class TailedLog:
    """A client whose jobs' logs say this."""

    def __init__(self, *entries: Any) -> None:
        self.entries = list(entries)

    def tail_logs(self, job_id: str, **options: Any) -> dict[str, Any]:
        return {"entries": self.entries}


def test_a_failure_ends_with_the_error_lines_of_the_jobs_log() -> None:
    log = TailedLog(
        {"level": "ERROR", "msg": "out of memory on rank 3"},
        {"level": "INFO", "msg": "saved without an error"},
        {"_raw": "RuntimeError: rank 3 left"},
    )
    with pytest.raises(JobFailed) as failure, clear_failures(log):
        raise JobFailed(job_id="j", state="failed", reason="worker lost")
    first, *rest = str(failure.value).splitlines()
    assert "worker lost" in first
    assert rest == ["Last error lines of the job's log:", "out of memory on rank 3", "RuntimeError: rank 3 left"]


def test_a_log_without_errors_adds_nothing() -> None:
    with pytest.raises(JobFailed) as failure, clear_failures(TailedLog({"level": "INFO", "msg": "step 1"})):
        raise JobFailed(job_id="j", state="failed", reason="worker lost")
    assert "step 1" not in str(failure.value)


def test_a_diverged_save_is_not_published(task_run, tmp_path: Path) -> None:
    publish = CortexTrainingPublishOperator(
        task_id="publish", root=str(tmp_path), save="exec/a/b", step=1, loss=float("nan")
    )
    with pytest.raises(AirflowFailException, match="diverged"):
        task_run("publish").execute(publish)
    assert PublicationLog(str(tmp_path)).latest() is None


def test_a_save_that_is_not_there_is_not_published(task_run, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such save"):
        task_run("publish").execute(
            CortexTrainingPublishOperator(task_id="publish", root=str(tmp_path), save="exec/a/b", step=1)
        )


@pytest.mark.parametrize("changes", [{"hardware": "H9000"}, {"sub_jobs": [{**TRAINING, "training_config": None}]}])
def test_a_job_that_the_service_does_not_understand_is_not_asked_for_again(
    task_run, service_connection, changes
) -> None:
    operator = CortexTrainingCreateJobOperator(
        task_id="create", conn_id=service_connection, **{"sub_jobs": [TRAINING], **changes}
    )
    with pytest.raises(AirflowFailException, match=r"answered 400.*snowflake request id"):
        task_run("create").execute(operator)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (CortexTrainingCreateJobOperator, {"sub_jobs": [TRAINING]}),
        (CortexTrainingCancelJobOperator, {"job_id": "j"}),
        (CortexTrainingSaveOperator, {"job_id": "j"}),
        (CortexTrainingWaitForRunningSensor, {"job_id": "j"}),
        (CortexTrainingWaitForRunningSensor, {"job_id": "j", "deferrable": True}),
    ],
)
def test_a_connection_that_does_not_exist_is_not_tried_again(task_run, kind, arguments) -> None:
    operator = kind(**{"task_id": "task", "conn_id": "nowhere", "deferrable": False, **arguments})
    with pytest.raises(AirflowFailException, match="connection 'nowhere' does not exist"):
        task_run("task").execute(operator)
