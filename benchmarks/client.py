"""What importing the client costs, and what a thousand waits in one process cost.

    python benchmarks/client.py [--waits 1000] [--seconds 10] [--rounds 6] [--public-python PYTHON]

Import: CPU time of the import statement in a fresh interpreter, median of `--repeats`.

Waits: `--waits` callers, each with a job of its own, schedule a step and poll it, `--rounds` times. A server in another
process says how long each step takes: lognormal with sigma 10 % around `--seconds`, and twice that in the second half
of the rounds, so that learning a constant does not help. Ours are tasks of one event loop, the public client's are
threads. CPU is that of the polling process without its imports, but with its submissions, per poll. The delay is from
the end of a step to the answer that told of it, as a share of the step's duration, seen at the server.

`--public-python` is a Python with ``cortex-training==0.0.3``; its client does the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

STATEMENTS = {
    "import cortex_training": "import cortex_training",
    "... and the client": "from cortex_training import CortexTrainingClient",
}
_SIGMA = 0.1
_PREFIX = "/api/v2/databases/{database}/schemas/{schema}/cortex-training"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waits", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="median duration of a step, before it doubles")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--public-python", help="a Python with cortex-training==0.0.3")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--poll", choices=["ours", "public"], help=argparse.SUPPRESS)
    parser.add_argument("--base-url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
    elif options.poll:
        poll(options)
    else:
        clients = {"ours": sys.executable} | ({"public": options.public_python} if options.public_python else {})
        compare_imports(clients, options)
        compare_waits(clients, options)


def compare_imports(clients: dict[str, str], options: argparse.Namespace) -> None:
    print(f"import, CPU ms, median of {options.repeats}\n")
    for label, statement in STATEMENTS.items():
        seconds: dict[str, list[float]] = {client: [] for client in clients}
        for _ in range(options.repeats):
            for client, python in clients.items():
                seconds[client].append(import_seconds(python, statement))
        medians = {client: statistics.median(values) for client, values in seconds.items()}
        shown = "".join(f"{client:>10} {1000 * median:8.1f}" for client, median in medians.items())
        print(f"{label:26}{shown}{ratio(medians)}")


def import_seconds(python: str, statement: str) -> float:
    program = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    return float(output_of([python, "-c", program]))


def ratio(values: dict[str, float]) -> str:
    return f"   ratio {values['ours'] / values['public']:.3f}" if "public" in values else ""


def compare_waits(clients: dict[str, str], options: argparse.Namespace) -> None:
    print(f"\n{options.waits} waits at once, steps of {options.seconds:g} s and then {2 * options.seconds:g} s\n")
    cpu: dict[str, float] = {}
    for client, python in clients.items():
        with server(options) as base_url:
            command = [python, __file__, "--poll", client, "--base-url", base_url, *forwarded(options)]
            seconds = json.loads(output_of(command).splitlines()[-1])["cpu_seconds"]
            seen = stats(base_url)
        cpu[client] = seconds / seen["polls"]
        print(
            f"{client:8}{seconds:8.1f} CPU s{seen['polls']:9} polls{1e6 * cpu[client]:9.0f} CPU us per poll{ratio(cpu)}"
        )
        print(f"{'':8}{'round':>6}{'polls per request':>20}{'delay p50':>12}{'delay p99':>12}")
        for number, one in enumerate(seen["rounds"], 1):
            print(f"{'':8}{number:>6}{one['polls']:>20.1f}{one['p50']:>12.1%}{one['p99']:>12.1%}")


def forwarded(options: argparse.Namespace) -> list[str]:
    return ["--waits", str(options.waits), "--seconds", str(options.seconds), "--rounds", str(options.rounds)]


def output_of(command: list[str]) -> str:
    # The folder of a script comes first on its import path, and so does the current one; both hold other modules.
    environment = os.environ | {"PYTHONSAFEPATH": "1", "CORTEX_TRAINING_DISABLE_TELEMETRY": "1"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


# The polling process


def poll(options: argparse.Namespace) -> None:
    from cortex_training import CortexTrainingClient

    allow_many_files()
    if options.poll == "ours":
        from cortex_training import AsyncCortexTrainingClient

        start = time.process_time()
        asyncio.run(poll_in_tasks(AsyncCortexTrainingClient(options.base_url, "DB", "S"), options))
    else:
        start = time.process_time()
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # it prints what it sends
            poll_in_threads(CortexTrainingClient(options.base_url, "DB", "S"), options)
    print(json.dumps({"cpu_seconds": time.process_time() - start}))


async def poll_in_tasks(client: Any, options: argparse.Namespace) -> None:
    async def wait(job_id: str) -> None:
        for _ in range(options.rounds):
            await client.poll_request(job_id, await client.step(job_id))

    async with client:
        await asyncio.gather(*(wait(f"job-{number}") for number in range(options.waits)))


def poll_in_threads(client: Any, options: argparse.Namespace) -> None:
    def wait(job_id: str) -> None:
        for _ in range(options.rounds):
            client.poll_request(job_id, client.step(job_id))

    threads = [threading.Thread(target=wait, args=(f"job-{number}",)) for number in range(options.waits)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def allow_many_files() -> None:
    """A socket per wait is more than many systems allow at first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# The server


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", *forwarded(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONSAFEPATH": "1"})
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def stats(base_url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{base_url}/stats") as answer:
        return dict(json.load(answer))


class Steps:
    """Every step that was scheduled: when it ends, how often it was polled, how late its end was told."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._random = random.Random(0)
        self._scheduled: dict[str, int] = {}
        self._ends: dict[str, tuple[float, float]] = {}
        self._polls: dict[str, int] = {}
        self._delays: dict[str, float] = {}

    def schedule(self, job_id: str) -> str:
        number = self._scheduled.get(job_id, 0)
        self._scheduled[job_id] = number + 1
        request_id = f"{job_id}.{number}"
        median = self._options.seconds * (1 if number < self._options.rounds / 2 else 2)
        duration = median * self._random.lognormvariate(0.0, _SIGMA)
        self._ends[request_id] = (time.monotonic() + duration, duration)
        self._polls[request_id] = 0
        return request_id

    def look(self, request_id: str) -> bool:
        self._polls[request_id] += 1
        end, duration = self._ends[request_id]
        late = time.monotonic() - end
        if late >= 0:
            self._delays.setdefault(request_id, late / duration)
        return late >= 0

    def stats(self) -> dict[str, Any]:
        rounds = []
        for number in range(self._options.rounds):
            names = [name for name in self._delays if name.endswith(f".{number}")]
            delays = sorted(self._delays[name] for name in names)
            rounds.append(
                {
                    "polls": statistics.mean(self._polls[name] for name in names),
                    "p50": delays[len(delays) // 2],
                    "p99": delays[min(len(delays) * 99 // 100, len(delays) - 1)],
                }
            )
        return {"polls": sum(self._polls.values()), "rounds": rounds}


async def serve(options: argparse.Namespace) -> None:
    from aiohttp import web

    allow_many_files()
    steps = Steps(options)

    async def step(request: web.Request) -> web.Response:
        return web.json_response({"request_id": steps.schedule(request.match_info["job"])})

    async def status(request: web.Request) -> web.Response:
        done = steps.look(request.match_info["request"])
        return web.json_response({"status": "done", "result": {"global_steps": 1}} if done else {"status": "running"})

    async def job(request: web.Request) -> web.Response:
        return web.json_response({"job_id": request.match_info["job"], "status": "running", "sub_jobs": []})

    async def told(request: web.Request) -> web.Response:
        return web.json_response(steps.stats())

    app = web.Application()
    app.router.add_post(_PREFIX + "/{job}/step", step)
    app.router.add_get(_PREFIX + "/{job}/requests/{request}", status)
    app.router.add_get(_PREFIX + "/{job}", job)
    app.router.add_get("/stats", told)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
