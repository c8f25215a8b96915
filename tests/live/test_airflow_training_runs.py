"""A training run driven from a triggerer, while what runs it is killed with the reply of a step on its way.

Each time the service has executed the step and nobody knows it: the reply is held back, the process gets SIGKILL with
all its children, and only then the reply is let go, to nobody. The moments are random; the seed is printed.
"""

from __future__ import annotations

import random
import time

import pytest

from cortex_training.publication import PublicationLog
from tests.faults.proxy import HOLD, FaultProxy, Rule
from tests.live.conftest import Night, Run, run_status

STEPS = 12
KILLED = ("triggerer", "scheduler", "triggerer")

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture
def seed() -> int:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    return seed


@pytest.mark.short
def test_every_step_once_through_kills(night: Night, seed: int) -> None:
    chance = random.Random(seed)
    plan = night.plan("run", steps=STEPS)
    # One step of every third of the run.
    thirds = [range(1 + k * STEPS // 3, 1 + (k + 1) * STEPS // 3) for k in range(3)]
    run = night.start("train_only", plan=plan)
    for victim, third in zip(KILLED, thirds, strict=True):
        held = hold_step(night.proxy, chance.choice(third))
        assert held.holding.wait(150), run.why()
        # The run made this job itself, while the task was deferred.
        assert job_link(run).endswith(f"/{run_status(plan).state.job_ids[-1]}")  # type: ignore[union-attr]
        time.sleep(chance.uniform(0.0, 0.5))
        component = run.triggerer_of("train") if victim == "triggerer" else victim
        night.airflow.kill_component(component)
        held.released.set()
        if victim == "triggerer":
            night.airflow.restart_triggerer(component)
        else:
            night.airflow.start_component(component)
    run.wait()

    result, told = run.xcom("train"), run_status(plan)
    assert told is not None
    assert result["global_steps"] == STEPS
    published = [entry.name for entry in PublicationLog(plan["root"]).entries() if entry.step == STEPS]
    assert published == [result["entry"]]
    assert told.epochs >= KILLED.count("triggerer") + 2  # a driver more for each kill; the last is the teardown's
    assert "loss" in run.log("train")
    night.settle(steps=STEPS)


def test_a_worker_is_killed_with_and_without_its_supervisor(night: Night, seed: int) -> None:
    chance = random.Random(seed)
    plan = night.plan("run", steps=8)
    run = night.start("train_on_worker", plan=plan)
    for supervisor_too, steps in ((False, range(1, 4)), (True, range(4, 8))):
        held = hold_step(night.proxy, chance.choice(steps))
        assert held.holding.wait(150), run.why()
        # Airflow counts it for the whole run when any of its tasks is cleared; a retry of this one stays a retry.
        run.clear("cancel")
        night.airflow.kill_task(run.instance("train")["id"], supervisor_too=supervisor_too)
        held.released.set()
    run.wait()
    assert run.xcom("train")["global_steps"] == 8
    assert run.instance("train")["try_number"] == 3
    night.settle(steps=8)


def job_link(run: Run) -> str:
    """What the task's page in the UI links to now."""
    path = f"/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/train/links"
    return str(run.night.airflow.request("GET", path)["extra_links"]["Cortex Training job"])


def hold_step(proxy: FaultProxy, step: int) -> Rule:
    """Hold back the reply of the request that will be the `step`-th step of the test's run."""
    sent = proxy.count(r"POST .*/step$")
    return proxy.add(r"POST .*/step$", HOLD, skip=max(0, step - 1 - sent))
