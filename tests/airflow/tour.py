"""Every operator, sensor, trigger, link and watcher once, on the real local service, with all that is left of it.

What a class does is tried elsewhere. The tour is for what must be true of all of them: nothing secret stays anywhere,
and waiting in the triggerer gives what waiting on the worker gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import inspect
import json
import logging
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import TaskDeferred

import airflow_cortex_training
from airflow_cortex_training.operators.checkpoints import (
    CortexTrainingDeleteCheckpointOperator,
    CortexTrainingExportOperator,
    CortexTrainingLoadOperator,
    CortexTrainingPublishOperator,
    CortexTrainingSaveOperator,
)
from airflow_cortex_training.operators.datasets import CortexTrainingBuildDatasetOperator
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator, CortexTrainingCreateJobOperator
from airflow_cortex_training.operators.publication import CortexTrainingPruneOperator, CortexTrainingResolveOperator
from airflow_cortex_training.operators.router_replay import (
    CortexTrainingBootstrapRouterReplayOperator,
    CortexTrainingDiscardRouterReplayOperator,
    CortexTrainingResetPrefixCacheOperator,
)
from airflow_cortex_training.operators.sampling import CortexTrainingGenerateOperator, CortexTrainingWeightSyncOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.operators.training import CortexTrainingForwardBackwardOperator, CortexTrainingStepOperator
from airflow_cortex_training.operators.upkeep import (
    CortexTrainingDownloadLogsOperator,
    CortexTrainingSweepJobsOperator,
)
from airflow_cortex_training.sensors.base import CortexTrainingSensor
from airflow_cortex_training.sensors.capacity import CortexTrainingCapacitySensor
from airflow_cortex_training.sensors.jobs import CortexTrainingWaitForRunningSensor
from airflow_cortex_training.sensors.publication import CortexTrainingCheckpointPublishedSensor
from airflow_cortex_training.sensors.requests import CortexTrainingRequestSensor
from airflow_cortex_training.triggers.publication_events import CortexTrainingPublicationEventTrigger
from cortex_training.local.models import model_folder
from tests.airflow.test_operators import SAMPLING, TRAINING

PROMPT = "A prompt that nobody but the service may read"


def provided(package: str, base: type) -> list[type]:
    """The public classes of a package of the provider, in order of their names; its bases are not among them."""
    folder = importlib.import_module(f"{airflow_cortex_training.__name__}.{package}")
    found = {
        kind
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
        for kind in vars(importlib.import_module(module.name)).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.name
    }
    return sorted((kind for kind in found if not any(kind in other.__bases__ for other in found)), key=_name)


def _name(kind: type) -> str:
    return kind.__name__


def can_defer(kind: type) -> bool:
    return any("deferrable" in inspect.signature(base.__init__).parameters for base in kind.__mro__)


@dataclass
class Tour:
    """What a tour did and what it left. `run` makes and executes one task."""

    new_run: Callable[[str], Any]
    folder: Path
    conn_id: str
    deferrable: bool
    results: dict[type, Any] = field(default_factory=dict)
    operators: list[BaseOperator] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    watched: list[Any] = field(default_factory=list)
    said: str = ""

    def run(self, kind: Any, **arguments: Any) -> Any:
        way = {}
        if can_defer(kind):
            way = {"deferrable": self.deferrable}
            if kind is not CortexTrainingTrainOperator:
                way["inline_s"] = 0.0
        if kind in WITH_CONNECTION:
            way["conn_id"] = self.conn_id
        operator = kind(task_id=kind.__name__, **way, **arguments)
        run = self.new_run(kind.__name__)
        result = run.execute(operator)
        self.results.setdefault(kind, result)
        self.operators.append(operator)
        self.runs.append(run)
        return result

    def triggers(self) -> list[Any]:
        """What was deferred to, and what would have been, had a sensor not found what it looked for at once."""
        made = [deferral.trigger for run in self.runs for deferral in run.deferrals]
        for operator in self.operators:
            if isinstance(operator, CortexTrainingSensor):
                made.append(operator.trigger(started=1.0, not_before=2.0, deadline=3.0))
            if isinstance(operator, CortexTrainingCancelJobOperator):
                with pytest.raises(TaskDeferred) as deferred:
                    operator._defer(["job"], ["job"], 1.0)
                made.append(deferred.value.trigger)
        return made

    def left(self) -> Iterator[str]:
        """Everything that Airflow stores, shows or logs of the tour, and every file of it but the datasets."""
        yield self.said
        for result in self.results.values():
            yield json.dumps(result)
        for run in self.runs:
            yield json.dumps([run.store.writes, run.xcoms, run.events])
            yield from (json.dumps(deferral.kwargs) for deferral in run.deferrals)
        for trigger in self.triggers():
            yield json.dumps(trigger.serialize()) + repr(trigger)
        for operator in self.operators:
            ti = SimpleNamespace(task_id=operator.task_id)
            yield repr(operator)
            yield from (link.get_link(operator, ti_key=ti) for link in operator.operator_extra_links)
        yield json.dumps(self.watched)
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.name not in ("prompts.jsonl", "samples.jsonl"):
                yield path.read_text(errors="replace")


def travel(tour: Tour, manifest: str, place: dict[str, Any]) -> None:
    """Run every class once. `place` names a root and its credentials."""
    run, folder = tour.run, tour.folder
    run(CortexTrainingCapacitySensor, gpus=1, hardware="H200")
    job_id = run(
        CortexTrainingCreateJobOperator,
        sub_jobs=[copy.deepcopy(TRAINING), copy.deepcopy(SAMPLING)],
        wait_for_completion=True,
    )
    job = {"job_id": job_id}
    run(CortexTrainingWaitForRunningSensor, **job)
    run(
        CortexTrainingBuildDatasetOperator,
        rows=lambda: [{"prompt": "1?", "completion": "2."}],
        out=str(folder / "dataset"),
        tokenizer=str(model_folder("tiny")),
        max_seq_len=64,
    )
    run(CortexTrainingForwardBackwardOperator, **job, dataset=manifest, micro_batch_size=2)
    run(CortexTrainingStepOperator, **job, learning_rate=1e-3, expected_global_step=1)
    run(CortexTrainingBootstrapRouterReplayOperator, **job)
    run(CortexTrainingDiscardRouterReplayOperator, **job, sample_ids=["a"])
    run(CortexTrainingResetPrefixCacheOperator, **job)
    sent = run(CortexTrainingWeightSyncOperator, **job, wait_for_completion=False)
    run(CortexTrainingRequestSensor, **sent)
    tour.results[CortexTrainingWeightSyncOperator] = run(CortexTrainingWeightSyncOperator, **job)
    (folder / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n")
    run(
        CortexTrainingGenerateOperator,
        **job,
        prompts_path=str(folder / "prompts.jsonl"),
        output_path=str(folder / "samples.jsonl"),
        sampling_params={"max_tokens": 2, "temperature": 0.0},
    )
    resumable = run(CortexTrainingSaveOperator, **job)
    run(CortexTrainingLoadOperator, **job, checkpoint_id=resumable["checkpoint_id"])
    weights = run(CortexTrainingSaveOperator, **job, checkpoint_type="weights-only")
    ids = {name: weights[name] for name in ("job_id", "checkpoint_id")}
    exported = run(CortexTrainingExportOperator, **ids, **place)
    save = {name: exported[name] for name in ("save", "epoch")}
    tour.watched = asyncio.run(
        _watch(place, lambda: run(CortexTrainingPublishOperator, **save, **place, step=exported["global_steps"]))
    )
    run(CortexTrainingCheckpointPublishedSensor, **place)
    run(CortexTrainingResolveOperator, **place)
    run(CortexTrainingPruneOperator, **place)
    plan = {"root": str(folder / "run"), "dataset": manifest, "steps": 1, "micro_batch_size": 2, **job}
    run(CortexTrainingTrainOperator, plan=plan)
    (folder / "logs").mkdir()
    run(CortexTrainingDownloadLogsOperator, **job, path=str(folder / "logs"))
    run(CortexTrainingDeleteCheckpointOperator, **ids)
    run(CortexTrainingSweepJobsOperator, experiments=["nobody_has_such_a_name"])
    run(CortexTrainingCancelJobOperator, **job, wait_for_completion=True)


async def _watch(place: dict[str, Any], publish: Callable[[], Any]) -> list[Any]:
    """What a watcher stores and tells of one publication."""
    kept: dict[str, Any] = {}
    looked = asyncio.Event()

    async def aget(key: str, default: Any = None) -> Any:
        return kept.get(key, default)

    async def aset(key: str, value: Any) -> None:
        kept[key] = value
        looked.set()

    trigger = CortexTrainingPublicationEventTrigger(asset="models", poll_s=0.1, **place)
    trigger.asset_state_store = SimpleNamespace(aget=aget, aset=aset)
    events = trigger.run()
    first = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
    await looked.wait()
    await asyncio.to_thread(publish)
    told = (await first).payload
    await events.aclose()  # type: ignore[attr-defined]
    return [trigger.serialize(), told, kept]


@contextlib.contextmanager
def everything_said(config: Any) -> Iterator[Callable[[], str]]:
    """All that is logged, at any level, or printed meanwhile."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    handler, root = Keep(), logging.getLogger()
    level, captured = root.level, config.pluginmanager.getplugin("capturemanager")
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lambda: "\n".join([*said, *captured.read_global_capture()])
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


WITH_CONNECTION = [
    kind
    for package in ("operators", "sensors")
    for kind in provided(package, BaseOperator)
    if kind is not CortexTrainingBuildDatasetOperator
]
