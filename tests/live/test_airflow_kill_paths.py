"""What may cancel a job of a deferred training run, and what may not, on a real cluster."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortex_training.client import CortexTrainingClient
from cortex_training.publication import PosixStore
from cortex_training.states import is_terminal_job
from cortex_training.training import status
from cortex_training.training.journal import read_journal
from demo.airflow_cluster import AirflowCluster
from tests.faults.proxy import FaultProxy
from tests.live.conftest import QUICK_FAILOVER, cortex_connection, training_plan

DAG_ID = "train_only"
ENDLESS = 100_000

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_only_a_user_cancels_the_job_of_a_deferred_run(
    start_airflow: Callable[..., AirflowCluster], local_service: Any, tmp_path: Path
) -> None:
    with FaultProxy(local_service.base_url) as proxy, _client(local_service) as client:
        airflow = start_airflow(connections={"ct": cortex_connection(local_service, proxy)}, environment=QUICK_FAILOVER)

        # Deployments stop the triggerer: nothing is cancelled, the run is released and goes on in the same job.
        first = training_plan(tmp_path, "first", steps=ENDLESS)
        first_run = airflow.trigger_dag(DAG_ID, {"plan": first})
        _wait(lambda: _step(first) > 2)
        second = training_plan(tmp_path, "second", steps=ENDLESS)
        second_run = airflow.trigger_dag(DAG_ID, {"plan": second})
        _wait(lambda: _step(second) > 2)
        airflow.kill_triggerer(signal.SIGTERM)
        assert [_last_record(plan) for plan in (first, second)] == ["released", "released"]
        assert proxy.count(":cancel") == 0
        stopped_at = _step(first), _step(second)
        airflow.start_triggerer()
        _wait(lambda: _step(first) > stopped_at[0] and _step(second) > stopped_at[1])
        assert [len(_jobs(plan)) for plan in (first, second)] == [1, 1]

        # A user clears one task: its old job is cancelled, it goes on in a new one, the other run does not notice.
        airflow.clear_tasks(DAG_ID, first_run, ["train"])
        _wait(lambda: len(_jobs(first)) == 2)
        old, new = _jobs(first)
        _wait(lambda: is_terminal_job(client.get_job(old)["status"]))
        began_at = _step(first)
        _wait(lambda: _step(first) > began_at)
        assert client.get_job(new)["status"] == "running"
        (bystander,) = _jobs(second)
        assert client.get_job(bystander)["status"] == "running"
        assert 1 <= proxy.count(f"{old}:cancel") <= 2

        # A user marks it failed: the job it has now is cancelled, and only that one.
        airflow.set_task_state(DAG_ID, first_run, "train", "failed")
        _wait(lambda: is_terminal_job(client.get_job(new)["status"]))
        assert 1 <= proxy.count(f"{new}:cancel") <= 2
        assert client.get_job(bystander)["status"] == "running"
        assert proxy.count(f"{bystander}:cancel") == 0
        assert airflow.wait_for_run(DAG_ID, first_run, timeout_s=60) == "success"  # its last task cancels, and did

        airflow.set_task_state(DAG_ID, second_run, "train", "failed")
        _wait(lambda: is_terminal_job(client.get_job(bystander)["status"]))


def _client(service: Any) -> CortexTrainingClient:
    return CortexTrainingClient(service.base_url, service.database, service.schema)


def _wait(condition: Callable[[], bool], timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.3)


def _step(plan: dict[str, Any]) -> int:
    """Steps that the present segment of the run has confirmed; -1 when no run was begun."""
    try:
        current = status(plan["root"]).state.current
    except Exception:
        return -1
    return current.confirmed_step if current else -1


def _jobs(plan: dict[str, Any]) -> list[str]:
    return status(plan["root"]).state.job_ids


def _last_record(plan: dict[str, Any]) -> str:
    return read_journal(PosixStore(plan["root"]))[-1].type
