"""The helper that puts a job around tasks, as the DAG's structure tells, and a run of it in one process."""

from __future__ import annotations

import datetime
import json

import pytest
from airflow.sdk import DAG, TaskGroup, task

from airflow_cortex_training.job_group import JobGroup, cortex_training_job
from cortex_training.client import CortexTrainingClient
from tests.airflow.test_operators import SAMPLING

DAY = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def dag() -> DAG:
    with DAG("around", schedule=None, start_date=DAY) as dag:

        @task
        def inside(job_id: str) -> str:
            return job_id

        @task
        def alone() -> None:
            return None

        @task
        def after() -> None:
            return None

        with cortex_training_job(sub_jobs=[{"job_type": "sampling"}], root="/mnt/run", idle_timeout_seconds=60) as job:
            assert isinstance(job, JobGroup)
            inside(job.job_id)
            with TaskGroup("deeper"):
                alone()
        job.group >> after()
    return dag


def test_setups_come_first_and_the_teardown_last(dag: DAG) -> None:
    create, wait, cancel = (
        dag.get_task(f"cortex_training_job.{name}") for name in ("create_job", "wait_until_running", "cancel_job")
    )
    assert create.is_setup
    assert wait.is_setup
    assert cancel.is_teardown
    assert wait.upstream_task_ids == {create.task_id}
    for work in ("cortex_training_job.inside", "cortex_training_job.deeper.alone"):
        assert dag.get_task(work).upstream_task_ids >= {wait.task_id}
        assert cancel.upstream_task_ids >= {work}
    # At least one setup succeeded: a job that was created and never ran is cancelled as well.
    assert cancel.trigger_rule == "all_done_setup_success"
    assert cancel.upstream_task_ids >= {create.task_id, wait.task_id}
    assert not cancel.on_failure_fail_dagrun


def test_what_comes_after_does_not_wait_for_the_teardown(dag: DAG) -> None:
    assert dag.get_task("after").upstream_task_ids == {
        "cortex_training_job.inside",
        "cortex_training_job.deeper.alone",
    }


def test_arguments_reach_their_tasks(dag: DAG) -> None:
    assert dag.get_task("cortex_training_job.create_job").idle_timeout_seconds == 60
    assert dag.get_task("cortex_training_job.cancel_job").root == "/mnt/run"


def test_it_survives_serialisation(dag: DAG) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    stored = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    again = DagSerialization.from_dict(stored)
    assert again.get_task("cortex_training_job.cancel_job").is_teardown
    links = again.get_task("cortex_training_job.create_job").operator_extra_links
    assert [link.name for link in links] == ["Cortex Training job"]


def test_two_groups_have_two_jobs() -> None:
    with DAG("two", schedule=None, start_date=DAY) as dag:
        for name in ("student", "teacher"):
            with cortex_training_job(name, sub_jobs=[{"job_type": "sampling"}]):

                @task
                def work() -> None:
                    return None

                work()
    for name in ("student", "teacher"):
        upstream = dag.get_task(f"{name}.cancel_job").upstream_task_ids
        assert all(task_id.startswith(f"{name}.") for task_id in upstream)


def test_the_job_is_created_and_cancelled_by_its_tasks(task_run, service_connection, local_service) -> None:
    with (
        DAG("real", schedule=None, start_date=DAY),
        cortex_training_job(sub_jobs=[dict(SAMPLING)], wait_timeout_s=200) as job,
    ):
        pass
    for operator in (job.create, job.wait, job.cancel):
        operator.conn_id = service_connection
    job.wait.deferrable = False
    job.wait.poke_interval = 0.1
    job_id = task_run("create_job").execute(job.create)
    job.wait.job_id = job.cancel.job_id = job_id
    assert task_run("wait").execute(job.wait) == job_id
    assert task_run("cancel").execute(job.cancel) == [job_id]
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        assert client.get_job(job_id)["status"] in ("cancelling", "cancelled", "terminated")
