"""The nightly DAG on its worst night: at ten random moments a worker or a triggerer is killed with a reply held back.

What is held is always the reply of something that cost: a step, driven from the triggerer or from a worker, or an
operation that a worker asked for. The service has done it, nobody knows, and whoever asked is dead. Afterwards every
step is there once, the checkpoint is published, one job was paid for in each run, and none is left.

``NIGHT_SEED=7`` repeats the moments of a seed that a failure named.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from cortex_training.publication import PublicationLog
from demo.rows import load_rows, standard_library_rows
from tests.faults.proxy import HOLD, Rule
from tests.live.conftest import Night, Run
from tests.live.test_airflow_training_runs import hold_step

STEPS = 25
IN_THE_TRIGGERER = 4
ON_THE_WORKER = 4

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("NIGHT_SEED") or random.SystemRandom().randrange(2**32))
    print(f"NIGHT_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def loaded(snowflake: Any) -> None:
    with snowflake.connect() as connection:
        load_rows(connection, standard_library_rows()[:400])


def test_the_nightly_dag_through_ten_kills(night: Night, loaded: None, chance: random.Random) -> None:
    root = night.folder / "shared"
    root.mkdir()
    # Of what workers ask for, the two operations that nobody else asks for in this run: a job, a weight sync.
    creation = night.proxy.add(r"POST .*/cortex-training$", HOLD)
    weight_sync = night.proxy.add(r"POST .*/operation$", HOLD)
    run = night.start(
        "finetune_from_snowflake",
        cortex_conn_id=night.conn_id,
        root=str(root),
        steps=STEPS,
        save_every_steps=5,
    )
    kill_worker(run, "create_job", creation, chance)
    steps = sorted(chance.sample(range(1, STEPS + 1), IN_THE_TRIGGERER))
    held = hold_step(night.proxy, steps[0])
    for following in [*steps[1:], None]:
        assert held.holding.wait(240), run.why()
        time.sleep(chance.uniform(0.0, 1.0))
        component = run.triggerer_of("train")
        night.airflow.kill_component(component)
        held.released.set()
        # While nobody drives the run: a triggerer takes so long to start that the other one may be at work by then.
        if following is not None:
            held = hold_step(night.proxy, following)
        night.airflow.restart_triggerer(component)
    kill_worker(run, "weight_sync", weight_sync, chance)
    run.wait(timeout_s=900)

    published = run.xcom("publish")
    latest = PublicationLog(str(root / "models")).latest()
    assert latest is not None
    assert latest.name == published["entry"]
    assert latest.step == STEPS
    night.settle(steps=STEPS)


def test_a_training_on_a_worker_through_its_share_of_kills(night: Night, chance: random.Random) -> None:
    plan = night.plan("run", steps=STEPS)
    run = night.start("train_on_worker", plan=plan)
    for step in sorted(chance.sample(range(1, STEPS + 1), ON_THE_WORKER)):
        held = hold_step(night.proxy, step)
        assert held.holding.wait(240), run.why()
        time.sleep(chance.uniform(0.0, 1.0))
        night.airflow.kill_task(run.instance("train")["id"], supervisor_too=chance.random() < 0.5)
        held.released.set()
    run.wait(timeout_s=900)
    entries = [entry for entry in PublicationLog(plan["root"]).entries() if entry.step == STEPS]
    assert [entry.name for entry in entries] == [run.xcom("train")["entry"]]
    night.settle(steps=STEPS)


def kill_worker(run: Run, task_id: str, held: Rule, chance: random.Random) -> None:
    """Kill the worker that runs a task, at a random moment of the time in which the reply to its request is held."""
    assert held.holding.wait(240), run.why()
    time.sleep(chance.uniform(0.0, 1.0))
    run.night.airflow.kill_task(run.instance(task_id)["id"], supervisor_too=chance.random() < 0.5)
    held.released.set()
