"""What a triggerer spends on deferred requests: this provider's poll hub beside one HTTP client in each trigger.

    python benchmarks/airflow_triggers.py [--waits 1000] [--more 5000] [--seconds 60]

A local service without a model holds `--waits` requests, a tenth of which end one by one while it is measured.
Processes wait for them one after another: triggers that only sleep (what Airflow itself spends); a plain trigger that
looks up its connection, opens an HTTP client of its own (httpx, which Airflow comes with) and asks every 5 s; the
provider's trigger; and the provider's trigger with `--more` requests.

Each process runs Airflow's own `TriggerRunner`: it creates the triggers, runs them and collects their events. What is
left out is its supervisor and the database: trigger rows come from a list, 50 a second, as the supervisor claims them.

CPU is that of the process: until every request was asked for once (start), and in `--seconds` after that, as a share
of one core, with what Airflow itself spends in it. Memory is resident memory over that of one wait. Loop lag is how
late a sleep of 50 ms ends, the worst of all: wall time, which a busy machine adds to, and CPU time of the loop's
thread, which it does not. Detection is from the end of a request, by the service's own log, to the trigger's event;
the requests that end are the last that were made.

The ratios leave out what the sleeping triggers spend. A machine with little time to spare lets the plain triggers ask
more rarely than they want to: its share is what a request costs, times the rate that was wanted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

CONN_ID = "bench"
CLAIMED_A_SECOND = 50
PLAIN_POLL_S = 5.0
LOOK_S = 0.05
STEPPING_JOBS = 4
FOR_EVER = 24 * 3600
SIMULATION = "default:0.01;save:3600;step:{step_s}"
SUB_JOB = {
    "job_type": "training",
    "model_name": "tiny",
    "training_config": {"optimizer": {"name": "AdamW", "lr": 1e-3}, "max_seq_len": 128, "train_batch_size": 8,
                        "n_gpus": 1},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waits", type=int, default=1000)
    parser.add_argument("--more", type=int, default=5000, help="waits with the triggerer's capacity raised; 0: none")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured once all triggers are under way")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        wait_in_this_process(options.child[0], Path(options.child[1]), options.seconds)
        return
    asleep, plain, hub = (measure(kind, options.waits, options.seconds) for kind in ("asleep", "plain", "hub"))
    wanted = (plain["busy"] - asleep["busy"]) / plain["requests_per_s"] * options.waits / PLAIN_POLL_S
    waiting, start = (hub["busy"] - asleep["busy"]) / wanted, hub["start_cpu_s"] / plain["start_cpu_s"]
    print(f"CPU of the hub beside one client each: {waiting:.3f} while waiting, {start:.3f} at the start", flush=True)
    if options.more:
        measure("hub", options.more, options.seconds)


def measure(kind: str, waits: int, seconds: float) -> dict[str, Any]:
    """Figures of one process that waits for `waits` requests, printed too."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cortex-bench-")))
        ending = waits // 10
        service = start_service(stack, folder, step_s=seconds * STEPPING_JOBS / ending)
        jobs = create_jobs(service)
        hand_over(folder / "waits.json", submit(service, jobs[:1], "save", waits - ending))
        child = start_child(stack, service, folder, kind, seconds)
        wait_for(folder / "started", child)
        hand_over(folder / "ending.json", submit(service, jobs[1:], "step", ending))
        wait_for(folder / "figures.json", child)
        figures = json.loads((folder / "figures.json").read_text())
        ended = {entry["request_id"]: entry["time"] for entry in service.execution_log()}
    delays = [at - ended[request] for request, at in figures.pop("events")]
    figures |= {"kind": kind, "waits": waits}
    report(figures, delays)
    return figures


def report(figures: dict[str, Any], delays: list[float]) -> None:
    detection = ""
    if len(delays) > 1:
        cuts = statistics.quantiles(delays, n=100)
        detection = f"; detection p50 {cuts[49]:.1f} s, p99 {cuts[98]:.1f} s ({len(delays)} requests)"
    print(
        f"{figures['kind']:>6} {figures['waits']:5} waits: start {figures['start_s']:.0f} s with "
        f"{figures['start_cpu_s']:.1f} s of CPU; then {100 * figures['busy']:.1f} % of a core, "
        f"{figures['requests_per_s']:.1f} requests/s, {figures['rss_kib']:.0f} KiB a wait; worst loop lag "
        f"{figures['lag_ms']:.0f} ms ({figures['lag_cpu_ms']:.0f} ms of CPU){detection}",
        flush=True,
    )


def start_service(stack: ExitStack, folder: Path, *, step_s: float) -> Any:
    from demo.local_service import LocalService

    service = LocalService(folder / "service", threads=1, simulate=SIMULATION.format(step_s=step_s))
    stack.callback(service.stop)
    return service.start()


