"""A real Prefect server, a process worker with deployed flows, and the two processes that wait for flow runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import psutil
import pytest
from prefect import settings
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun

from cortex_training import CortexTrainingClient
from cortex_training.states import is_terminal_job
from demo.prefect_server import PrefectServer
from demo.processes import stop_group
from prefect_cortex_training import CortexTrainingCredentials
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.labels import jobs_in, labels_of
from prefect_cortex_training.presence import DRIVERS, WATCHERS, somebody_is_there

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
FLOWS = "flows_to_deploy.py"
POOL = "live"

PATIENCE_S = 480.0
"""How long anything may take to come: on two busy cores a process starts in half a minute, and eight of them in two."""

QUICK = {
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}


class Live:
    """The server and what runs beside it. Processes are started and killed by name."""

    def __init__(self, server: PrefectServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``python -m <arguments>`` as `name`, with its output in a file of that name."""
        with self.log(name).open("a") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                env=self.server.environment()
                | QUICK
                | {
                    "PREFECT_LOCAL_STORAGE_PATH": str(self.folder / "results"),
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
                }
                | environment,
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return self.processes[name]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def watch(self, name: str = "watch", *options: str) -> None:
        self.start(name, "-m", "prefect_cortex_training", "watch", "--every", "1", *options)
        self.wait_for_presence(WATCHERS)

    def drive(self, name: str = "drive") -> None:
        self.start(name, "-m", "prefect_cortex_training", "drive", "--every", "1")
        self.wait_for_presence(DRIVERS)

    def wait_for_presence(self, name: str) -> None:
        wait_until(lambda: run_to_end(somebody_is_there(name)), f"somebody in {name}")

    def worker(self, name: str = "worker") -> None:
        self.start(name, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", name)

    def deploy(self, file: Path, *flows: str) -> None:
        """Deploy flows of a file to the work pool, each under its own name, as ``<flow>/live``."""
        self.start("deploy", "-c", DEPLOY, str(file.parent), file.name, *flows)
        assert self.processes.pop("deploy").wait(PATIENCE_S) == 0, self.log("deploy").read_text()

    def kill_all(self, name: str) -> None:
        """SIGKILL to the process and to everything it started: the machine is gone."""
        process = self.processes.pop(name)
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        psutil.wait_procs(family, timeout=10)

    def stop(self, name: str) -> None:
        stop_group(self.processes.pop(name))

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)

    def run(self, deployment: str, **parameters: Any) -> UUID:
        """Start a run of a deployed flow."""
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(deployment)
            # The client asks again where an answer is late, and would start another run.
            key = str(uuid4())
            return client.create_flow_run_from_deployment(found.id, parameters=parameters, idempotency_key=key).id

    def read(self, flow_run_id: UUID) -> FlowRun:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(flow_run_id)

    def states(self, flow_run_id: UUID) -> list[str]:
        """Names of all states the flow run has been in."""
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(flow_run_id)
        return [state.name or "" for state in sorted(states, key=lambda state: state.timestamp)]

    def wait_for_state(self, flow_run_id: UUID, *names: str, patience_s: float = PATIENCE_S) -> None:
        wait_until(
            lambda: self.read(flow_run_id).state_name in names,
            f"state {' or '.join(names)} of {flow_run_id}",
            patience_s,
            lambda: f"it is {self.read(flow_run_id).state}, after {self.states(flow_run_id)}",
        )

    def jobs_of(self, flow_run_id: UUID) -> list[str]:
        return [job.job_id for job in jobs_in(labels_of(self.read(flow_run_id)))]


