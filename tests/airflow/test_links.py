"""Links of tasks: which XCom Airflow shows, for tasks that are mapped too, and while a training run goes on."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import SetXCom
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.sdk.execution_time.xcom import XCom

from airflow_cortex_training.links import CortexTrainingJobLink
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator
from tests.airflow.test_train import _wait_for_losses, defer, plan, train

LINK = CortexTrainingJobLink()


@pytest.mark.parametrize("map_index", [-1, 0, 1])
def test_a_leg_that_notes_nothing_keeps_the_link_of_its_own_instance(
    monkeypatch: pytest.MonkeyPatch, map_index: int
) -> None:
    stored = {-1: "https://job/of-the-only-one", 0: "https://job/0", 1: "https://job/1"}

    def get_one(*, key: str, map_index: int, **_: Any) -> str | None:
        return stored.get(map_index) if key == LINK.xcom_key else None

    def get_all(**_: Any) -> list[str]:
        return list(stored.values())

    monkeypatch.setattr(XCom, "get_one", get_one)
    monkeypatch.setattr(XCom, "get_all", get_all)
    ti = RuntimeTaskInstance.model_construct(task_id="step", dag_id="d", run_id="r", map_index=map_index)
    operator = CortexTrainingCancelJobOperator(task_id="step")
    assert LINK.get_link(operator, ti_key=ti) == stored[map_index]


class Comms:
    """The supervisor that a task or a trigger talks to, as far as it takes XComs."""

    def __init__(self) -> None:
        self.links: list[tuple[tuple[Any, ...], Any]] = []
        self.refuses = False

    def send(self, msg: Any) -> None:
        assert isinstance(msg, SetXCom)
        if self.refuses:
            raise RuntimeError("the API server is away")
        if msg.key == LINK.xcom_key:
            # What the UI does with it.
            self.links.append(((msg.dag_id, msg.task_id, msg.run_id, msg.map_index), json.loads(json.dumps(msg.value))))


@pytest.fixture
def comms(monkeypatch: pytest.MonkeyPatch) -> Comms:
    made = Comms()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", made, raising=False)
    return made


async def test_a_run_in_the_triggerer_links_to_its_job_while_it_trains(
    task_run, service_connection, local_service, manifest, tmp_path, no_grace, comms
) -> None:
    root = str(tmp_path / "run")
    trigger = defer(train(service_connection, plan(root, manifest, steps=300)), task_run("train")).trigger
    trigger.task_instance = SimpleNamespace(dag_id="d", task_id="train", run_id="r", map_index=3)
    events = trigger.run()
    running = asyncio.ensure_future(anext(events))
    await asyncio.to_thread(_wait_for_losses, root)
    assert not running.done()
    ((key, url),) = comms.links
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert key == ("d", "train", "r", 3)
    cancel = CortexTrainingCancelJobOperator(task_id="cancel", conn_id=service_connection, root=root)
    (job_id,) = await asyncio.to_thread(task_run("cancel").execute, cancel)
    assert url.startswith(local_service.base_url)
    assert url.endswith(f"/{job_id}")


@pytest.mark.parametrize("refuses", [False, True])
def test_a_run_on_a_worker_links_to_its_job_before_it_ends(
    task_run, service_connection, manifest, tmp_path, comms, refuses
) -> None:
    comms.refuses = refuses
    operator = train(service_connection, plan(str(tmp_path / "run"), manifest, steps=2), deferrable=False)
    result = task_run("train").execute(operator)
    # What is noted at the end is Airflow's to store; this came before, and is no reason to fail.
    links = [url for key, url in comms.links if key == ("dag", "train", "manual__2026-01-01", -1)]
    assert links == ([] if refuses else [LINK.get_link(operator, ti_key=SimpleNamespace())])
    assert result["steps"] == 2
