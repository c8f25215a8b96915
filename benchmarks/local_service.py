"""What the local service costs: starting, being polled while it trains, training, and holding jobs.

    python benchmarks/local_service.py [--only start polls training memory] [--repeats 5] [--seconds 4]

Start: from the command to the line that says it is ready, and from a create call to a running job in a fresh service.

Polls: N connections of another process, each asking again as soon as it has its answer, while a job trains without a
pause. CPU is that of the service's event loop alone, per poll; the training thread's is not in it.

Training: the tiny model, 8 x 128 tokens, a forward-backward and a step each time. The service (one caller, over HTTP,
who polls every request to its end; and one who is three steps ahead) beside the same loop in plain PyTorch, in
turns, each in a process of its own with one thread. The ratio is the median of the turns' ratios.

Memory: resident memory of the service with no job, with one, and with ten training jobs on the tiny model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch

from cortex_training import wire

_ROWS, _LENGTH = 8, 128
_AHEAD = 3
_PREFIX = "/api/v2/databases/DB/schemas/PUBLIC/cortex-training"
_TRAINING = {
    "job_type": "training",
    "model_name": "tiny",
    "training_config": {
        "optimizer": {"name": "AdamW", "lr": 1e-3},
        "max_seq_len": _LENGTH,
        "train_batch_size": _ROWS,
        "n_gpus": 1,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each number of connections polls")
    parser.add_argument("--steps", type=int, default=100, help="steps of each turn of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.only:
        _PARTS[part](options)


class Job:
    """One running job, and its calls."""

    def __init__(self, base_url: str) -> None:
        self._session = requests.Session()
        self._session.trust_env = False
        self._prefix = base_url + _PREFIX
        self.job_id = str(uuid.uuid4())
        self._call("POST", "", json={"job_id": self.job_id, "sub_job_configs": [_TRAINING]})
        while self._call("GET", f"/{self.job_id}")["status"] != "running":
            time.sleep(0.005)

    def forward_backward(self, frame: bytes) -> str:
        headers = {"content-type": "application/octet-stream"}
        return str(self._call("POST", f"/{self.job_id}/forward-backward", data=frame, headers=headers)["request_id"])

    def step(self) -> str:
        return str(self._call("POST", f"/{self.job_id}/step", json={})["request_id"])

    def wait(self, request_id: str, pause_s: float) -> dict[str, Any]:
        while True:
            page = self._call("GET", f"/{self.job_id}/requests/{request_id}")
            if page["status"] in ("done", "failed"):
                assert page["status"] == "done", page
                return page
            time.sleep(pause_s)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        reply = self._session.request(method, self._prefix + path, timeout=60, **options)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


@contextmanager
def service() -> Iterator[tuple[str, int]]:
    """A service of its own; its address and process id."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    command = [sys.executable, "-m", "cortex_training.local", "serve", "--port", "0", "--json-ready", "--gpus", "64"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [*command, "--data-dir", str(folder), "--placing-seconds", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["base_url"], process.pid
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def frame_of(seed: int) -> bytes:
    ids = torch.randint(4, 512, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(seed))
    return wire.dumps(
        {
            "args": (),
            "kwargs": {"input_ids": ids, "use_cache": False},
            "context": {"input_ids": ids, "loss_mask": torch.ones(ids.shape)},
            "processing": {"loss_fn": "causal_cross_entropy", "post": [], "config": {}},
        }
    )


def measure_start(options: argparse.Namespace) -> None:
    ready, running = [], []
    for _ in range(options.repeats):
        began = time.perf_counter()
        with service() as (base_url, _):
            ready.append(time.perf_counter() - began)
            began = time.perf_counter()
            Job(base_url)
            running.append(time.perf_counter() - began)
    print(f"start to ready                 {statistics.median(ready):6.2f} s   (median of {options.repeats})")
    print(f"first job, create to running   {statistics.median(running):6.2f} s   torch and transformers are imported\n")


def measure_polls(options: argparse.Namespace) -> None:
    print(f"{'connections':>11} {'polls/s':>9} {'CPU/poll':>10} {'p50':>9} {'p99':>9}   {'training':>12}")
    with service() as (base_url, pid):
        job = Job(base_url)
        finished = job.step()
        job.wait(finished, 0.001)
        stop, steps = threading.Event(), [0]
        trainer = threading.Thread(target=_keep_training, args=(base_url, stop, steps))
        trainer.start()
        while not steps[0]:
            time.sleep(0.01)
        alone = _rate_of(steps, options.seconds)
        print(f"{0:>11} {'':>9} {'':>10} {'':>9} {'':>9}   {alone:5.1f} steps/s")
        path = f"{_PREFIX}/{job.job_id}/requests/{finished}"
        for connections in (1, 100, 1000):
            before, steps_before, began = _loop_cpu_s(pid), steps[0], time.perf_counter()
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.apply(_nothing)
                before, steps_before, began = _loop_cpu_s(pid), steps[0], time.perf_counter()
                took = pool.apply(poll_for, (base_url, path, connections, options.seconds))
            seconds, cpu = time.perf_counter() - began, _loop_cpu_s(pid) - before
            rate = (steps[0] - steps_before) / seconds
            took.sort()
            p50, p99 = (1000 * took[int(share * (len(took) - 1))] for share in (0.5, 0.99))
            print(
                f"{connections:>11} {len(took) / options.seconds:>9.0f} {1e6 * cpu / len(took):>7.0f} us"
                f" {p50:>6.1f} ms {p99:>6.1f} ms   {rate:5.1f} steps/s"
            )
        stop.set()
        trainer.join()
    print()


