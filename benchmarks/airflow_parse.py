"""What importing the operators and sensors costs a DAG file, beside those of the Databricks provider.

    python benchmarks/airflow_parse.py [--repeats 5]

Every module of operators and sensors is imported in a process of its own that has imported `airflow.sdk` already, as a
DAG processor has when it forks for a file; the two providers in turns. Told are the CPU time of the imports and how
many modules came with them, as medians, and the median of the turns' ratios. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

PACKAGES = {"cortex_training": "airflow_cortex_training", "databricks": "airflow.providers.databricks"}
IMPORT = """
import importlib, json, pkgutil, sys, time
import airflow.sdk
from airflow.sdk import DAG, BaseOperator, BaseSensorOperator
package = sys.argv[1]
loaded, began = len(sys.modules), time.process_time()
for part in ("operators", "sensors"):
    found = importlib.import_module(f"{package}.{part}")
    for module in pkgutil.iter_modules(found.__path__):
        importlib.import_module(f"{package}.{part}.{module.name}")
print(json.dumps([time.process_time() - began, len(sys.modules) - loaded]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    for package in PACKAGES.values():
        imported(package)  # Writes the bytecode, which a DAG processor finds written.
    turns = [{name: imported(package) for name, package in PACKAGES.items()} for _ in range(repeats)]
    for name in PACKAGES:
        seconds = statistics.median(turn[name][0] for turn in turns)
        print(f"{name:>15}: {1000 * seconds:.0f} ms of CPU, {turns[0][name][1]} modules")
    ratio = statistics.median(turn["cortex_training"][0] / turn["databricks"][0] for turn in turns)
    print(f"          ratio: {ratio:.2f}")


def imported(package: str) -> tuple[float, int]:
    """Seconds of CPU, and modules that were not there before."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, package], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    return seconds, modules


if __name__ == "__main__":
    main()
