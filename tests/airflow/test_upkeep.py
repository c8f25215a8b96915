"""Logs kept elsewhere, jobs that nobody owns, router replay and the prefix cache, on the real local service."""

from __future__ import annotations

import copy
import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from airflow_cortex_training.experiment_names import default_experiment_name, experiment_prefixes
from airflow_cortex_training.operators.jobs import CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.router_replay import (
    CortexTrainingBootstrapRouterReplayOperator,
    CortexTrainingDiscardRouterReplayOperator,
    CortexTrainingResetPrefixCacheOperator,
)
from airflow_cortex_training.operators.upkeep import (
    CortexTrainingDownloadLogsOperator,
    CortexTrainingSweepJobsOperator,
)
from airflow_cortex_training.triggers.drains import CortexTrainingDrainTrigger
from cortex_training.aio import AsyncCortexTrainingClient
from cortex_training.client import CortexTrainingClient
from cortex_training.errors import ConflictError, DeadlineExceeded
from tests.airflow.conftest import fire, stored
from tests.airflow.test_operators import PARKED, SAMPLING, TRAINING
from tests.faults.proxy import FaultProxy

STILL_SAMPLING = r"POST .*/operation"


@pytest.fixture(scope="module")
def client(local_service):
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        yield client


@pytest.fixture(scope="module")
def job_id(client):
    job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(TRAINING), copy.deepcopy(SAMPLING)]})[
        "job_id"
    ]
    client.wait_for_job(job_id)
    yield job_id
    client.cancel_job(job_id)


class TestDownloadLogs:
    def download(self, conn_id: str, job_id: str, path: object, **arguments: Any) -> Any:
        return CortexTrainingDownloadLogsOperator(
            task_id="logs", conn_id=conn_id, job_id=job_id, path=str(path), **arguments
        )

    def test_the_services_log_of_each_sub_job(self, task_run, service_connection, client, job_id, tmp_path) -> None:
        run = task_run("logs")
        told = run.execute(self.download(service_connection, job_id, tmp_path))
        files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.jsonl"))
        assert files == [
            Path(job_id, f"{job_id}:sampling:0", "service.jsonl"),
            Path(job_id, f"{job_id}:training:0", "service.jsonl"),
        ]
        assert (told["files"], told["missing"], told["path"]) == (2, [], f"{tmp_path}/{job_id}")
        lines = [json.loads(line) for line in (tmp_path / files[1]).read_text().splitlines()]
        assert lines == list(client.stream_logs(job_id, follow=False, sub_job_id=f"{job_id}:training:0"))
        run.retry()
        assert run.execute(self.download(service_connection, job_id, tmp_path)) == told

    def test_into_object_storage(self, task_run, service_connection, job_id, memory) -> None:
        told = task_run("logs").execute(self.download(service_connection, job_id, "memory://logs/nightly"))
        assert memory.cat_file(f"/logs/nightly/{job_id}/{job_id}:training:0/service.jsonl")
        assert told["bytes"] == sum(len(data.getvalue()) for data in memory.store.values())

    def test_what_can_be_fetched_is_when_something_cannot(self, task_run, service_connection, job_id, tmp_path) -> None:
        told = task_run("logs").execute(
            # This connection has no Snowflake account behind it, so there is no stage.
            self.download(service_connection, job_id, tmp_path, logs=["stdout", "service"])
        )
        assert told["files"] >= 2
        assert told["missing"] in ([], ["stdout"])

    def test_files_of_the_experiment_run(self, task_run, service_connection, job_id, tmp_path, monkeypatch) -> None:
        def logs(self: Any, job_id: str) -> list[dict[str, str]]:
            return [{"sub_job_id": f"{job_id}:training:0", "filename": "rank/0.log", "content": "hello"}]

        def stdout(self: Any, job_id: str, folder: Path, **_: Any) -> list[Any]:
            target = Path(folder) / f"{job_id}:training:0" / "stdout.log"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("printed")
            return []

        monkeypatch.setattr(CortexTrainingClient, "fetch_execution_logs", logs)
        monkeypatch.setattr(CortexTrainingClient, "download_stdout_logs", stdout)
        told = task_run("logs").execute(
            self.download(service_connection, job_id, tmp_path, logs=["execution", "stdout"])
        )
        folder = tmp_path / job_id / f"{job_id}:training:0"
        assert (folder / "rank" / "0.log").read_text() == "hello"
        assert (folder / "stdout.log").read_text() == "printed"
        assert told["files"] == 2

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"logs": []}, "logs"),
            ({"logs": ["everything"]}, "logs.*service, execution"),
            ({"path": "/does/not/exist"}, "path"),
            ({"path": ""}, "path"),
            ({"job_id": None}, "job_id"),
        ],
    )
    def test_bad_arguments_are_named(self, task_run, service_connection, job_id, tmp_path, arguments, named) -> None:
        given = {"conn_id": service_connection, "job_id": job_id, "path": str(tmp_path), **arguments}
        with pytest.raises(AirflowFailException, match=f"task logs: {named}"):
            task_run("logs").execute(CortexTrainingDownloadLogsOperator(task_id="logs", **given))

    def test_no_log_at_all_fails(self, task_run, service_connection, tmp_path) -> None:
        with pytest.raises(AirflowFailException, match="never-created"):
            task_run("logs").execute(self.download(service_connection, "never-created", tmp_path))


