"""What a flow run costs while it waits for GPUs, suspended and beside a flow that polls.

    python benchmarks/prefect_waits.py [--runs 4] [--every 5] [--poll 10]

A local service whose GPUs are all taken, a Prefect server, a process worker and a watcher, each a process of its own.
`--runs` flow runs wait in their processes, and as many are suspended. Then the GPUs are given back.

Held: processes that execute the flow runs, and their resident memory (the sum over their processes, so that shared
pages count in each), once all of them wait. The watcher's memory is told beside it: it is the same for any number of
runs. Latency: from the moment when the service has placed a job to the moment when its flow run has completed, which
for a suspended run means that a new process has started. Its parts, from the flow run's states: until the watcher has
resumed the run, until a worker has taken it, until its process executes it, until it has completed. `--every` is the
watcher's, `--poll` the worker's (PREFECT_WORKER_QUERY_SECONDS). Calls: jobs that the service was asked to create.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from demo.local_service import LocalService  # noqa: E402
from demo.prefect_server import PrefectServer  # noqa: E402
from demo.processes import stop_group  # noqa: E402

DEPLOY = """
import sys
from prefect import Flow
for name in ("suspended", "polling"):
    found = Flow.from_source(source=sys.argv[1], entrypoint=f"prefect_flows.py:{name}")
    found.deploy(name="bench", work_pool_name="bench", print_next_steps=False, ignore_warnings=True)