def flow_processes(flow_run_id: UUID) -> list[psutil.Process]:
    """Processes that execute a flow run, whoever started them."""
    found = []
    for process in psutil.process_iter(["pid"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            of_run = process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run_id)
            if of_run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def send_to_flow(flow_run_id: UUID, sign: signal.Signals) -> None:
    """Send a signal to the processes that execute a flow run, once there are any."""
    wait_until(lambda: len(flow_processes(flow_run_id)) > 0, "the flow's process")
    for process in flow_processes(flow_run_id):
        # The first may have taken the others with it.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(sign)


def wait_until(
    condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S, more: Callable[[], str] = lambda: ""
) -> None:
    """A server that is too busy to answer, as SQLite's is now and then, is asked again."""

    def is_so() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return condition()
        return False

    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come within {patience_s} s. {more()}"
        # Each look is a call to the server, which shares the cores.
        time.sleep(0.5)


def client_of(service: Any) -> CortexTrainingClient:
    return CortexTrainingClient(service.base_url, service.database, service.schema)


def live_jobs(service: Any) -> list[str]:
    with client_of(service) as client:
        return [job["job_id"] for job in client.list_jobs() if not is_terminal_job(job["status"])]


def sub_jobs(n_gpus: int = 1) -> list[dict[str, Any]]:
    training = {"optimizer": {"name": "AdamW", "lr": 3e-3}, "max_seq_len": 128, "train_batch_size": 2, "n_gpus": n_gpus}
    return [{"job_type": "training", "model_name": "tiny", "dtype": "float32", "seed": 7, "training_config": training}]


DEPLOY = """
import sys
from pathlib import Path
from prefect import Flow
for name in sys.argv[3:]:
    found = Flow.from_source(source=sys.argv[1], entrypoint=f"{sys.argv[2]}:{name}")
    # Automations see the tags that a run began with; `watch` finds runs by one that they get while they run.
    tags = ["cortex-training"] if name == "asks_a_person" else []
    found.deploy(name="live", work_pool_name="live", tags=tags, print_next_steps=False, ignore_warnings=True)
"""


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server and one worker for the session; tests start watchers and drivers of their own."""
    folder = tmp_path_factory.mktemp("prefect-live")
    with PrefectServer(folder / "home") as server:
        live = Live(server, folder)
        values = {
            settings.PREFECT_API_URL: server.api_url,
            settings.PREFECT_HOME: server.home,
            settings.PREFECT_SERVER_ANALYTICS_ENABLED: False,
            settings.PREFECT_LOGGING_TO_API_ENABLED: False,
        }
        with settings.temporary_settings(values):
            with get_client(sync_client=True) as client:
                client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
            names = [
                "waits_for_the_queue",
                "waits_for_capacity",
                "awaits_the_queue",
                "holds_a_job",
                "starts_another",
                "goes_task_by_task",
                "asks_a_person",
                "trains",
                "trains_on_slots",
                "queues_on_slots",
                "holds_slots",
                "makes_a_candidate",
            ]
            live.deploy(HERE / FLOWS, *names)
            live.deploy(REPOSITORY / "flows" / "promote_after_approval.py", "promote_after_approval")
            live.worker()
            yield live
            live.close()


@pytest.fixture(autouse=True)
def _logs_of_failures(live: Live, request: pytest.FixtureRequest) -> Iterator[None]:
    failed_before = request.session.testsfailed
    yield
    for name in set(live.processes) - {"worker"}:
        live.stop(name)
    # The next test's flow runs shall not believe in those who are gone.
    wait_until(forget_who_was_there, "the end of the variables of watchers and drivers")
    if request.session.testsfailed > failed_before:
        for log in sorted(live.folder.glob("*.log")):
            sys.stdout.write(f"\n--- {log.name} ---\n{log.read_text()[-6000:]}\n")


def forget_who_was_there() -> bool:
    with get_client(sync_client=True) as client:
        for name in (WATCHERS, DRIVERS):
            if client.read_variable_by_name(name) is not None:
                client.delete_variable_by_name(name)
    return True


@pytest.fixture
def cortex(live: Live, local_service: Any) -> Any:
    """The local service, as the block `cortex`."""
    save_block(local_service)
    return local_service


def save_block(service: Any) -> None:
    block = CortexTrainingCredentials(
        host=service.base_url, database=service.database, schema_=service.schema, pat="a-token-for-the-local-service"
    )
    block.save("cortex", overwrite=True)
