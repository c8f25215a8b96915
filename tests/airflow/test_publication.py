"""Exports, publications and their upkeep in directories, in buckets, and in object storage that only Airflow knows."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_cortex_training.object_storage import ObjectFolder
from airflow_cortex_training.operators.checkpoints import (
    CortexTrainingDeleteCheckpointOperator,
    CortexTrainingExportOperator,
    CortexTrainingPublishOperator,
)
from airflow_cortex_training.operators.publication import (
    CortexTrainingPruneOperator,
    CortexTrainingResolveOperator,
    NothingPublished,
)
from airflow_cortex_training.roots import open_log, open_root
from airflow_cortex_training.sensors.publication import CortexTrainingCheckpointPublishedSensor
from cortex_training.client import CortexTrainingClient
from cortex_training.errors import ConfigurationError
from cortex_training.publication import PublicationLog, SaveManifest, into_store
from tests.airflow.test_operators import TRAINING


@pytest.fixture(scope="module")
def saved(local_service) -> Iterator[tuple[str, str]]:
    """A job and a weights-only checkpoint of it."""
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING)]})["job_id"]
        client.wait_for_job(job_id)
        client.poll_request(job_id, client.save(job_id, None, "weights-only"))
        (checkpoint,) = client.list_checkpoints(job_id)
        yield job_id, checkpoint["checkpoint_id"]
        client.cancel_job(job_id)


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Arguments that name a root."""
    if request.param == "directory":
        return {"root": str(tmp_path)}
    credentials = request.getfixturevalue("bucket_credentials")
    return {"root": request.getfixturevalue("s3_root"), "credentials": credentials}


def export(conn_id: str, saved: tuple[str, str], **arguments: Any) -> CortexTrainingExportOperator:
    job_id, checkpoint_id = saved
    return CortexTrainingExportOperator(
        task_id="export", conn_id=conn_id, job_id=job_id, checkpoint_id=checkpoint_id, **arguments
    )


class TestPipeline:
    def test_export_publish_resolve_wait_prune(self, task_run, service_connection, saved, place) -> None:
        with pytest.raises(NothingPublished, match="nothing is published"):
            task_run("resolve").execute(CortexTrainingResolveOperator(task_id="resolve", **place))
        with pytest.raises(AirflowSkipException):
            task_run("resolve").execute(CortexTrainingResolveOperator(task_id="resolve", missing="skip", **place))

        entries = []
        for step in range(1, 5):
            run = task_run("export")
            run.clear_number = step
            exported = run.execute(export(service_connection, saved, **place))
            publish = CortexTrainingPublishOperator(
                task_id="publish", save=exported["save"], epoch=exported["epoch"], step=step, **place
            )
            entries.append(task_run("publish").execute(publish)["entry"])

        resolved = task_run("resolve").execute(CortexTrainingResolveOperator(task_id="resolve", min_step=4, **place))
        assert resolved["entry"] == entries[-1]
        assert (resolved["job_id"], resolved["checkpoint_id"]) == saved
        assert resolved["location"].startswith(place["root"])
        with pytest.raises(NothingPublished, match="the latest is step 4; at least step 5"):
            task_run("resolve").execute(CortexTrainingResolveOperator(task_id="resolve", min_step=5, **place))

        sensor = CortexTrainingCheckpointPublishedSensor(
            task_id="wait", after=entries[2], deferrable=True, inline_s=5.0, **place
        )
        assert task_run("wait").execute(sensor)["entry"] == entries[-1]

        prune = CortexTrainingPruneOperator(task_id="prune", keep=2, **place)
        run = task_run("prune")
        assert run.execute(prune) == {"removed": 2, "kept": 2, "latest": entries[-1]}
        run.retry()
        assert run.execute(prune) == {"removed": 0, "kept": 2, "latest": entries[-1]}
        log = open_log(**place)
        for entry in log.entries():
            for file in SaveManifest.read(log.store, entry.save).files:
                assert log.store.exists(f"{entry.save}/{file.path}")

    @pytest.mark.parametrize("keep", [0, -1, "none"])
    def test_a_prune_that_would_keep_nothing_is_refused(self, task_run, tmp_path, keep) -> None:
        with pytest.raises((AirflowFailException, ValueError)):
            task_run("prune").execute(CortexTrainingPruneOperator(task_id="prune", root=str(tmp_path), keep=keep))

    def test_a_save_without_a_manifest_is_resolved_all_the_same(self, task_run, tmp_path) -> None:
        (tmp_path / "exec" / "trainer" / "step-7").mkdir(parents=True)
        PublicationLog(str(tmp_path)).publish("exec/trainer/step-7", 1, 7)
        resolved = task_run("resolve").execute(CortexTrainingResolveOperator(task_id="resolve", root=str(tmp_path)))
        assert resolved["step"] == 7
        assert "job_id" not in resolved


class TestRoots:
    def test_credentials_come_from_the_first_source_that_answers(self, s3_root, bucket_credentials) -> None:
        store = open_root(s3_root, f"airflow:not_there,{bucket_credentials}")
        assert store.opened_with == "airflow:bucket"

    def test_the_secret_is_masked_and_in_no_representation(
        self, s3_server, s3_root, bucket_credentials, monkeypatch
    ) -> None:
        masked: list[str] = []
        monkeypatch.setattr("airflow_cortex_training.roots.mask_secret", masked.append)
        store = open_root(s3_root, bucket_credentials)
        assert s3_server.secret_access_key in masked
        assert s3_server.secret_access_key not in repr(store)

    @pytest.mark.parametrize(
        ("root", "credentials", "named"),
        [
            ("", None, "root"),
            ("gs://bucket/x", None, "gs"),
            ("s3://bucket/x", None, "needs credentials"),
            ("s3://bucket/x", "airflow:not_there", "no connection 'not_there'"),
            ("s3://bucket/x", "nonsense", "part 1 of the list is not kind:location"),
        ],
    )
    def test_what_cannot_be_opened_is_named(self, root, credentials, named) -> None:
        with pytest.raises(Exception, match=named):
            open_root(root, credentials)