"""
GPUS = 16
"""What the local service has of each kind."""

PATIENCE_S = 1200.0


class Bench:
    """Everything that runs, and what was started on it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.service = LocalService(folder / "service", threads=1)
        stack.callback(self.service.stop)
        self.service.start()
        self.server = stack.enter_context(PrefectServer(folder / "home"))
        self._stack = stack
        self._folder = folder
        os.environ.update(self.server.settings(), PREFECT_LOGGING_TO_API_ENABLED="false")

    def start(self, name: str, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        environment = self.server.environment() | settings
        environment["PREFECT_LOCAL_STORAGE_PATH"] = str(self._folder / "results")
        with (self._folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._stack.callback(stop_group, process)
        return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4, help="flow runs of each kind (default: 4)")
    parser.add_argument("--every", type=float, default=5.0, help="the watcher's seconds between two passes")
    parser.add_argument("--poll", type=float, default=10.0, help="the worker's seconds between two polls")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cortex-bench-")))
        measure(Bench(stack, folder), options.runs, every_s=options.every, poll_s=options.poll)


def measure(bench: Bench, runs: int, *, every_s: float, poll_s: float) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    from prefect_cortex_training import CortexTrainingCredentials

    credentials = CortexTrainingCredentials(host=bench.service.base_url, database="B", pat=bench.service.token)
    credentials.save("cortex", overwrite=True)
    with get_client(sync_client=True) as prefect, credentials.get_client() as cortex:
        prefect.create_work_pool(WorkPoolCreate(name="bench", type="process"))
        if bench.start("deploy", "-c", DEPLOY, str(HERE)).wait(PATIENCE_S) != 0:
            raise SystemExit("the flows could not be deployed")
        worker = ("-m", "prefect", "worker", "start", "--pool", "bench", "--type", "process")
        bench.start("worker", *worker, PREFECT_WORKER_QUERY_SECONDS=f"{poll_s:g}")
        watcher = bench.start("watch", "-m", "prefect_cortex_training", "watch", "--every", f"{every_s:g}")
        until(lambda: prefect.read_variable_by_name("cortex_training_watch") is not None, "the watcher")
        blockers = [cortex.create_job_from_body({"sub_job_configs": sub_jobs(8)})["job_id"] for _ in range(GPUS // 8)]

        started = {
            kind: [start_run(prefect, f"{kind}/bench") for _ in range(runs)] for kind in ("polling", "suspended")
        }
        until(lambda: all(has_job(prefect, run) for kind in started for run in started[kind]), "the jobs")
        until(lambda: all(state_of(prefect, run) == "Suspended" for run in started["suspended"]), "the suspensions")
        until(lambda: not processes_of(started["suspended"]), "the end of the suspended runs' processes")
        held = {kind: processes_of(started[kind]) for kind in started}
        memory = {kind: sum(process.memory_info().rss for process in held[kind]) for kind in held}
        watching = psutil.Process(watcher.pid).memory_info().rss

        for blocker in blockers:
            cortex.cancel_job(blocker)
        placed: dict[str, float] = {}
        ended: dict[UUID, float] = {}
        everybody = [run for kind in started for run in started[kind]]
        until(lambda: follow(prefect, cortex, everybody, placed, ended), "the end of all runs")
        jobs = len(cortex.list_jobs()) - len(blockers)
        parts = [parts_of(prefect, run, placed[JOBS[run]]) for run in started["suspended"]]

    latency = {kind: [ended[run] - placed[JOBS[run]] for run in started[kind]] for kind in started}
    report(runs, held, memory, watching, latency, jobs)
    print(f"placed to completed when suspended, {every_s:g} s between two passes and {poll_s:g} s between two polls:")
    for part in PARTS:
        seconds = [found[part] for found in parts]
        print(f"  {part:22}{statistics.median(seconds):24.1f}   {min(seconds):.1f} to {max(seconds):.1f}")


JOBS: dict[UUID, str] = {}
"""The job of each flow run."""


def follow(prefect: Any, cortex: Any, runs: list[UUID], placed: dict[str, float], ended: dict[UUID, float]) -> bool:
    """Note whose job was placed and who has completed; True once all have."""
    now = time.time()
    for job in cortex.list_jobs():
        if job["status"] not in ("pending", "placing", "initializing"):
            placed.setdefault(job["job_id"], now)
    for run in runs:
        if run not in ended and state_of(prefect, run) == "Completed":
            ended[run] = now
    return len(ended) == len(runs)


PARTS = {
    "watcher": "Resuming",
    "worker's poll": "Pending",
    "start of a process": "Running",
    "flow": "Completed",
}
"""The parts of a suspended run's way back, each with the state in which it ends."""


def parts_of(prefect: Any, run: UUID, placed: float) -> dict[str, float]:
    """Seconds of each part, from the moment when the service placed the job."""
    states = sorted(prefect.read_flow_run_states(run), key=lambda state: state.timestamp)
    entered = {state.name: state.timestamp.timestamp() for state in states}
    ends = [placed, *(entered[state] for state in PARTS.values())]
    return {part: ends[place + 1] - ends[place] for place, part in enumerate(PARTS)}


def sub_jobs(n_gpus: int) -> list[dict[str, Any]]:
    optimizer = {"name": "AdamW", "lr": 1e-3}
    training = {"optimizer": optimizer, "max_seq_len": 128, "train_batch_size": 8, "n_gpus": n_gpus}
    return [{"job_type": "training", "model_name": "tiny", "dtype": "float32", "training_config": training}]


def start_run(prefect: Any, deployment: str) -> UUID:
    found = prefect.read_deployment_by_name(deployment)
    run: UUID = prefect.create_flow_run_from_deployment(found.id, parameters={"sub_jobs": sub_jobs(1)}).id
    return run


def state_of(prefect: Any, run: UUID) -> str:
    return str(prefect.read_flow_run(run).state_name)


def has_job(prefect: Any, run: UUID) -> bool:
    from prefect_cortex_training.labels import jobs_in, labels_of

    jobs = jobs_in(labels_of(prefect.read_flow_run(run)))
    if jobs:
        JOBS[run] = jobs[0].job_id
    return bool(jobs)


def processes_of(runs: list[UUID]) -> list[psutil.Process]:
    """The processes that execute flow runs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") in {str(run) for run in runs}:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {PATIENCE_S:g} s")
        time.sleep(0.2)


def report(
    runs: int,
    held: dict[str, list[psutil.Process]],
    memory: dict[str, int],
    watching: int,
    latency: dict[str, list[float]],
    jobs: int,
) -> None:
    print(f"{'':24}{'polling':>12}{'suspended':>12}")
    print(f"{'processes per run':24}{len(held['polling']) / runs:12.1f}{len(held['suspended']) / runs:12.1f}")
    per_run = {kind: memory[kind] / runs / 2**20 for kind in memory}
    print(f"{'memory per run, MiB':24}{per_run['polling']:12.0f}{per_run['suspended']:12.0f}")
    medians = {kind: statistics.median(latency[kind]) for kind in latency}
    print(f"{'placed to completed, s':24}{medians['polling']:12.1f}{medians['suspended']:12.1f}")
    print(
        f"one watcher for all: {watching / 2**20:.0f} MiB, {watching / max(memory['polling'] / runs, 1):.2f} of a run"
    )
    print(f"jobs created: {jobs} by {2 * runs} runs, ratio {jobs / (2 * runs):.2f}")


if __name__ == "__main__":
    main()