def create_jobs(service: Any) -> list[str]:
    with client_of(service) as client:
        jobs = [client.create_job_from_body({"sub_job_configs": [SUB_JOB]})["job_id"] for _ in range(1 + STEPPING_JOBS)]
        for job_id in jobs:
            client.wait_for_job(job_id)
    return jobs


def submit(service: Any, jobs: list[str], operation: str, count: int) -> list[list[str]]:
    """Job, request and operation of every wait."""
    with client_of(service) as client:
        jobs = [jobs[number % len(jobs)] for number in range(count)]
        return [[job_id, getattr(client, operation)(job_id), operation] for job_id in jobs]


def client_of(service: Any) -> Any:
    from cortex_training import CortexTrainingClient

    return CortexTrainingClient.from_pat(service.base_url, service.token, "B", "PUBLIC")


def start_child(stack: ExitStack, service: Any, folder: Path, kind: str, seconds: float) -> subprocess.Popen[str]:
    connection = {
        "conn_type": "cortex_training",
        "host": service.base_url,
        "schema": "PUBLIC",
        "password": service.token,
        "extra": {"database": "B"},
    }
    environment = {
        f"AIRFLOW_CONN_{CONN_ID.upper()}": json.dumps(connection),
        "AIRFLOW_HOME": str(folder / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    log = stack.enter_context((folder / "child.log").open("w"))
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", kind, str(folder), "--seconds", str(seconds)],
        env=os.environ | environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.callback(child.kill)
    return child


def hand_over(path: Path, value: Any) -> None:
    """Whole or not at all."""
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


def wait_for(path: Path, child: subprocess.Popen[str]) -> None:
    while not path.exists():
        if child.poll() not in (None, 0):
            raise SystemExit((path.parent / "child.log").read_text()[-3000:])
        time.sleep(0.1)


# In the process that is measured


def wait_in_this_process(kind: str, folder: Path, seconds: float) -> None:
    logging.disable(logging.INFO)
    asyncio.run(run_triggers(kind, folder, seconds))


class Looks:
    """How often the service was asked, and for how many different requests."""

    def __init__(self) -> None:
        self.number = 0
        self.requests: set[str] = set()

    def note(self, request_id: str) -> None:
        self.number += 1
        self.requests.add(request_id)


LOOKS = Looks()


async def run_triggers(kind: str, folder: Path, seconds: float) -> None:
    classpath = count_looks_of_the_hub() if kind == "hub" else f"{__name__}.{kind.title()}Trigger"
    first, *waits = [(classpath, kwargs_of(*wait)) for wait in json.loads((folder / "waits.json").read_text())]
    # One wait alone pays for imports, connection and client: what is shared is not a wait's own memory.
    runner, events = runner_of()
    runner.add([first])
    running = asyncio.ensure_future(runner.arun())
    await until(lambda: len(LOOKS.requests) == 1)
    await asyncio.sleep(2)
    alone = rss_kib()

    lag = Lag()
    watching = asyncio.ensure_future(lag.watch())
    began, cpu = time.monotonic(), time.process_time()
    runner.add(waits)
    await until(lambda: len(LOOKS.requests) == 1 + len(waits))
    start_s, start_cpu_s = time.monotonic() - began, time.process_time() - cpu
    hand_over(folder / "started", [])
    await until((folder / "ending.json").exists)
    ending = json.loads((folder / "ending.json").read_text())
    runner.add([(classpath, kwargs_of(*wait)) for wait in ending])

    began, cpu, looks = time.monotonic(), time.process_time(), LOOKS.number
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - began
    figures = {
        "start_s": start_s,
        "start_cpu_s": start_cpu_s,
        "busy": (time.process_time() - cpu) / elapsed,
        "requests_per_s": (LOOKS.number - looks) / elapsed,
        "rss_kib": (rss_kib() - alone) / (len(waits) + len(ending)),
        **lag.worst,
        "events": [(event.payload["request_id"], at) for at, event in events],
    }
    watching.cancel()
    hand_over(folder / "figures.json", figures)
    running.cancel()
    os._exit(0)  # A thousand triggers have no cleaner end than the one Airflow gives them, and nobody measures it.


async def until(happened: Any) -> None:
    while not happened():  # noqa: ASYNC110 - what happens, happens in Airflow's code
        await asyncio.sleep(0.1)


def runner_of() -> tuple[Any, list[tuple[float, Any]]]:
    """Airflow's runner, fed from a list in place of its supervisor, and the events it collected with their times."""
    from airflow.executors.workloads import RunTrigger
    from airflow.jobs.triggerer_job_runner import TriggerRunner

    events: list[tuple[float, Any]] = []

    class Events(deque[Any]):
        def append(self, entry: Any) -> None:
            events.append((time.time(), entry.event))

    class FedRunner(TriggerRunner):
        def __init__(self) -> None:
            super().__init__()
            self.events = Events()
            self.waiting: deque[RunTrigger] = deque()
            self.numbers = itertools.count(1)

        def add(self, triggers: list[tuple[str, dict[str, Any]]]) -> None:
            for path, kwargs in triggers:
                number = next(self.numbers)
                self.waiting.append(RunTrigger(id=number, classpath=path, encrypted_kwargs=json.dumps(kwargs), ti=None))

        async def init_comms(self) -> None:
            self.comms_decoder = SimpleNamespace(_reader_task=asyncio.ensure_future(asyncio.Event().wait()))

        async def sync_state_to_supervisor(self, finished_ids: list[int]) -> None:
            for _ in range(min(CLAIMED_A_SECOND, len(self.waiting))):
                self.to_create.append(self.waiting.popleft())

    return FedRunner(), events


def kwargs_of(job_id: str, request_id: str, operation: str) -> dict[str, Any]:
    now = time.time()
    return {
        "target": {"conn_id": CONN_ID},
        "job_id": job_id,
        "request_id": request_id,
        "operation": operation,
        "started": now,
        "not_before": now,
        "deadline": now + FOR_EVER,
        "generation": [0, 0],
    }


def count_looks_of_the_hub() -> str:
    from airflow_cortex_training.triggers.requests import CortexTrainingRequestTrigger as Trigger
    from cortex_training.aio import AsyncCortexTrainingClient

    ask = AsyncCortexTrainingClient.get_request_status

    async def counted(client: AsyncCortexTrainingClient, job_id: str, request_id: str, **options: Any) -> Any:
        # Here the hub's budget has let it through.
        LOOKS.note(request_id)
        return await ask(client, job_id, request_id, **options)

    AsyncCortexTrainingClient.get_request_status = counted  # type: ignore[method-assign]
    return f"{Trigger.__module__}.{Trigger.__qualname__}"


class Lag:
    """How late the loop comes back to whoever sleeps in it."""

    def __init__(self) -> None:
        self.worst = {"lag_ms": 0.0, "lag_cpu_ms": 0.0}

    async def watch(self) -> None:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(LOOK_S)
            late = 1000 * (time.monotonic() - wall - LOOK_S)
            # What the thread computed between the two looks, if all of it came after the sleep was over.
            computed = 1000 * (time.thread_time() - cpu - LOOK_S)
            self.worst["lag_ms"] = max(self.worst["lag_ms"], late)
            self.worst["lag_cpu_ms"] = max(self.worst["lag_cpu_ms"], min(late, computed))


def rss_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


if os.environ.get("AIRFLOW_HOME") and "--child" in sys.argv:
    import httpx
    from airflow.sdk.bases.hook import BaseHook  # noqa: F401
    from airflow.triggers.base import BaseTrigger, TriggerEvent

    class AsleepTrigger(BaseTrigger):
        """Asks nobody."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.kwargs = kwargs

        def serialize(self) -> tuple[str, dict[str, Any]]:
            return f"{__name__}.{type(self).__name__}", self.kwargs

        async def run(self) -> AsyncIterator[TriggerEvent]:
            LOOKS.note(self.kwargs["request_id"])
            await asyncio.sleep(FOR_EVER)
            yield TriggerEvent({})
            return

    class PlainTrigger(AsleepTrigger):
        """As most providers write one: a connection, a client and a fixed interval for each trigger."""

        async def run(self) -> AsyncIterator[TriggerEvent]:
            from airflow.providers.common.compat.connection import get_async_connection

            connection = await get_async_connection(self.kwargs["target"]["conn_id"])
            database, schema = connection.extra_dejson["database"], connection.schema
            url = (
                f"{connection.host}/api/v2/databases/{database}/schemas/{schema}/cortex-training/"
                f"{self.kwargs['job_id']}/requests/{self.kwargs['request_id']}"
            )
            headers = {"Authorization": f"Bearer {connection.password}"}
            async with httpx.AsyncClient(headers=headers) as client:
                while True:
                    LOOKS.note(self.kwargs["request_id"])
                    reply = (await client.get(url)).raise_for_status().json()
                    if reply["status"] not in ("pending", "running"):
                        break
                    await asyncio.sleep(PLAIN_POLL_S)
            yield TriggerEvent({"request_id": self.kwargs["request_id"], "status": reply["status"]})
            return


if __name__ == "__main__":
    # Triggers are found by their module's name, which must not be imported a second time.
    sys.modules.setdefault("airflow_triggers", sys.modules[__name__])
    main()
