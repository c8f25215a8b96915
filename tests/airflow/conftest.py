"""Airflow without its processes: settings of its own, so that no test reads or writes a real AIRFLOW_HOME.

The variables must be set before the first import of airflow, which is why they stand here and not in a fixture.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

_HOME = tempfile.TemporaryDirectory(prefix="airflow-home-")
os.environ["AIRFLOW_HOME"] = _HOME.name
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ["AIRFLOW__CORE__UNIT_TEST_MODE"] = "False"

import pytest  # noqa: E402
from airflow.sdk.exceptions import TaskDeferred  # noqa: E402
from airflow.sdk.execution_time.context import OutletEventAccessors  # noqa: E402

from cortex_training.client import CortexTrainingClient  # noqa: E402
from tests.publication.conftest import bucket, s3_root, s3_server  # noqa: E402, F401

PAT = "pat-0123456789-very-secret"


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch):
    """Defines a connection the way users do in deployments: `connection("ct", host=..., database=...)`."""

    def define(
        conn_id: str = "ct", *, host: str = "https://acme.example", password: str = PAT, **fields: object
    ) -> str:
        schema = fields.pop("schema", "PUBLIC")
        extra = {"database": "TRAINING", **fields}
        document = {
            "conn_type": "cortex_training",
            "host": host,
            "schema": schema,
            "password": password,
            "extra": {name: value for name, value in extra.items() if value is not None},
        }
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(document))
        return conn_id

    return define


class StateStore:
    """What Airflow keeps for a task instance over its tries; values go through JSON as they do there."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.writes: list[Any] = []

    def get(self, key: str, default: Any = None) -> Any:
        return json.loads(self.values[key]) if key in self.values else default

    def set(self, key: str, value: Any) -> None:
        self.writes.append(json.loads(json.dumps(value)))
        self.values[key] = json.dumps(value)


class TaskRun:
    """One task instance, tried, retried and cleared the way Airflow does it, without Airflow's processes."""

    def __init__(self, task_id: str = "task", *, retries: int = 2) -> None:
        self.store = StateStore()
        self.xcoms: dict[str, Any] = {}
        self.retries = retries
        self.try_number = 1
        self.max_tries = retries
        self.clear_number = 0
        self.task_id = task_id
        self.deferrals: list[TaskDeferred] = []
        self.events: list[dict[str, Any]] = []
        self.outlet_events = OutletEventAccessors()

    def context(self) -> Any:
        ti = SimpleNamespace(
            dag_id="dag",
            run_id="manual__2026-01-01",
            task_id=self.task_id,
            map_index=-1,
            try_number=self.try_number,
            max_tries=self.max_tries,
            xcom_push=lambda key, value: self.xcoms.__setitem__(key, json.loads(json.dumps(value))),
        )
        dag_run = SimpleNamespace(dag_id=ti.dag_id, run_id=ti.run_id, clear_number=self.clear_number)
        return {
            "ti": ti,
            "dag_run": dag_run,
            "task_state_store": self.store,
            "outlet_events": self.outlet_events,
        }

    def retry(self) -> None:
        self.try_number += 1
        self.xcoms.clear()

    def clear(self) -> None:
        self.clear_number += 1
        self.try_number += 1
        self.max_tries = self.try_number - 1 + self.retries
        self.xcoms.clear()

    def clear_another_task(self) -> None:
        """A user clears some other task of the same DAG run, whatever this one is doing: the run counts that."""
        self.clear_number += 1

    def execute(self, operator: Any) -> Any:
        """One try, its deferral included: the trigger is stored and made anew, and its event too."""
        try:
            return operator.execute(self.context())
        except TaskDeferred as deferred:
            self.deferrals.append(deferred)
            payload = asyncio.run(fire(stored(deferred.trigger)))
            self.events.append(payload)
            return operator.resume_execution(
                deferred.method_name, {**(deferred.kwargs or {}), "event": payload}, self.context()
            )


def stored(trigger: Any) -> Any:
    """The trigger as another process makes it from what Airflow stored."""
    path, kwargs = trigger.serialize()
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(**json.loads(json.dumps(kwargs)))


async def fire(trigger: Any) -> dict[str, Any]:
    """Run a trigger to its one event."""
    events = [event.payload async for event in trigger.run()]
    await trigger.cleanup()
    assert len(events) == 1, events
    return json.loads(json.dumps(events[0]))


@pytest.fixture
def task_run():
    return TaskRun


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triggers may fire at once: nothing here can mistake an early event for a lost task."""
    fire_at_once(monkeypatch)


def fire_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ("operators.request_leg", "operators.router_replay", "operators.train", "operators.jobs", "sensors.base")
    for module in modules:
        monkeypatch.setattr(importlib.import_module(f"airflow_cortex_training.{module}"), "DEFER_GRACE_S", 0.0)


@pytest.fixture
def service_connection(connection, local_service) -> Iterator[str]:
    """A connection to the session's service. Whatever a test leaves pending there is cancelled after it.

    The service serves jobs in order: one that waits for more GPUs than there are keeps all that come later waiting, so
    that a single failure would let every test after it run into its time limit.
    """
    yield connection("local", host=local_service.base_url, database=local_service.database, schema=local_service.schema)
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        for job in client.list_jobs("pending"):
            client.cancel_job(job["job_id"])


@pytest.fixture
def unreachable_connection(connection) -> str:
    """A connection to a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return connection("unreachable", host=f"http://127.0.0.1:{port}")


@pytest.fixture
def bucket_credentials(monkeypatch: pytest.MonkeyPatch, s3_server: Any) -> str:  # noqa: F811
    """Credentials of the test's bucket, held by an Airflow connection."""
    document = {
        "conn_type": "aws",
        "login": s3_server.access_key_id,
        "password": s3_server.secret_access_key,
        "extra": {"endpoint_url": s3_server.endpoint},
    }
    monkeypatch.setenv("AIRFLOW_CONN_BUCKET", json.dumps(document))
    return "airflow:bucket"


@pytest.fixture
def memory() -> Iterator[Any]:
    """Object storage that only Airflow knows: ``memory://``."""
    import fsspec
    from airflow.sdk.io import attach

    storage = fsspec.filesystem("memory", skip_instance_cache=True)
    attach("memory", fs=storage)
    yield storage
    storage.store.clear()


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small real dataset for the tiny model: sentences about numbers."""
    from cortex_training.datasets import build_dataset
    from cortex_training.local.models import model_folder

    rows = [{"prompt": f"What comes after {n}?", "completion": f"After {n} comes {n + 1}."} for n in range(100)]
    folder = tmp_path_factory.mktemp("dataset")
    build_dataset(rows, folder, tokenizer=model_folder("tiny"), max_seq_len=128, seed=1)
    return str(folder / "manifest.json")
