"""How close the wire format comes to what it cannot do without: one SHA-256 and one copy of the payload.

    python benchmarks/wire.py [--megabytes 500] [--repeats 5] [--public-python PYTHON]

Each operation runs in a process of its own, in turns with its reference on the same data, and is shown as the ratio of
the two medians of CPU time, which other work on the machine changes less than wall time. Extra memory is the highest
resident size during the first run of the operation less the size before it, as a share of the payload (Linux only).
The payload is half int64, half bfloat16. `--public-python` is a Python with ``cortex-training==0.0.3``, torch and
numpy; its client does the same operations.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 60 * 1024 * 1024
OPTIONS: dict[str, Any] = {"kind": "request", "operation": "fwd-bwd", "max_bytes": CHUNK_BYTES, "force_chunk": True}

REFERENCES = {
    "encode to chunks": "SHA-256 + memcpy",
    "encode frame and chunks": "SHA-256 + memcpy",
    "decode chunks": "SHA-256 + memcpy",
    "dumps": "memcpy",
    "loads": "memcpy",
}
NOTES = {
    "encode to chunks": "iter_byte_chunks(frame_buffers(value)), each chunk dropped before the next",
    "encode frame and chunks": "list of all chunks of dumps(value), as the public client makes them",
    "decode chunks": "decode_byte_chunks, the chunks already in memory",
    "loads": "views of the frame (the public client: tensors of its own)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--public-python", help="a Python with cortex-training==0.0.3, torch and numpy")
    parser.add_argument("--measure", choices=REFERENCES, help=argparse.SUPPRESS)
    parser.add_argument("--client", choices=["ours", "public"], default="ours", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.client, options.measure, options.megabytes * 10**6, options.repeats)))
        return
    clients = {"ours": sys.executable} | ({"public": options.public_python} if options.public_python else {})
    print(f"{options.megabytes} MB, median of {options.repeats}; memory as a share of the payload\n")
    print(f"{'operation':26}{'client':9}{'CPU s':>9}{'reference':>20}{'CPU s':>9}{'ratio':>8}{'extra memory':>14}")
    for operation, reference in REFERENCES.items():
        for client, python in clients.items():
            if client == "public" and operation == "encode to chunks":
                continue
            result = run(python, client, operation, options)
            print(
                f"{operation:26}{client:9}{result['seconds']:>9.3f}{reference:>20}{result['reference_seconds']:>9.3f}"
                f"{result['seconds'] / result['reference_seconds']:>8.2f}{result['extra_memory']:>14.2f}"
            )
    print("\n" + "\n".join(f"{name}: {note}" for name, note in NOTES.items()))


def run(python: str, client: str, operation: str, options: argparse.Namespace) -> dict[str, float]:
    command = [python, __file__, "--measure", operation, "--client", client]
    command += ["--megabytes", str(options.megabytes), "--repeats", str(options.repeats)]
    # The folder of a script comes first on its import path, and this one holds a wire.py.
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONSAFEPATH": "1"})
    return dict(json.loads(done.stdout))


def measure(client: str, operation: str, size: int, repeats: int) -> dict[str, float]:
    work, reference = (ours if client == "ours" else public)(operation, size)
    gc.collect()
    before = resident_bytes()
    work()
    extra = peak_bytes() - before
    seconds: list[float] = []
    reference_seconds: list[float] = []
    for _ in range(repeats):
        seconds.append(timed(work))
        reference_seconds.append(timed(reference))
    return {
        "seconds": statistics.median(seconds),
        "reference_seconds": statistics.median(reference_seconds),
        "extra_memory": extra / size,
    }


def timed(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def resident_bytes() -> float:
    """The resident size now, from which on `peak_bytes` counts; NaN where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return math.nan
    return peak_bytes()


def peak_bytes() -> float:
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else math.nan


def reference_of(operation: str, buffers: list[Any]) -> Callable[[], Any]:
    """A copy of `buffers` into new memory, a chunk's size at a time, and a SHA-256 where the operation has one."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]

    def reference() -> None:
        if "SHA-256" in REFERENCES[operation]:
            digest = hashlib.sha256()
            for view in views:
                digest.update(view)
        for view in views:
            for start in range(0, len(view), CHUNK_BYTES):
                bytes(view[start : start + CHUNK_BYTES])

    return reference


def ours(operation: str, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import numpy as np

    from cortex_training import wire

    halves = np.full(size // 4, 0x3F80, np.uint16)
    value = {
        "ids": np.full(size // 16, 7),
        "weights": wire.RawTensor("BF16", halves.shape, memoryview(halves).cast("B")),
    }
    buffers = wire.frame_buffers(value)
    if operation == "encode to chunks":
        return lambda: drain(wire.iter_byte_chunks(wire.frame_buffers(value), **OPTIONS)), reference_of(
            operation, buffers
        )
    return by_list(wire, operation, value, buffers, {"framework": "numpy"})


def public(operation: str, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    from cortex_training import wire

    value = {
        "ids": torch.full((size // 16,), 7, dtype=torch.int64),
        "weights": torch.full((size // 4,), 1.0, dtype=torch.bfloat16),
    }
    return by_list(wire, operation, value, [tensor.view(torch.uint8).numpy() for tensor in value.values()], {})


def by_list(
    wire: Any, operation: str, value: Any, buffers: list[Any], options: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The operations that both clients have."""
    if operation == "encode frame and chunks":
        return lambda: wire.encode_byte_chunks(wire.dumps(value), **OPTIONS), reference_of(operation, buffers)
    if operation == "dumps":
        return lambda: wire.dumps(value), reference_of(operation, buffers)
    frame = wire.dumps(value)
    if operation == "loads":
        return lambda: wire.loads(frame, **options), reference_of(operation, [frame])
    chunks = wire.encode_byte_chunks(frame, **OPTIONS)
    return lambda: wire.decode_byte_chunks(chunks), reference_of(operation, chunks)


def drain(chunks: Iterator[bytes]) -> None:
    for chunk in chunks:
        del chunk  # else it would live on while the next one is built


if __name__ == "__main__":
    main()
