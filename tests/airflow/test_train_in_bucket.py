"""A training run whose root is in a bucket, with credentials that an Airflow connection holds."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import replace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.operators.upkeep import CortexTrainingSweepJobsOperator
from airflow_cortex_training.run_folder import is_let_go, is_over
from cortex_training.client import CortexTrainingClient
from cortex_training.publication import open_store
from cortex_training.states import is_terminal_job
from cortex_training.training import TrainingPlan, status
from tests.airflow.conftest import fire, stored
from tests.airflow.test_train import defer, plan, train


@pytest.fixture
def root(s3_server: Any) -> str:
    bucket = f"runs-{secrets.token_hex(6)}"
    s3_server.client().create_bucket(Bucket=bucket)
    return f"s3://{bucket}/team/run"


def alive(service: Any, job_ids: list[str]) -> list[str]:
    with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
        return [job_id for job_id in job_ids if not is_terminal_job(client.get_job(job_id)["status"])]


@pytest.mark.parametrize("deferrable", [True, False])
def test_it_trains_and_a_clear_starts_beside_what_is_over(
    task_run, service_connection, local_service, manifest, root, bucket_credentials, s3_server, no_grace, deferrable
) -> None:
    """A pass of two steps: only the data says that the run is over."""
    given = plan(root, manifest, steps=0, passes=0.02, credentials=bucket_credentials)
    run = task_run("train")
    first = run.execute(train(service_connection, given, deferrable=deferrable))
    assert (first["steps"] > 0, first["segments"], first["root"]) == (True, 1, root)
    assert status(root, bucket_credentials).entry == first["entry"]
    run.retry()
    assert run.execute(train(service_connection, given, deferrable=deferrable))["entry"] == first["entry"]
    run.clear()
    second = run.execute(train(service_connection, given, deferrable=deferrable))
    assert (second["root"], second["steps"]) == (f"{root}-r2", first["steps"])
    told = json.dumps([run.xcoms, run.store.writes, run.events, [stored(d.trigger).serialize() for d in run.deferrals]])
    assert s3_server.secret_access_key not in told
    assert all(len(json.dumps(d.trigger.serialize())) < 1000 for d in run.deferrals)


def test_a_clear_goes_on_with_a_run_that_is_not_over(
    task_run, service_connection, local_service, manifest, root, bucket_credentials, no_grace
) -> None:
    run = task_run("train")
    run.execute(train(service_connection, plan(root, manifest, credentials=bucket_credentials)))
    run.clear()
    more = run.execute(train(service_connection, plan(root, manifest, steps=6, credentials=bucket_credentials)))
    assert (more["root"], more["steps"], more["segments"]) == (root, 6, 2)


def test_jobs_are_found_and_cancelled_through_the_bucket(
    task_run, service_connection, local_service, manifest, root, bucket_credentials, no_grace
) -> None:
    given = plan(root, manifest, when_done="keep", credentials=bucket_credentials)
    result = task_run("train").execute(train(service_connection, given))
    assert alive(local_service, [result["job_id"]]) == [result["job_id"]]
    sweep = CortexTrainingSweepJobsOperator(
        task_id="sweep",
        conn_id=service_connection,
        experiments=["nobody's"],
        run_roots=[root],
        credentials=bucket_credentials,
    )
    assert task_run("sweep").execute(sweep) == {"found": [], "cancelled": []}
    cancel = CortexTrainingCancelJobOperator(
        task_id="cancel", conn_id=service_connection, root=root, credentials=bucket_credentials
    )
    assert task_run("cancel").execute(cancel) == [result["job_id"]]
    assert alive(local_service, [result["job_id"]]) == []
    # The driver is told that the run was ended; nobody may take it for one that waits for a driver.
    assert not is_let_go(root, "any", bucket_credentials)
    assert (
        task_run("cancel").execute(
            CortexTrainingCancelJobOperator(
                task_id="cancel", conn_id=service_connection, root=f"{root}-unborn", credentials=bucket_credentials
            )
        )
        == []
    )


def test_the_worker_that_takes_over_after_the_trigger_ends_jobs_through_the_bucket(
    task_run, service_connection, local_service, manifest, root, bucket_credentials, no_grace
) -> None:
    operator = train(service_connection, plan(root, manifest, when_done="keep", credentials=bucket_credentials))
    run = task_run("train")
    deferral = defer(operator, run)
    job_id = asyncio.run(fire(stored(deferral.trigger)))["result"]["job_id"]
    event = {"status": "failed", "permanent": True, "error": "told", "root": root}
    again = train(service_connection, plan(root, manifest, credentials=bucket_credentials))
    with pytest.raises(AirflowFailException, match="told"):
        again.resume_execution(deferral.method_name, {**deferral.kwargs, "event": event}, run.context())
    assert alive(local_service, [job_id]) == []


def test_without_its_connection_the_triggerer_says_so(
    task_run, service_connection, manifest, root, bucket_credentials, no_grace, monkeypatch
) -> None:
    trigger = defer(
        train(service_connection, plan(root, manifest, credentials=bucket_credentials)), task_run("train")
    ).trigger
    monkeypatch.delenv("AIRFLOW_CONN_BUCKET")
    event = asyncio.run(fire(stored(trigger)))
    assert (event["status"], event["permanent"]) == ("failed", False)
    assert "'bucket'" in event["error"]


class TestBeingOver:
    """Which runs a cleared task goes on with."""

    @pytest.fixture
    def trained(self, task_run, service_connection, manifest, tmp_path, no_grace) -> Any:
        value = plan(str(tmp_path / "run"), manifest)
        operator = CortexTrainingTrainOperator(
            task_id="train", conn_id=service_connection, plan=value, deferrable=False
        )
        task_run("train").execute(operator)
        return TrainingPlan.from_dict(value)

    def test_by_its_steps_and_passes(self, trained: TrainingPlan) -> None:
        assert is_over(trained)
        assert not is_over(replace(trained, steps=9))
        assert is_over(replace(trained, steps=0, passes=0.01))
        assert not is_over(replace(trained, steps=0, passes=2.0))
        assert not is_over(replace(trained, root=f"{trained.root}-unborn"))

    def test_by_what_the_plan_does_after_a_divergence(self, trained: TrainingPlan) -> None:
        from cortex_training.publication import PublicationLog
        from cortex_training.training import Divergence
        from cortex_training.training.journal import JournalWriter
        from cortex_training.training.teardown import take_away

        take_away(trained.root)
        store = open_store(trained.root)
        epoch = PublicationLog(store).claim_epoch({})
        JournalWriter.take_over(store, epoch.number, epoch.token, {"info": {}}).append(
            "diverged", {"step": 3, "loss": "nan"}
        )
        assert is_over(replace(trained, steps=9))
        assert not is_over(replace(trained, steps=9, divergence=Divergence(action="rollback")))
        assert is_over(replace(trained, steps=9, divergence=Divergence(action="rollback", max_rollbacks=0)))
