"""A whole Airflow on this machine, for the demo and the live tests: every component in a session of its own.

Everything lives in one folder and on free loopback ports, so that two clusters never meet. Components are started in
sessions of their own because Airflow leaves children behind when only the parent is told to stop;
`AirflowCluster.stop` ends the leaders and then everything that is left in their sessions.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")
SECOND_TRIGGERER = "triggerer-2"
TERMINAL_RUN_STATES = frozenset({"success", "failed"})

_START_TIMEOUT_S = 180.0
_SIGNAL_TIMEOUT_S = 30.0
_GRACE_S = 8.0
_READS = 3

_LOG_FRAME = ("event", "timestamp", "level", "logger", "filename", "lineno")
_LOG_CONTEXT = ("dag_id", "task_id", "run_id", "map_index", "try_number", "ti_id", "trigger_id")


class ClusterError(RuntimeError):
    """A component did not do what was asked; the message ends with the tail of its log."""


class AirflowCluster:
    """Airflow with LocalExecutor below `home`, on SQLite unless told otherwise.

    Args:
        home: folder to create; becomes AIRFLOW_HOME.
        dags_folder: folder of DAG files, or several.
        connections: connection id -> connection as JSON-able mapping; handed over in AIRFLOW_CONN_* variables.
        environment: further variables of every component and task, e.g. ``AIRFLOW__TRIGGERER__CAPACITY``.
        parallelism: tasks at once.
        triggerers: one, or two that take over from each other.
        database_url: SQLAlchemy URL of an empty metadata database, e.g. ``postgresql+psycopg2://...``.

    Use it as a context manager, or call `start` and `stop`.
    """

    def __init__(
        self,
        home: str | os.PathLike[str],
        dags_folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        connections: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        parallelism: int = 4,
        triggerers: int = 1,
        database_url: str | None = None,
    ) -> None:
        folders = [dags_folder] if isinstance(dags_folder, (str, os.PathLike)) else list(dags_folder)
        self.components = COMPONENTS + ((SECOND_TRIGGERER,) if triggerers > 1 else ())
        self.home = Path(home).resolve()
        self.logs = self.home / "component-logs"
        self.port, log_port, trigger_log_port = _free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: set[int] = set()
        self._triggerer_jobs: dict[str, int] = {}
        self._token = ""
        self.database_url = database_url or f"sqlite:///{self.home}/airflow.db"
        self._environment = {
            **_inherited(),
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(32),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(64),
            "AIRFLOW__CORE__DAGS_FOLDER": str(Path(folders[0]).resolve()),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__FERNET_KEY": _fernet_key(),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__PARALLELISM": str(parallelism),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": _bundles(folders),
            # New files are found at each refresh. Parsing known ones again costs more CPU than anything else here does.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(log_port),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_log_port),
            # The supervisor notices a task's end within this time; at the default of 5 s short deferrals can fail
            # falsely.
            "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self.database_url,
            **{f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in (connections or {}).items()},
            **(environment or {}),
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Processes

    def start(self) -> None:
        """Make the database, start every component and wait until all are healthy. Stops what it started when one is
        not.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            self._migrate()
            for component in COMPONENTS:
                self.start_component(component)
            self._wait_until_healthy()
            self._note_triggerer("triggerer")
            if SECOND_TRIGGERER in self.components:
                self.restart_triggerer(SECOND_TRIGGERER)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of every component that was ever started here."""
        for session in self._sessions:
            # A process that stands still acts on no signal but SIGKILL.
            _signal_session(session, signal.SIGCONT)
        for component in reversed(self.components):
            if component in self._processes:
                self._processes[component].terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
        for session in self._sessions:
            # Also sessions whose leader is long dead: a killed triggerer leaves its log server behind.
            _signal_session(session, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def start_component(self, component: str) -> None:
        """Start one of `components`; its output is appended to ``component-logs/<component>.log``."""
        command = [sys.executable, "-m", "airflow", component]
        if component == SECOND_TRIGGERER:
            # The first one serves the logs of both: they write into one folder.
            command[-1:] = ["triggerer", "--skip-serve-logs"]
        with open(self.logs / f"{component}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.home,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[component] = process
        self._sessions.add(process.pid)

    def kill_component(self, component: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill a component with all its children at once (SIGKILL), or send its leader a signal and wait until it is
        gone.
        """
        process = self._processes[component]
        if how == signal.SIGKILL:
            _signal_session(process.pid, signal.SIGKILL)
        else:
            process.send_signal(how)
        try:
            process.wait(timeout=_SIGNAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"{component} still runs {_SIGNAL_TIMEOUT_S:.0f} s after {how.name}{self._tail(component)}"
            ) from None
        # What the leader left behind (the triggerer's log server) would hold the port of the next one.
        _signal_session(process.pid, signal.SIGKILL)

    def restart_triggerer(self, component: str = "triggerer") -> None:
        """Start a triggerer (again) and wait until it has registered itself."""
        self.start_component(component)
        self._note_triggerer(component)

    def _note_triggerer(self, component: str) -> None:
        """Remember which of Airflow's jobs a triggerer is: the newest, as they are started one after another."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            jobs = self.request("GET", "/jobs", query={"job_type": "TriggererJob", "order_by": "-id", "limit": 1})[
                "jobs"
            ]
            if jobs and jobs[0]["id"] > max(self._triggerer_jobs.values(), default=0):
                self._triggerer_jobs[component] = int(jobs[0]["id"])
                return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{component} did not register within {_START_TIMEOUT_S:.0f} s{self._tail(component)}"
                )
            time.sleep(0.3)

    def freeze_component(self, component: str) -> None:
        """Let every process of a component stand still, as a machine does that swaps or was suspended."""
        _signal_session(self._processes[component].pid, signal.SIGSTOP)

    def thaw_component(self, component: str) -> None:
        _signal_session(self._processes[component].pid, signal.SIGCONT)

    def triggerer_of(self, dag_id: str, run_id: str, task_id: str) -> str | None:
        """The component whose process runs the trigger of a deferred task; None while none does."""
        ti = self.request("GET", f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}")
        return self.owner_of(ti)

    def triggerer_job(self, component: str) -> int:
        """The id under which Airflow knows a triggerer."""
        return self._triggerer_jobs[component]

    def owner_of(self, ti: Mapping[str, Any]) -> str | None:
        """`triggerer_of` for a task instance as the REST API shows it."""
        job_id = (ti.get("triggerer_job") or {}).get("id")
        return next((name for name in self.pids() if self._triggerer_jobs.get(name) == job_id), None)

    def kill_task(self, ti_id: str, *, supervisor_too: bool = False) -> None:
        """SIGKILL the process that executes a task instance; with its supervisor, nobody tells Airflow about it."""
        for pid, _session in _sessions():
            try:
                title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").strip("\0 ")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if title == f"airflow worker -- {ti_id}":
                if supervisor_too:
                    # First, so that it can't report what happens to its child.
                    os.kill(parent, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
                return
        raise ClusterError(f"no process executes task instance {ti_id}")

    def pids(self) -> dict[str, int]:
        """Process id (and group id) of each component that runs."""
        return {name: process.pid for name, process in self._processes.items() if process.poll() is None}

    def process_tree(self) -> dict[str, list[int]]:
        """Every process of each component's session, for memory figures and for checks that nothing is left."""
        members: dict[str, list[int]] = {name: [] for name in self._processes}
        session_of = {process.pid: name for name, process in self._processes.items()}
        for pid, session in _sessions():
            if session in session_of:
                members[session_of[session]].append(pid)
        return members

    def log_tail(self, component: str, characters: int = 3000) -> str:
        """The end of what a component wrote."""
        try:
            return (self.logs / f"{component}.log").read_text(errors="replace")[-characters:]
        except OSError:
            return ""

    # REST

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of Airflow's public REST API, `path` below ``/api/v2``. Raises `ClusterError` for any answer outside
        2xx. What only reads is asked again when a busy machine lets it wait for too long.
        """
        if not self._token:
            self._token = _call("GET", f"{self.url}/auth/token")["access_token"]
        url = f"{self.url}/api/v2{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query, doseq=True)
        for _ in range(_READS if method == "GET" else 1):
            with contextlib.suppress(TimeoutError):
                return _call(method, url, body, self._token)
        raise ClusterError(f"{method} {url} was not answered{self._tail('api-server')}")

    def wait_for_dag(self, dag_id: str, timeout_s: float = 90.0) -> None:
        """Wait until the DAG was parsed; a DAG file that does not import is reported with its traceback."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.request("GET", f"/dags/{dag_id}")
                return
            except ClusterError:
                problems = self.request("GET", "/importErrors")["import_errors"]
                if problems:
                    raise ClusterError("\n".join(f"{p['filename']}: {p['stack_trace']}" for p in problems)) from None
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"DAG {dag_id} did not appear within {timeout_s:.0f} s{self._tail('dag-processor')}"
                    ) from None
            time.sleep(0.5)

    def trigger_dag(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Unpause the DAG and start a run with `conf` over its params; returns the run id."""
        self.wait_for_dag(dag_id)
        self.request("PATCH", f"/dags/{dag_id}", {"is_paused": False})
        run = self.request("POST", f"/dags/{dag_id}/dagRuns", {"logical_date": None, "conf": dict(conf or {})})
        return str(run["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.request("GET", _run_path(dag_id, run_id))["state"])

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        return list(
            self.request("GET", f"{_run_path(dag_id, run_id)}/taskInstances", query={"limit": 1000})["task_instances"]
        )

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """Task id (with ``[map index]`` for mapped ones) -> state."""
        states = {}
        for ti in self.task_instances(dag_id, run_id):
            index = ti["map_index"]
            states[ti["task_id"] if index < 0 else f"{ti['task_id']}[{index}]"] = ti["state"]
        return states

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The text of a try's log, the triggerer's part included."""
        path = f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}/logs/{try_number}"
        content = self.request("GET", path, query={"full_content": "true"})["content"]
        return "\n".join(_log_line(entry) for entry in content)

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        path = f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}/xcomEntries/{urllib.parse.quote(key, safe='')}"
        return self.request("GET", path, query={"deserialize": "true"})["value"]

    def set_task_state(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """What *Mark state as* does in the UI."""
        self.request("PATCH", f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}", {"new_state": state})

    def clear_tasks(self, dag_id: str, run_id: str, task_ids: Iterable[str]) -> None:
        """What *Clear* does in the UI, for these tasks alone."""
        self.request(
            "POST",
            f"/dags/{dag_id}/clearTaskInstances",
            {
                "dry_run": False,
                "dag_run_id": run_id,
                "task_ids": list(task_ids),
                "only_failed": False,
                "reset_dag_runs": True,
            },
        )

    def wait_for_run(self, dag_id: str, run_id: str, timeout_s: float, every_s: float = 1.0) -> str:
        """Wait for the end of a run; returns ``success`` or ``failed``. Raises `ClusterError` with the tasks' states
        after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.run_state(dag_id, run_id)
            if state in TERMINAL_RUN_STATES:
                return state
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{dag_id} {run_id} is {state} after {timeout_s:.0f} s: {self.task_states(dag_id, run_id)}"
                )
            time.sleep(every_s)

    # Start-up

    def _migrate(self) -> None:
        result = subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            cwd=self.home,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise ClusterError(
                f"airflow db migrate ended with {result.returncode}:\n{(result.stdout + result.stderr)[-4000:]}"
            )

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise ClusterError(f"airflow {name} ended with {process.returncode}{self._tail(name)}")
            if self._unhealthy() == []:
                return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"not healthy after {_START_TIMEOUT_S:.0f} s: {self._unhealthy()}"
                    + "".join(map(self._tail, self.components))
                )
            time.sleep(0.5)

    def _unhealthy(self) -> list[str]:
        try:
            health = _call("GET", f"{self.url}/api/v2/monitor/health")
        except (ClusterError, OSError):
            return ["api-server"]
        wanted = ("metadatabase", "scheduler", "dag_processor", "triggerer")
        return [name for name in wanted if (health.get(name) or {}).get("status") != "healthy"]

    def _tail(self, component: str) -> str:
        return f"\n--- {component} ---\n{self.log_tail(component)}"


class SlotSampler:
    """Adds up the worker-slot seconds of a run, per task: a task instance in state ``running`` holds a worker slot.

    Samples once a second in a thread of its own between `start` and `stop`; use it as a context manager around a run.
    """

    def __init__(self, cluster: AirflowCluster, dag_id: str, run_id: str, every_s: float = 1.0) -> None:
        self.seconds: dict[str, float] = {}
        self._cluster = cluster
        self._dag_id = dag_id
        self._run_id = run_id
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slot-sampler", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        then = time.monotonic()
        while not self._stop.wait(self._every_s):
            try:
                states = self._cluster.task_states(self._dag_id, self._run_id)
            except (ClusterError, OSError):
                continue  # a sample that could not be taken is covered by the longer interval of the next one
            now = time.monotonic()
            for task, state in states.items():
                if state == "running":
                    self.seconds[task] = self.seconds.get(task, 0.0) + now - then
            then = now


def _run_path(dag_id: str, run_id: str) -> str:
    return f"/dags/{dag_id}/dagRuns/{urllib.parse.quote(run_id, safe='')}"


def _log_line(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    shown = {name: value for name, value in entry.items() if name not in _LOG_FRAME + _LOG_CONTEXT}
    return f"{entry.get('timestamp') or ''} {entry.get('event', '')}{f' {shown}' if shown else ''}".strip()


def _call(method: str, url: str, body: Mapping[str, Any] | None = None, token: str = "") -> Any:
    request = urllib.request.Request(url, method=method, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    request.add_header("Accept", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    # No proxy: the cluster listens on this machine only.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        raise ClusterError(
            f"{method} {url} was answered {error.code}: {error.read()[:2000].decode(errors='replace')}"
        ) from None
    return json.loads(text) if text else None


def _inherited() -> dict[str, str]:
    """This process's environment without another Airflow's settings.

    Bytecode is wanted: without it every task process compiles its imports again.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIRFLOW__", "AIRFLOW_")) and name != "PYTHONDONTWRITEBYTECODE"
    }


def _fernet_key() -> str:
    from cryptography.fernet import Fernet

    return Fernet.generate_key().decode()


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; held together so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _signal_session(session: int, how: signal.Signals) -> None:
    """By session, not by group: Airflow gives each task process a group of its own."""
    for pid, its_session in _sessions():
        if its_session == session:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)


def _bundles(folders: Sequence[str | os.PathLike[str]]) -> str:
    return json.dumps(
        [
            {
                "name": f"dags-{number}",
                "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
                "kwargs": {"path": str(Path(folder).resolve())},
            }
            for number, folder in enumerate(folders)
        ]
    )


def _sessions() -> Iterable[tuple[int, int]]:
    """(process id, session id) of every process that is alive."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            state, _parent, _group, session = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if state != "Z":
            yield int(entry), int(session)
