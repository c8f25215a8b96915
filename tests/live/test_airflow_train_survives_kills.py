"""A training run in the triggerer, which is killed three times while the reply of a step is on its way.

Each time the service has executed the step and nobody knows it: the reply is held back, the triggerer gets SIGKILL with
all its children, and only then the reply is let go, to nobody. The moments are random; the seed is printed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortex_training.client import CortexTrainingClient
from cortex_training.publication import PublicationLog
from cortex_training.states import is_terminal_job
from cortex_training.training import status
from demo.airflow_cluster import AirflowCluster
from tests.faults.proxy import HOLD, FaultProxy, Rule
from tests.live.conftest import QUICK_FAILOVER, cortex_connection, training_plan

STEPS = 12
KILLS = 3

pytestmark = [pytest.mark.live, pytest.mark.short, pytest.mark.timeout(600)]


@pytest.fixture
def seed() -> int:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    return seed


def test_every_step_once_through_three_kills(
    start_airflow: Callable[..., AirflowCluster], local_service: Any, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with FaultProxy(local_service.base_url) as proxy:
        cluster = start_airflow(connections={"ct": cortex_connection(local_service, proxy)}, environment=QUICK_FAILOVER)
        # One step of every third of the run.
        thirds = [range(1 + k * STEPS // KILLS, 1 + (k + 1) * STEPS // KILLS) for k in range(KILLS)]
        run_id = cluster.trigger_dag("train_only", {"plan": training_plan(tmp_path, "run", steps=STEPS)})
        for third in thirds:
            held = _hold_step(proxy, chance.choice(third))
            assert held.holding.wait(120), cluster.task_states("train_only", run_id)
            time.sleep(chance.uniform(0.0, 0.5))
            cluster.kill_triggerer()
            held.released.set()
            cluster.start_triggerer()
        state = cluster.wait_for_run("train_only", run_id, timeout_s=150)
        log = cluster.task_log("train_only", run_id, "train")
        result = cluster.xcom("train_only", run_id, "train")

    assert state == "success", log
    run = status(str(tmp_path / "run"))
    executed = [e["global_steps"] for e in local_service.execution_log() if e["op"] == "step" and _of(run, e)]
    assert executed == list(range(1, STEPS + 1)), f"seed {seed}: {executed}"
    assert run.epochs == KILLS + 2  # one more driver for each kill; the last epoch is the teardown's
    published = [entry for entry in PublicationLog(run.root).entries() if entry.step == STEPS]
    assert [entry.name for entry in published] == [result["entry"]]
    assert result["global_steps"] == STEPS
    assert _jobs_alive(local_service, run) == []
    assert "loss" in log


def _hold_step(proxy: FaultProxy, step: int) -> Rule:
    """Hold back the reply of the request that will be the `step`-th step of the run."""
    sent = proxy.count(r"POST .*/step$")
    return proxy.add(r"POST .*/step$", HOLD, skip=max(0, step - 1 - sent))


def _of(run: Any, entry: dict[str, Any]) -> bool:
    return entry["job_id"] in run.state.job_ids


def _jobs_alive(service: Any, run: Any) -> list[str]:
    with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
        return [job_id for job_id in run.state.job_ids if not is_terminal_job(client.get_job(job_id)["status"])]
