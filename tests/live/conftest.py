"""One real Airflow for all live tests of a session, and for each test a way of its own to the local service.

The cluster (api-server, scheduler, dag-processor, two triggerers, LocalExecutor) is started once, on SQLite, or on a
PostgreSQL of its own with ``AIRFLOW_LIVE_DATABASE=postgresql``; ``AIRFLOW_LIVE_HEARTBEAT_S=5`` gives its workers
Airflow's own heartbeat. A test gets a `Night`: a proxy that can hold back, lose and refuse what passes, a connection
made through Airflow's REST API that leads through it, and a database of the local service in which nobody else has
jobs. It ends with `Night.settle`: nothing of it is left running.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from cortex_training.client import CortexTrainingClient
from cortex_training.local.models import model_folder
from cortex_training.publication import RootError
from cortex_training.states import is_terminal_job
from cortex_training.training import RunStatus, status
from demo.airflow_cluster import TERMINAL_RUN_STATES, AirflowCluster, ClusterError
from demo.snowflake_server import SnowflakeServer
from tests.faults.proxy import FaultProxy
from tests.live.lookups import LOOKUPS_VARIABLE
from tests.live.plans import training_plan
from tests.live.postgres import postgres

DAGS = Path(__file__).parent / "dags"
REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "dags"
LOOKUPS = "lookups.txt"
PAT = "pat-of-the-live-tests-0123456789"
PROMPT = "def merge(a, b)\nWhat does merge do?\n"

# What Airflow takes minutes to notice in production it notices here in seconds. Not below: a machine with two busy
# cores lets heartbeats of healthy processes be late.
INTERVALS = {
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "3",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "15",
    "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "3",
    # How late a worker may tell that a task's process has ended, a deferral among other ends. Airflow's own is 5.
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": os.environ.get("AIRFLOW_LIVE_HEARTBEAT_S", "1"),
}

# Defaults of the example DAGs, which runs that an asset starts can't be given otherwise.
TINY = {
    "model_name": "tiny",
    "dtype": "float32",
    "lora": None,
    "max_seq_len": 256,
    "overlong": "skip",
    "steps": 4,
    "micro_batch_size": 4,
    "save_every_steps": 2,
    "warmup_steps": 1,
    "learning_rate": 5e-3,
    "prompts": [PROMPT],
    "max_new_tokens": 8,
    "snowflake_conn_id": "sf",
    "cortex_conn_id": "ct_examples",
}


@pytest.fixture(scope="session")
def snowflake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SnowflakeServer]:
    with SnowflakeServer(tmp_path_factory.mktemp("snowflake")) as server:
        yield server


@pytest.fixture(scope="session")
def examples_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared folder of the example DAGs whose root is known when they are parsed."""
    return tmp_path_factory.mktemp("finetune")


@pytest.fixture(scope="session")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, snowflake: SnowflakeServer, examples_root: Path
) -> Iterator[AirflowCluster]:
    folder = tmp_path_factory.mktemp("airflow")
    defaults = {**TINY, "root": str(examples_root), "tokenizer": str(model_folder("tiny"))}
    with contextlib.ExitStack() as stack:
        url = None
        if os.environ.get("AIRFLOW_LIVE_DATABASE", "sqlite") == "postgresql":
            url = stack.enter_context(postgres())
        yield stack.enter_context(
            AirflowCluster(
                folder / "home",
                [EXAMPLES, DAGS],
                connections={"sf": json.loads(snowflake.airflow_connection_json())},
                environment={
                    **INTERVALS,
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
                    "AIRFLOW__SECRETS__BACKEND": "tests.live.lookups.CountedLookups",
                    LOOKUPS_VARIABLE: str(folder / LOOKUPS),
                    **{f"FINETUNE_{name.upper()}": json.dumps(value) for name, value in defaults.items()},
                },
                parallelism=8,
                triggerers=2,
                database_url=url,
            )
        )


