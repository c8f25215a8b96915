"""Mishaps of deferrable providers that need no running Airflow to be tried; tests/live/README.md lists them all."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from airflow.sdk import BaseOperator
from airflow.triggers.base import BaseTrigger

import airflow_cortex_training
from airflow_cortex_training.operators.jobs import CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.training import CortexTrainingStepOperator
from airflow_cortex_training.triggers.requests import CortexTrainingRequestTrigger

WAITS = 300


def _classes(package: str, base: type) -> Iterator[type]:
    folder = importlib.import_module(f"airflow_cortex_training.{package}")
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        for found in vars(importlib.import_module(module.name)).values():
            if isinstance(found, type) and issubclass(found, base) and found.__module__ == module.name:
                yield found


TRIGGERS = sorted(_classes("triggers", BaseTrigger), key=lambda c: c.__name__)
OPERATORS = sorted(_classes("operators", BaseOperator), key=lambda c: c.__name__)


@pytest.mark.parametrize("operator", [o for o in OPERATORS if o.on_kill is not BaseOperator.on_kill])
def test_a_kill_reaches_an_operator_that_has_just_been_made_again(operator: type) -> None:
    # After a deferral the operator is a new object; attributes that `execute` made are not there.
    made = operator.__new__(operator)
    arguments = dict.fromkeys(_required(operator), "x")
    operator.__init__(made, task_id="killed", **arguments)
    made.on_kill()


def test_both_kinds_of_class_were_found() -> None:
    assert {c.__module__.split(".")[0] for c in (*TRIGGERS, *OPERATORS)} == {airflow_cortex_training.__name__}
    assert len(TRIGGERS) >= 4
    assert len(OPERATORS) >= 12


@pytest.mark.parametrize("field", ["job_id", "learning_rate"])
def test_what_airflow_could_not_store_is_refused_before_anything_is_sent(
    task_run: Any, service_connection: str, local_service: Any, field: str
) -> None:
    arguments: dict[str, Any] = {"job_id": "job", "learning_rate": 1e-3, field: lambda: None}
    task = CortexTrainingStepOperator(task_id="step", conn_id=service_connection, deferrable=True, **arguments)
    run, sent = task_run(), len(local_service.execution_log())
    with pytest.raises(Exception, match=field):
        run.execute(task)
    # Nor written down: a step that may have been sent is one that no retry sends.
    assert run.store.writes == []
    assert len(local_service.execution_log()) == sent


def test_odd_values_in_sub_jobs_create_nothing(task_run: Any, service_connection: str) -> None:
    run = task_run()
    sub_job = {"job_type": "training", "model_name": "tiny", "training_config": {"optimizer": object()}}
    task = CortexTrainingCreateJobOperator(task_id="create", conn_id=service_connection, sub_jobs=[sub_job])
    with pytest.raises(Exception, match="JSON"):
        run.execute(task)


async def test_hundreds_of_waits_need_no_more_files_than_a_few(
    service_connection: str,
) -> None:
    fields = {
        "target": {"conn_id": service_connection},
        "job_id": "not-there",
        "operation": "save",
        "started": 0.0,
        "not_before": 0.0,
        "deadline": 4e9,
        "generation": [0, 0],
    }
    triggers = [CortexTrainingRequestTrigger(request_id=f"r{n}", **fields) for n in range(WAITS)]
    before = len(os.listdir("/proc/self/fd"))
    waits = [asyncio.create_task(anext(trigger.run())) for trigger in triggers]  # type: ignore[arg-type]
    await asyncio.sleep(3)
    open_now = len(os.listdir("/proc/self/fd"))
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    assert open_now - before <= 32


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_what_a_trigger_stores_is_small_and_plain(trigger: type) -> None:
    fields = {name: _plain(name) for name in _required(trigger)}
    made = trigger(**fields)
    path, kwargs = made.serialize()
    assert path == f"{trigger.__module__}.{trigger.__qualname__}"
    assert len(json.dumps(kwargs)) < 1024
    assert trigger(**json.loads(json.dumps(kwargs))).serialize() == (path, kwargs)


def _required(cls: type) -> list[str]:
    named = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            for name, parameter in inspect.signature(base.__init__).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY and base.__module__.startswith("airflow_cortex"):
                    named[name] = parameter.default is inspect.Parameter.empty
    return [name for name, required in named.items() if required]


def _plain(name: str) -> Any:
    if name == "target":
        return {"conn_id": "ct"}
    if name == "generation":
        return [0, 0]
    return 1.0 if name in ("started", "not_before", "deadline") else "x"