def _nothing() -> None:
    """Makes the pool's process start before anything is measured."""


def _rate_of(steps: list[int], seconds: float) -> float:
    before = steps[0]
    time.sleep(seconds)
    return (steps[0] - before) / seconds


def _keep_training(base_url: str, stop: threading.Event, steps: list[int]) -> None:
    """Steps ahead all the time, so that the training thread never waits for this one."""
    job, frame = Job(base_url), frame_of(0)
    sent: list[str] = []
    while not stop.is_set():
        while len(sent) <= _AHEAD:
            job.forward_backward(frame)
            sent.append(job.step())
        job.wait(sent.pop(0), 0.02)
        steps[0] += 1


def _loop_cpu_s(pid: int) -> float:
    """CPU seconds of a process's first thread, in which the service has its event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def poll_for(base_url: str, path: str, connections: int, seconds: float) -> list[float]:
    """Seconds of every poll that was answered in time."""
    return asyncio.run(_poll_for(base_url, path, connections, seconds))


async def _poll_for(base_url: str, path: str, connections: int, seconds: float) -> list[float]:
    host, port = base_url.removeprefix("http://").split(":")
    asked = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer x\r\n\r\n".encode()
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(connections)]
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (began := time.perf_counter()) < end:
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            took.append(time.perf_counter() - began)

    await asyncio.gather(*[ask(*streams) for streams in opened])
    for _, writer in opened:
        writer.close()
    return took


def measure_training(options: argparse.Namespace) -> None:
    tokens = _ROWS * _LENGTH * options.steps
    rates: dict[str, list[float]] = {"plain PyTorch": [], "service, polled": [], "service, steps ahead": []}
    with service() as (base_url, _), multiprocessing.get_context("spawn").Pool(1) as pool:
        job, frames = Job(base_url), [frame_of(seed) for seed in range(8)]
        train_polled(job, frames, 10)
        pool.apply(train_plainly, (10,))
        for _ in range(options.repeats):
            rates["plain PyTorch"].append(tokens / pool.apply(train_plainly, (options.steps,)))
            rates["service, polled"].append(tokens / train_polled(job, frames, options.steps))
            rates["service, steps ahead"].append(tokens / train_ahead(job, frames, options.steps))
    print(f"{'training, tiny, 8 x 128':24} {'tokens/s':>10} {'ratio':>7}")
    for name, values in rates.items():
        ratios = [value / plain for value, plain in zip(values, rates["plain PyTorch"], strict=True)]
        print(f"{name:24} {statistics.median(values):>10,.0f} {statistics.median(ratios):>7.2f}")
    print()


def train_polled(job: Job, frames: list[bytes], steps: int) -> float:
    began = time.perf_counter()
    for number in range(steps):
        job.wait(job.forward_backward(frames[number % len(frames)]), 0.002)
        job.wait(job.step(), 0.002)
    return time.perf_counter() - began


def train_ahead(job: Job, frames: list[bytes], steps: int) -> float:
    began, sent = time.perf_counter(), list[str]()
    for number in range(steps):
        job.forward_backward(frames[number % len(frames)])
        sent.append(job.step())
        if len(sent) > _AHEAD:
            job.wait(sent.pop(0), 0.01)
    job.wait(sent[-1], 0.01)
    return time.perf_counter() - began


def train_plainly(steps: int) -> float:
    """The loop that anyone would write: the same model, batches, loss and optimizer."""
    from transformers import AutoModelForCausalLM

    from cortex_training.local.models import model_folder

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder("tiny"), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [
        torch.randint(4, 512, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(seed)) for seed in range(8)
    ]
    began = time.perf_counter()
    for number in range(steps):
        ids = batches[number % len(batches)]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())
    return time.perf_counter() - began


def measure_memory(options: argparse.Namespace) -> None:
    held = {}
    with service() as (base_url, pid):
        held[0] = _resident_mib(pid)
        frame = frame_of(0)
        for number in range(1, 11):
            job = Job(base_url)
            job.wait(job.forward_backward(frame), 0.01)
            job.wait(job.step(), 0.01)
            if number in (1, 10):
                held[number] = _resident_mib(pid)
    print("memory, MiB: " + ", ".join(f"{jobs} jobs {mib:.0f}" for jobs, mib in held.items()))
    print(f"             {(held[10] - held[1]) / 9:.1f} a further job\n")


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


_PARTS = {"start": measure_start, "polls": measure_polls, "training": measure_training, "memory": measure_memory}

if __name__ == "__main__":
    main()
