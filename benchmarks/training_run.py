"""What the durable training run costs beside the service's own work.

    python benchmarks/training_run.py [--only overhead bucket loop recovery] [--public-python PYTHON] [--steps N]

Overhead: a run and the same loop written with the public client 0.0.3, each in a process of its own with a job of its
own, on a service whose operations take a time that is asked for: lognormal with sigma 10 % around 0.2, 1 and 10 s, and
twice that from the middle on, so that learning a constant does not help. The overhead is the wall time, from before the
job is created until it is cancelled, beyond the seconds that the service says its operations took, as a share of these.
Imports are not in it. The run writes its journal and saves to a directory; the public client's loop keeps nothing.

Bucket: the same at 1 s with the run's root in an S3 bucket (moto, in a process of its own).

Loop: 16 runs with frames of 8 MiB, and 1,000 waits for other requests, in one event loop; how late a timer of 10 ms is.

Recovery: a driver is killed with SIGKILL after a random time, and the command is started again: seconds from the start
of the process to the first operation that the service receives from it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MICRO_BATCHES = 2
OPERATIONS = ["forward-backward", "step", "save", "load", "weight-sync"]
STEPS_AT = {0.2: 30, 1.0: 12, 10.0: 3}
"""Steps of a run by the median of its operations, in seconds: some minutes altogether."""
_SIGMA = 0.1
_FRAME_BYTES = 8 * 1024 * 1024
_BYTES_PER_TOKEN = 36
_LONG = 4096
_MOTO = """
import signal
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
signal.pause()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--public-python", help="a Python with cortex-training==0.0.3")
    parser.add_argument("--paces", nargs="+", type=float, choices=list(STEPS_AT), default=list(STEPS_AT))
    parser.add_argument("--steps", type=int, help="of a run, at every pace; by default what takes a few minutes")
    parser.add_argument("--runs", type=int, default=16, help="runs in one event loop")
    parser.add_argument("--waits", type=int, default=1000, help="waits beside them")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--drive", choices=["ours", "public", "many"], help=argparse.SUPPRESS)
    parser.add_argument("--orders", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        print(json.dumps(_DRIVERS[options.drive](options.orders)))
        return
    if options.steps:
        STEPS_AT.update(dict.fromkeys(options.paces, options.steps))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for part in options.only:
            _PARTS[part](options, Path(folder))


# -- what is measured


def measure_overhead(options: argparse.Namespace, folder: Path) -> None:
    data = small_dataset(folder)
    print(f"a run and a loop, {MICRO_BATCHES} batches a step, one save in the middle and one in the end\n")
    print(f"{'operations':>12}{'':>10}{'wall s':>10}{'busy s':>10}{'overhead':>10}{'polls':>8}   (polls per operation)")
    for pace in options.paces:
        with simulated_service(folder, pace) as ready:
            loops = {"ours": [sys.executable]}
            if options.public_python:
                loops["public"] = [options.public_python, "-I"]
            place = folder / f"run-{pace}"
            for client, python in loops.items():
                report(client, pace, ready, python, orders_of(ready, place, data, pace, client))


def measure_bucket(options: argparse.Namespace, folder: Path) -> None:
    data = small_dataset(folder)
    with bucket(folder) as (root, credentials), simulated_service(folder, 1.0) as ready:
        orders = orders_of(ready, folder / "in-bucket", data, 1.0, "ours")
        orders["plan"] |= {"root": root, "credentials": credentials}
        report("bucket", 1.0, ready, [sys.executable], orders)


def report(client: str, pace: float, ready: dict[str, Any], python: list[str], orders: dict[str, Any]) -> None:
    """Let a driver make its run, and print what it took beside what the service says."""
    control = control_of(ready)
    polls = control.add("delay", on="poll", seconds=0, times=0)
    driver = "public" if client == "public" else "ours"
    found = json.loads(
        output_of([*python, __file__, "--drive", driver, "--orders", json.dumps(orders)]).splitlines()[-1]
    )
    busy = control.busy(found["job_id"])
    asked = control.rules()[polls]["seen"]
    control.remove(polls)
    count = sum(one["count"] for one in busy["operations"].values())
    over = found["wall_s"] / busy["busy_s"] - 1
    print(
        f"{pace:>10g} s{client:>10}{found['wall_s']:>10.2f}{busy['busy_s']:>10.2f}{over:>10.1%}{asked / count:>8.1f}"
        + (f"   CPU {found['cpu_s'] / count * 1000:.1f} ms per operation" if "cpu_s" in found else ""),
        flush=True,
    )


def measure_loop(options: argparse.Namespace, folder: Path) -> None:
    data = long_dataset(folder)
    with simulated_service(folder, 1.0) as ready:
        orders = {
            "base_url": ready["base_url"],
            "waits": options.waits,
            "plans": [
                plan_of(folder / f"loop-{number}", data, 4)
                | {"micro_batch_size": _FRAME_BYTES // _BYTES_PER_TOKEN // _LONG}
                for number in range(options.runs)
            ],
        }
        found = json.loads(
            output_of([sys.executable, __file__, "--drive", "many", "--orders", json.dumps(orders)]).splitlines()[-1]
        )
    print(
        f"\n{options.runs} runs with frames of {found['frame_bytes'] / 2**20:.1f} MiB and {options.waits} waits in one "
        f"event loop, {found['seconds']:.0f} s: a timer is late by {found['p50_ms']:.1f} ms (median), "
        f"{found['p99_ms']:.0f} ms (99 %), {found['worst_ms']:.0f} ms (most)",
        flush=True,
    )


def measure_recovery(options: argparse.Namespace, folder: Path) -> None:
    data = small_dataset(folder)
    chance = random.Random(1)
    plan_file = folder / "recovery.json"
    plan_file.write_text(json.dumps(plan_of(folder / "recovery", data, 100_000)))
    with simulated_service(folder, 0.2) as ready:
        control = control_of(ready)
        arrived = control.add("delay", on=OPERATIONS, seconds=0, times=0)
        command = [sys.executable, "-c", "import sys; from cortex_training.cli import main; sys.exit(main())"]
        command += ["--base-url", ready["base_url"], "--database", "DB", "--schema", "S", "train", str(plan_file)]
        took = []
        for number in range(options.kills + 1):
            before = control.fired(arrived)
            began = time.monotonic()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                control.wait_until_fired(arrived, before + 1, timeout_s=120)
                if number:  # the first one creates the job
                    took.append(time.monotonic() - began)
                time.sleep(chance.uniform(0.3, 1.5))
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
    print(
        f"\nrecovery after kill -9: {statistics.median(took):.2f} s (median of {len(took)}), {min(took):.2f} s to "
        f"{max(took):.2f} s; {sum(t > 4 for t in took)} had to wait for the sending window of the last driver",
        flush=True,
    )


# -- drivers, each in a process of its own


def drive_ours(orders: dict[str, Any]) -> dict[str, Any]:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.training import TrainingPlan, run

    async def drive() -> str:
        async with AsyncCortexTrainingClient(orders["base_url"], "DB", "S") as client:
            return (await run(TrainingPlan.from_dict(orders["plan"]), client)).job_id

    began, cpu = time.monotonic(), time.process_time()
    job_id = asyncio.run(drive())
    return {"job_id": job_id, "wall_s": time.monotonic() - began, "cpu_s": time.process_time() - cpu}


def drive_public(orders: dict[str, Any]) -> dict[str, Any]:
    """The same loop as people write it: no journal, no recovery."""
    from cortex_training import CortexTrainingClient

    frames = [Path(path).read_bytes() for path in orders["frames"]]
    plan = orders["plan"]
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # it prints what it sends
        client = CortexTrainingClient(orders["base_url"], "DB", "S")
        began, cpu = time.monotonic(), time.process_time()
        job_id = client.create_job_from_body({"sub_job_configs": plan["sub_jobs"]})
        job_id = job_id["job_id"] if isinstance(job_id, dict) else job_id
        client.wait_for_job(job_id)
        for step in range(1, plan["steps"] + 1):
            for _ in range(MICRO_BATCHES):
                client.poll_request(job_id, client.forward_backward(job_id, frames[step % len(frames)]))
            client.poll_request(job_id, client.step(job_id, 1e-3))
            if step % plan["save_every_steps"] == 0 or step == plan["steps"]:
                client.poll_request(job_id, client.save(job_id, checkpoint_type="resumable"))
        client.poll_request(job_id, client.forward_backward(job_id, frames[0]))
        client.cancel_job(job_id)
        wall, used = time.monotonic() - began, time.process_time() - cpu
    return {"job_id": job_id, "wall_s": wall, "cpu_s": used}


def drive_many(orders: dict[str, Any]) -> dict[str, Any]:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.datasets import Dataset
    from cortex_training.training import TrainingPlan, run

    late: list[float] = []

    async def watch() -> None:
        while True:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - due)

    async def wait_for_many(client: AsyncCortexTrainingClient) -> tuple[str, list[asyncio.Task[Any]]]:
        """Requests that stand in one queue behind another, each waited for by a task."""
        job_id = (await client.create_job_from_body({"sub_job_configs": [training()]}))["job_id"]
        await client.wait_for_job(job_id)
        requests = [await client.step(job_id) for _ in range(orders["waits"])]
        return job_id, [asyncio.create_task(client.poll_request(job_id, request)) for request in requests]

    async def drive() -> float:
        async with AsyncCortexTrainingClient(orders["base_url"], "DB", "S") as client:
            other, waits = await wait_for_many(client)
            await asyncio.sleep(2.0)
            timer = asyncio.create_task(watch())
            began = time.monotonic()
            await asyncio.gather(*(run(TrainingPlan.from_dict(plan), client) for plan in orders["plans"]))
            seconds = time.monotonic() - began
            timer.cancel()
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            await client.cancel_job(other)
        return seconds

    allow_many_files()
    plan = orders["plans"][0]
    batches = Dataset.open(plan["dataset"]).batches(plan["micro_batch_size"], MICRO_BATCHES, 0)
    seconds = asyncio.run(drive())
    late.sort()
    return {
        "frame_bytes": len(batches.frame(1, 0)),
        "seconds": seconds,
        "p50_ms": 1000 * late[len(late) // 2],
        "p99_ms": 1000 * late[len(late) * 99 // 100],
        "worst_ms": 1000 * late[-1],
    }


# -- what they need


def training(window: int = _LONG) -> dict[str, Any]:
    config = {"optimizer": {"name": "AdamW"}, "max_seq_len": window, "train_batch_size": 2, "n_gpus": 1}
    return {"job_type": "training", "model_name": "Qwen/Qwen3-1.7B", "training_config": config}


def plan_of(root: Path, dataset: Path, steps: int) -> dict[str, Any]:
    return {
        "root": str(root),
        "dataset": str(dataset),
        "steps": steps,
        "micro_batch_size": 2,
        "micro_batches_per_step": MICRO_BATCHES,
        "save_every_steps": max(1, (steps + 1) // 2),
        "learning_rate": {"schedule": "constant", "peak": 1e-3},
        "sub_jobs": [training()],
    }


def orders_of(ready: dict[str, Any], place: Path, data: Path, pace: float, client: str) -> dict[str, Any]:
    from cortex_training.datasets import Dataset

    orders = {"base_url": ready["base_url"], "plan": plan_of(place, data, STEPS_AT[pace]), "frames": []}
    batches = Dataset.open(data).batches(2, MICRO_BATCHES, 0)
    for number in range(4 if client == "public" else 0):
        path = place.with_name(f"{place.name}-frame-{number}")
        path.write_bytes(batches.frame(number + 1, 0))
        orders["frames"].append(str(path))
    return orders


def small_dataset(folder: Path) -> Path:
    rows = ({"prompt": f"What comes after {n}?", "completion": f"After {n} comes {n + 1}."} for n in range(200))
    return _dataset(folder / "small", rows, 96)


def long_dataset(folder: Path) -> Path:
    rows = ({"text": f"{n} and then " * 1200} for n in range(80))
    return _dataset(folder / "long", rows, _LONG)


def _dataset(folder: Path, rows: Iterator[dict[str, str]], window: int) -> Path:
    from cortex_training.datasets import build_dataset
    from cortex_training.local.models import model_folder

    manifest = folder / "manifest.json"
    if not manifest.exists():
        build_dataset(rows, folder, tokenizer=model_folder("tiny"), max_seq_len=window, overlong="truncate")
    return manifest


@contextlib.contextmanager
def simulated_service(folder: Path, pace: float) -> Iterator[dict[str, Any]]:
    """A service whose operations take `pace` seconds, and twice that behind the middle of a run."""
    steps = STEPS_AT[pace]
    shift = {"median": pace, "sigma": _SIGMA, "factor": 2.0}
    durations = {
        "default": {**shift, "after": 1},
        "step": {**shift, "after": steps // 2},
        "forward-backward": {**shift, "after": MICRO_BATCHES * steps // 2},
    }
    simulation = folder / f"pace-{pace}.json"
    simulation.write_text(json.dumps({"seed": 1, "durations": durations}))
    faults = folder / "no-faults.json"
    faults.write_text("{}")
    command = [
        *(sys.executable, "-m", "cortex_training.local", "serve", "--port", "0", "--json-ready", "--gpus", "4096"),
        *("--placing-seconds", "0", "--simulate", str(simulation), "--faults", str(faults)),
    ]
    with tempfile.TemporaryDirectory(dir=folder) as data:
        process = subprocess.Popen([*command, "--data-dir", data], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()
            process.wait()


def control_of(ready: dict[str, Any]) -> Any:
    from cortex_training.local.control_client import ServiceControl

    return ServiceControl.of(ready)


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[tuple[str, str]]:
    """The root of a run in a bucket of moto, and where its credentials are."""
    import boto3

    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        keys = {"aws_access_key_id": "bench", "aws_secret_access_key": "bench"}
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="bench")
        secret = folder / "secret"
        secret.mkdir(mode=0o700)
        told = {"access_key_id": "bench", "secret_access_key": "bench", "endpoint": endpoint}
        for name, value in told.items():
            (secret / name).write_text(value)
            (secret / name).chmod(0o600)
        yield "s3://bench/run", f"file:{secret}"
    finally:
        process.terminate()
        process.wait()


def output_of(command: list[str]) -> str:
    # The folder of a script comes first on its import path, and so does the current one; both hold other modules.
    environment = os.environ | {"PYTHONSAFEPATH": "1", "CORTEX_TRAINING_DISABLE_TELEMETRY": "1"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def allow_many_files() -> None:
    """A socket per wait is more than many systems allow at first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_PARTS = {
    "overhead": measure_overhead,
    "bucket": measure_bucket,
    "loop": measure_loop,
    "recovery": measure_recovery,
}
_DRIVERS = {"ours": drive_ours, "public": drive_public, "many": drive_many}

if __name__ == "__main__":
    main()