_numbers = itertools.count(1)


@pytest.fixture
def night(
    airflow: AirflowCluster, local_service: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Night]:
    """This test's way to the service; when the test fails, the ends of the components' logs are printed."""
    number = next(_numbers)
    failed_before = request.session.testsfailed
    with FaultProxy(local_service.base_url) as proxy:
        one = Night(airflow, local_service, proxy, tmp_path, f"ct_night_{number}", f"NIGHT_{number}")
        one.connect()
        yield one
        one.clean_up()
    if request.session.testsfailed > failed_before:
        for component in airflow.components:
            sys.stdout.write(f"\n--- {component} ---\n{airflow.log_tail(component)}\n")


@dataclass
class Night:
    """What one test has: the cluster, the service, the proxy between them, and helpers that name what they find."""

    airflow: AirflowCluster
    service: Any
    proxy: FaultProxy
    folder: Path
    conn_id: str
    database: str
    runs: list[Run] = field(default_factory=list)

    # The connection

    def connect(self, *, pat: str = PAT, conn_id: str | None = None) -> None:
        """Make or change the connection, as a user does in the UI."""
        document = {
            "connection_id": conn_id or self.conn_id,
            "conn_type": "cortex_training",
            "host": self.proxy.base_url,
            "schema": "PUBLIC",
            "password": pat,
            "extra": json.dumps({"database": self.database}),
        }
        try:
            self.airflow.request("POST", "/connections", document)
        except ClusterError:
            self.airflow.request("PATCH", f"/connections/{document['connection_id']}", document)

    def client(self) -> CortexTrainingClient:
        """A client that goes past the proxy."""
        return CortexTrainingClient(self.service.base_url, self.database, "PUBLIC")

    def lookups(self) -> dict[int, int]:
        """How often each process looked the connection up."""
        lines = (self.airflow.home.parent / LOOKUPS).read_text().splitlines()
        return Counter(int(line.split()[0]) for line in lines if line.split()[1] == self.conn_id)

    # Runs

    def start(self, dag_id: str, **conf: Any) -> Run:
        run = Run(self, dag_id, self.airflow.trigger_dag(dag_id, {"conn_id": self.conn_id, **conf}))
        self.runs.append(run)
        return run

    def plan(self, name: str, **changes: Any) -> dict[str, Any]:
        return training_plan(self.folder, name, **changes)

    # What the service did

    def jobs(self) -> dict[str, str]:
        """Every job that was ever created here -> its state."""
        with self.client() as client:
            return {job["job_id"]: job["status"] for job in client.list_jobs()}

    def live_jobs(self) -> list[str]:
        return [job_id for job_id, state in self.jobs().items() if not is_terminal_job(state)]

    def executed(self, operation: str) -> list[dict[str, Any]]:
        """What the service really did in jobs of this test, in order."""
        mine = self.jobs()
        return [e for e in self.service.execution_log() if e["op"] == operation and e["job_id"] in mine]

    def cancels(self, job_id: str = "") -> int:
        return self.proxy.count(rf"POST .*{job_id}:cancel$")

    # The end

    def settle(self, *, jobs: int = 1, steps: int | None = None) -> None:
        """What every scenario ends with: no live job, exactly the paid jobs it should have cost, each step once."""
        wait_until(lambda: self.live_jobs() == [], "no job is left")
        assert len(self.jobs()) == jobs, self.jobs()
        if steps is not None:
            assert [e["global_steps"] for e in self.executed("step")] == list(range(1, steps + 1))

    def clean_up(self) -> None:
        """After a failure: end runs first, for a training that is still driven replaces a job that is cancelled."""
        for rule in self.proxy.rules:
            rule.released.set()
        for run in self.runs:
            run.end()
        with self.client() as client:
            for job_id in self.live_jobs():
                client.cancel_job(job_id)