class TestExportToObjectStorage:
    def test_files_arrive_with_their_checksums(self, task_run, service_connection, saved, memory) -> None:
        exported = task_run("export").execute(
            export(service_connection, saved, path="memory://models/nightly", metrics={"loss": 1.5})
        )
        manifest = SaveManifest.from_bytes(memory.cat_file("/models/nightly/.cortex-save.json"), "memory")
        assert (manifest.job_id, manifest.checkpoint_id) == saved
        assert manifest.metrics == {"loss": 1.5}
        assert exported["files"] == len(manifest.files) > 1
        assert "save" not in exported
        for file in manifest.files:
            data = memory.cat_file(f"/models/nightly/{file.path}")
            assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.sha256)
        assert "https://" not in json.dumps(exported)

    def test_a_directory_is_a_path_too(self, task_run, service_connection, saved, tmp_path) -> None:
        exported = task_run("export").execute(export(service_connection, saved, path=f"file://{tmp_path}/nightly"))
        assert exported["path"] == f"{tmp_path}/nightly"
        assert (tmp_path / "nightly" / ".cortex-save.json").is_file()

    @pytest.mark.parametrize("where", ["object storage", "bucket"])
    def test_a_retry_goes_on_at_the_first_missing_file(
        self, task_run, service_connection, saved, memory, monkeypatch, where, request
    ) -> None:
        if where == "bucket":
            credentials = request.getfixturevalue("bucket_credentials")
            place = {"root": request.getfixturevalue("s3_root"), "credentials": credentials}
        else:
            place = {"path": "memory://models/resumed"}
        fetched: list[str] = []
        dies_at: list[int] = [2]
        original = into_store.download_checkpoint

        def watched(client: Any, *arguments: Any, **options: Any) -> Any:
            if len(fetched) in dies_at:
                dies_at.clear()
                raise OSError("the worker died")
            files = original(client, *arguments, **options)
            fetched.extend(file.path for file in files)
            return files

        monkeypatch.setattr(into_store, "download_checkpoint", watched)
        run = task_run("export")
        with pytest.raises(OSError, match="died"):
            run.execute(export(service_connection, saved, **place))
        run.retry()
        exported = run.execute(export(service_connection, saved, **place))
        assert len(fetched) == len(set(fetched)) == exported["files"]

    def test_another_checkpoint_does_not_mix_with_the_one_that_was_there(
        self, task_run, service_connection, saved, memory, local_service
    ) -> None:
        job_id, _ = saved
        task_run("export").execute(export(service_connection, saved, path="memory://models/latest"))
        with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
            result = client.poll_request(job_id, client.save(job_id, None, "weights-only"))
        other = (job_id, str(result["checkpoint_id"]))
        task_run("export").execute(export(service_connection, other, path="memory://models/latest"))
        manifest = SaveManifest.from_bytes(memory.cat_file("/models/latest/.cortex-save.json"), "memory")
        assert manifest.checkpoint_id == other[1]

    def test_a_short_upload_is_noticed(self, memory, monkeypatch) -> None:
        folder = ObjectFolder("path", "memory://models")
        monkeypatch.setattr(type(memory), "size", lambda self, path: 1)
        with pytest.raises(Exception, match="1 bytes are there, 5 were sent"), folder.staged("x") as staged:
            (Path(staged) / "file").write_bytes(b"12345")

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({}, "exactly one"),
            ({"root": "/r", "path": "/p"}, "exactly one"),
            ({"path": "nowhere://bucket/x"}, "path"),
            ({"path": "s3://user:hunter2@bucket/x"}, "holds a password"),
            ({"path": "memory://"}, "a folder inside"),
        ],
    )
    def test_bad_places_are_named(self, task_run, service_connection, saved, arguments, named) -> None:
        with pytest.raises(AirflowFailException, match=named) as refusal:
            task_run("export").execute(export(service_connection, saved, **arguments))
        assert "hunter2" not in str(refusal.value)


class TestDeleteCheckpoint:
    @pytest.fixture
    def checkpoint(self, saved, local_service) -> dict[str, str]:
        with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
            client.poll_request(saved[0], client.save(saved[0], None, "resumable"))
            newest = client.list_checkpoints(saved[0])[-1]
        return {"job_id": saved[0], "checkpoint_id": newest["checkpoint_id"]}

    def test_a_retry_of_a_deletion_succeeds(self, task_run, service_connection, checkpoint) -> None:
        delete = CortexTrainingDeleteCheckpointOperator(task_id="delete", conn_id=service_connection, **checkpoint)
        run = task_run("delete")
        assert run.execute(delete) == {**checkpoint, "deleted": True}
        run.retry()
        assert run.execute(delete) == {**checkpoint, "deleted": False}
        run.clear()
        assert run.execute(delete) == {**checkpoint, "deleted": False}

    def test_what_never_was_fails_on_every_try(self, task_run, service_connection, checkpoint) -> None:
        delete = CortexTrainingDeleteCheckpointOperator(
            task_id="delete",
            conn_id=service_connection,
            job_id=checkpoint["job_id"],
            checkpoint_id="cp_00000000-0000-0000-0000-000000000000",
        )
        run = task_run("delete")
        for _ in range(2):
            with pytest.raises(AirflowFailException, match="cp_00000000"):
                run.execute(delete)
            run.retry()


def test_an_unknown_way_of_missing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="missing"):
        CortexTrainingResolveOperator(task_id="resolve", root="/r", missing="explode")