class TestSweep:
    @pytest.fixture(autouse=True)
    def runs(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        """How many runs of a DAG are under way, as Airflow would tell."""
        under_way: dict[str, int] = {}
        monkeypatch.setattr(
            RuntimeTaskInstance, "get_dr_count", staticmethod(lambda dag_id, states: under_way.get(dag_id, 0))
        )
        return under_way

    @pytest.fixture
    def old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every job is two days old."""
        then = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)).isoformat()
        listed = CortexTrainingClient.list_jobs
        monkeypatch.setattr(
            CortexTrainingClient,
            "list_jobs",
            lambda self, *status: [{**job, "created_at": then} for job in listed(self, *status)],
        )

    @pytest.fixture
    def leftover(self, task_run, service_connection, client):
        """What a run of DAG `dag` left behind."""
        job_id = task_run("create").execute(
            CortexTrainingCreateJobOperator(
                task_id="create", conn_id=service_connection, sub_jobs=[copy.deepcopy(PARKED)]
            )
        )
        yield job_id
        client.cancel_job(job_id)

    def sweep(self, task_run, conn_id: str, **arguments: Any) -> dict[str, Any]:
        return task_run("sweep").execute(CortexTrainingSweepJobsOperator(task_id="sweep", conn_id=conn_id, **arguments))

    def test_an_old_job_of_an_idle_dag_is_cancelled(
        self, task_run, service_connection, client, leftover, job_id, old
    ) -> None:
        told = self.sweep(task_run, service_connection, dag_ids=["dag"], cancel=False)
        assert told == {"found": [leftover], "cancelled": []}
        assert self.sweep(task_run, service_connection, dag_ids="dag") == {"found": [leftover], "cancelled": [leftover]}
        assert client.get_job(leftover)["status"] in ("cancelling", "cancelled", "terminated")
        assert client.get_job(job_id)["status"] == "running"
        assert self.sweep(task_run, service_connection, dag_ids=["dag"])["found"] == []

    def test_a_young_job_is_somebodys(self, task_run, service_connection, leftover) -> None:
        assert self.sweep(task_run, service_connection, dag_ids=["dag"])["found"] == []

    def test_a_dag_that_runs_is_left_alone(self, task_run, service_connection, leftover, runs, old) -> None:
        runs["dag"] = 1
        assert self.sweep(task_run, service_connection, dag_ids=["dag"])["found"] == []

    def test_a_dag_whose_id_begins_with_anothers_is_another_dag(
        self, task_run, service_connection, leftover, old
    ) -> None:
        assert self.sweep(task_run, service_connection, dag_ids=["da"])["found"] == []
        assert self.sweep(task_run, service_connection, experiments=["dag_manual"])["found"] == [leftover]

    def test_jobs_of_an_unfinished_run_are_owned(
        self, task_run, service_connection, leftover, old, tmp_path, monkeypatch
    ) -> None:
        from cortex_training.training import sweep

        def owned(roots: list[str], credentials: str | None = None) -> frozenset[str]:
            assert list(roots) == [str(tmp_path)]
            return frozenset({leftover})

        monkeypatch.setattr(sweep, "owned_jobs", owned)
        assert self.sweep(task_run, service_connection, dag_ids=["dag"], run_roots=[str(tmp_path)])["found"] == []

    def test_a_root_that_is_not_there_is_no_licence(self, task_run, service_connection, leftover, old) -> None:
        with pytest.raises(Exception, match="/not/mounted"):
            self.sweep(task_run, service_connection, dag_ids=["dag"], run_roots=["/not/mounted"])

    @pytest.mark.parametrize(
        ("arguments", "named"), [({}, "whose jobs"), ({"dag_ids": ["dag"], "older_than_s": 0}, "older_than_s")]
    )
    def test_bad_arguments_cancel_nothing(self, task_run, service_connection, arguments, named) -> None:
        with pytest.raises(AirflowFailException, match=named):
            self.sweep(task_run, service_connection, **arguments)

    def test_default_names_are_recognised(self, task_run) -> None:
        name = default_experiment_name(task_run("any").context())
        assert name.startswith(tuple(experiment_prefixes("dag")))
        assert not name.startswith(tuple(experiment_prefixes("d")))


class TestSamplingSide:
    def test_the_prefix_cache(self, task_run, service_connection, job_id) -> None:
        reset = CortexTrainingResetPrefixCacheOperator(task_id="reset", conn_id=service_connection, job_id=job_id)
        run = task_run("reset")
        assert run.execute(reset) == {"job_id": job_id}
        run.retry()
        assert run.execute(reset) == {"job_id": job_id}

    @pytest.mark.parametrize("deferrable", [True, False])
    def test_a_cache_is_emptied_when_sampling_has_drained(
        self, task_run, connection, local_service, job_id, no_grace, deferrable
    ) -> None:
        with FaultProxy(local_service.base_url) as proxy:
            run, reset = task_run("reset"), self._reset(connection, local_service, proxy, job_id, deferrable)
            proxy.add(STILL_SAMPLING, "answer", times=2 if deferrable else 0, status=409, body={"message": "sampling"})
            assert run.execute(reset) == {"job_id": job_id}
            assert proxy.count(STILL_SAMPLING) == (3 if deferrable else 1)
        assert [event["status"] for event in run.events] == (["settled"] if deferrable else [])

    @pytest.mark.parametrize("deferrable", [True, False])
    def test_sampling_that_does_not_drain_is_given_up(
        self, task_run, connection, local_service, job_id, no_grace, deferrable
    ) -> None:
        with FaultProxy(local_service.base_url) as proxy:
            reset = self._reset(connection, local_service, proxy, job_id, deferrable, drain_timeout_s=1.0)
            proxy.add(STILL_SAMPLING, "answer", times=1000, status=409, body={"message": "sampling"})
            with pytest.raises(DeadlineExceeded, match=f"{job_id}: it was still sampling after 1 s"):
                task_run("reset").execute(reset)

    @pytest.mark.parametrize("deferrable", [True, False])
    def test_a_job_that_ended_fails_the_drain_for_good(
        self, task_run, connection, local_service, client, deferrable
    ) -> None:
        job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(PARKED)]})["job_id"]
        with FaultProxy(local_service.base_url) as proxy:
            reset = self._reset(connection, local_service, proxy, job_id, deferrable)
            proxy.add(STILL_SAMPLING, "answer", times=1000, status=409, body={"message": "sampling"})
            client.cancel_job(job_id)
            with pytest.raises(AirflowFailException, match=f"{job_id} is 'cancel"):
                task_run("reset").execute(reset)

    async def test_a_trigger_of_a_drain_tells_of_an_ended_job(self, service_connection, client) -> None:
        job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(PARKED)]})["job_id"]
        client.cancel_job(job_id)
        now = time.time()
        trigger = CortexTrainingDrainTrigger(
            target={"conn_id": service_connection},
            job_id=job_id,
            sub_job_id=None,
            started=now,
            not_before=now,
            deadline=now + 30,
        )
        told = await fire(stored(trigger))
        assert told["status"] == "ended"
        assert told["state"].startswith(("cancel", "terminat"))

    def test_a_drain_that_became_a_request_is_waited_for(
        self, task_run, service_connection, client, job_id, no_grace, monkeypatch
    ) -> None:
        sent: list[str] = []

        def busy(self: CortexTrainingClient, job_id: str, **_: Any) -> dict[str, Any]:
            raise ConflictError(status=409, message="sampling")

        async def as_request(self: AsyncCortexTrainingClient, job_id: str, **_: Any) -> dict[str, Any]:
            sent.append(client.save(job_id, None, "resumable"))
            return {"request_id": sent[-1]}

        monkeypatch.setattr(CortexTrainingClient, "reset_prefix_cache", busy)
        monkeypatch.setattr(AsyncCortexTrainingClient, "reset_prefix_cache", as_request)
        reset = CortexTrainingResetPrefixCacheOperator(
            task_id="reset",
            conn_id=service_connection,
            job_id=job_id,
            deferrable=True,
            inline_s=60.0,
            drain_timeout_s=90.0,
        )
        run = task_run("reset")
        assert run.execute(reset) == {"job_id": job_id}
        assert run.store.get("cortex_training")["request_id"] == sent[0]
        assert len(sent) == 1

    @staticmethod
    def _reset(
        connection, local_service, proxy, job_id: str, deferrable: bool, **arguments: Any
    ) -> CortexTrainingResetPrefixCacheOperator:
        conn_id = connection(
            "behind", host=proxy.base_url, database=local_service.database, schema=local_service.schema
        )
        return CortexTrainingResetPrefixCacheOperator(
            task_id="reset", conn_id=conn_id, job_id=job_id, deferrable=deferrable, inline_s=0.1, **arguments
        )

    def test_router_replay(self, task_run, service_connection, job_id) -> None:
        bootstrap = CortexTrainingBootstrapRouterReplayOperator(
            task_id="bootstrap", conn_id=service_connection, job_id=job_id, max_cache_bytes=1 << 20
        )
        assert task_run("bootstrap").execute(bootstrap) == {
            "job_id": job_id,
            "source_sub_job_id": f"{job_id}:sampling:0",
            "target_sub_job_id": f"{job_id}:training:0",
        }
        for sample_ids in (["a", "b"], []):
            discard = CortexTrainingDiscardRouterReplayOperator(
                task_id="discard", conn_id=service_connection, job_id=job_id, sample_ids=sample_ids
            )
            assert task_run("discard").execute(discard) == {"job_id": job_id, "samples": len(sample_ids)}

    def test_a_deployment_that_makes_a_request_of_it_is_waited_for(
        self, task_run, service_connection, client, job_id, no_grace, monkeypatch
    ) -> None:
        sent: list[str] = []

        def as_request(self: CortexTrainingClient, job_id: str, *_: Any, **__: Any) -> dict[str, Any]:
            # Any request of the job will do: what the reply says is what is waited for.
            sent.append(self.save(job_id, None, "resumable"))
            return {"request_id": sent[-1]}

        monkeypatch.setattr(CortexTrainingClient, "bootstrap_router_replay", as_request)
        run = task_run("bootstrap")
        bootstrap = CortexTrainingBootstrapRouterReplayOperator(
            task_id="bootstrap", conn_id=service_connection, job_id=job_id, deferrable=True, inline_s=0.0
        )
        assert run.execute(bootstrap)["target_sub_job_id"] == f"{job_id}:training:0"
        assert [event["request_id"] for event in run.events] == sent
        run.retry()
        run.execute(bootstrap)
        assert len(sent) == 1

    def test_a_job_without_a_training_side_is_named(self, task_run, service_connection, client) -> None:
        job_id = client.create_job_from_body({"sub_job_configs": [copy.deepcopy(PARKED)]})["job_id"]
        bootstrap = CortexTrainingBootstrapRouterReplayOperator(
            task_id="bootstrap", conn_id=service_connection, job_id=job_id
        )
        with pytest.raises(AirflowFailException, match=f"{job_id}.*a training and a sampling sub-job"):
            task_run("bootstrap").execute(bootstrap)
        client.cancel_job(job_id)

    def test_one_text_is_no_list_of_samples(self, task_run, service_connection, job_id) -> None:
        discard = CortexTrainingDiscardRouterReplayOperator(
            task_id="discard", conn_id=service_connection, job_id=job_id, sample_ids="abc"
        )
        with pytest.raises(AirflowFailException, match="sample_ids"):
            task_run("discard").execute(discard)