@dataclass
class Run:
    """One DAG run of a test."""

    night: Night
    dag_id: str
    run_id: str

    def wait(self, state: str = "success", timeout_s: float = 240.0) -> None:
        """Wait for the end of the run; fail with the logs of its failed tasks when it is another one."""
        ended = self.night.airflow.wait_for_run(self.dag_id, self.run_id, timeout_s)
        assert ended == state, self.why()

    def states(self) -> dict[str, str | None]:
        return self.night.airflow.task_states(self.dag_id, self.run_id)

    def wait_for_task(self, task_id: str, *states: str, timeout_s: float = 150.0) -> dict[str, Any]:
        wait_until(lambda: self.states().get(task_id) in states, f"{task_id} is {' or '.join(states)}", timeout_s)
        return self.instance(task_id)

    def instance(self, task_id: str) -> dict[str, Any]:
        (found,) = (
            ti
            for ti in self.night.airflow.task_instances(self.dag_id, self.run_id)
            if ti["task_id"] == task_id and ti["map_index"] < 0
        )
        return found

    def xcom(self, task_id: str, key: str = "return_value") -> Any:
        return self.night.airflow.xcom(self.dag_id, self.run_id, task_id, key)

    def log(self, task_id: str, try_number: int = 1) -> str:
        return self.night.airflow.task_log(self.dag_id, self.run_id, task_id, try_number)

    def trigger_log(self, task_id: str, component: str) -> str:
        """What a trigger of the task wrote in one triggerer, in the first try."""
        folder = self.night.airflow.home / "logs" / f"dag_id={self.dag_id}" / f"run_id={self.run_id}"
        job_id = self.night.airflow.triggerer_job(component)
        paths = folder.rglob(f"task_id={task_id}/attempt=1.log.trigger.{job_id}.log")
        return "".join(path.read_text(errors="replace") for path in paths)

    def mark(self, task_id: str, state: str) -> None:
        self.night.airflow.set_task_state(self.dag_id, self.run_id, task_id, state)

    def clear(self, *task_ids: str) -> None:
        self.night.airflow.clear_tasks(self.dag_id, self.run_id, task_ids)

    def triggerer_of(self, task_id: str) -> str:
        """The triggerer that runs the task's trigger, when one does."""
        found: list[str] = []

        def look() -> bool:
            name = self.night.airflow.triggerer_of(self.dag_id, self.run_id, task_id)
            found[:] = [name] if name else []
            return bool(name)

        wait_until(look, f"a triggerer runs {task_id}")
        return found[0]

    def end(self) -> None:
        """Fail the run, as a person does who gives it up, unless it has ended."""
        airflow = self.night.airflow
        if airflow.run_state(self.dag_id, self.run_id) not in TERMINAL_RUN_STATES:
            for ti in airflow.task_instances(self.dag_id, self.run_id):
                if ti["state"] == "deferred" and ti["map_index"] < 0:
                    self.mark(ti["task_id"], "failed")
            airflow.request("PATCH", f"/dags/{self.dag_id}/dagRuns/{quote(self.run_id, safe='')}", {"state": "failed"})

    def why(self) -> str:
        airflow, told = self.night.airflow, [str(self.states())]
        for ti in airflow.task_instances(self.dag_id, self.run_id):
            if ti["state"] in ("failed", "up_for_retry", "deferred", "running") and ti["map_index"] < 0:
                told.append(f"--- {ti['task_id']}\n{self.log(ti['task_id'], max(1, ti['try_number']))[-5000:]}")
        return "\n".join(told)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.3)


def run_status(plan: dict[str, Any]) -> RunStatus | None:
    """What a run's root tells; None when nothing was begun in it."""
    try:
        return status(plan["root"])
    except (FileNotFoundError, RootError):
        return None


def confirmed_step(plan: dict[str, Any]) -> int:
    """Steps that the present segment of a run has confirmed; -1 when there is none."""
    current = run.state.current if (run := run_status(plan)) else None
    return current.confirmed_step if current else -1
