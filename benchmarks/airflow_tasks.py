"""What tasks cost in a whole Airflow: worker slots of a training, and the overhead of a deferred operation.

    python benchmarks/airflow_tasks.py [--short 60] [--long 240] [--wait 20] [--links 3]

Airflow with api-server, scheduler, DAG processor, triggerer and LocalExecutor on SQLite, all on this machine, and local
services without a model, whose operations take the time they are asked to.

Slots: a task instance in state `running` holds a worker slot; its state is asked for every half a second. The
deferrable train operator runs trainings of two lengths, the blocking one the short one. What the deferrable task holds
is the same for both lengths, within what start-up varies: nothing runs on a worker in between. So the figure for an
hour of remote training is what one training holds, from start to end; a training that Airflow retries holds it once
more for each try. The blocking operator holds its slot all the time: for an hour, its share of the run times 3,600.

Overhead: three chains of `--links` tasks that wait `--wait` seconds each, at the same time: a bare deferral whose
trigger sleeps; the save operator that defers at once; and the save operator as it is, which polls inline for some
seconds first. Told is what a link of each chain takes over the wait: scheduling, two starts of a worker process, the
trigger's start and, for the operators, how late the end of the request is noticed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cortex_training import CortexTrainingClient  # noqa: E402
from cortex_training.datasets import build_dataset  # noqa: E402
from cortex_training.local.models import model_folder  # noqa: E402
from demo.airflow_cluster import AirflowCluster, SlotSampler  # noqa: E402
from demo.local_service import LocalService  # noqa: E402

CHAINS = {"bare": "bare deferral", "deferred": "save, deferred at once", "default": "save, as it is"}
STEP_S = 2.0
SUB_JOB = {
    "job_type": "training",
    "model_name": "tiny",
    "dtype": "float32",
    "training_config": {
        "optimizer": {"name": "AdamW", "lr": 3e-3},
        "max_seq_len": 128,
        "train_batch_size": 2,
        "n_gpus": 1,
    },
}
PATIENCE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=float, default=60.0, help="seconds of remote training")
    parser.add_argument("--long", type=float, default=240.0, help="seconds of remote training")
    parser.add_argument("--wait", type=float, default=20.0, help="seconds that every link of a chain waits")
    parser.add_argument("--links", type=int, default=3)
    parser.add_argument("--only", choices=("slots", "overhead"))
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cortex-bench-")))
        training = serve(stack, folder / "training", f"default:0.01;step:{STEP_S}")
        waits = serve(stack, folder / "waits", f"default:0.01;save:{options.wait}")
        paths = filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")])
        cluster = AirflowCluster(
            folder / "airflow",
            HERE / "airflow_dags",
            connections={"training": connection(training), "waits": connection(waits)},
            environment={
                "PYTHONPATH": os.pathsep.join(paths),
                # A worker that does not reach the API server within 5 s fails its task, and with it the measurement.
                "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
                "BENCH_LINKS": str(options.links),
                "BENCH_WAIT_S": str(options.wait),
            },
            parallelism=8,
        )
        stack.enter_context(cluster)
        if options.only != "overhead":
            measure_slots(cluster, folder, options.short, options.long)
        if options.only != "slots":
            measure_overhead(cluster, waits, options.links, options.wait)


def measure_slots(cluster: AirflowCluster, folder: Path, short_s: float, long_s: float) -> None:
    build_dataset(
        [{"prompt": f"What comes after {n}?", "completion": f"After {n} comes {n + 1}."} for n in range(100)],
        folder / "dataset",
        tokenizer=model_folder("tiny"),
        max_seq_len=128,
        seed=1,
    )
    for dag_id, seconds in (("train_deferrable", short_s), ("train_deferrable", long_s), ("train_blocking", short_s)):
        plan = training_plan(folder, f"{dag_id}-{seconds:.0f}", steps=max(1, round(seconds / STEP_S)))
        run_id = cluster.trigger_dag(dag_id, {"plan": plan})
        began = time.monotonic()
        with SlotSampler(cluster, dag_id, run_id, every_s=0.5) as slots:
            state = cluster.wait_for_run(dag_id, run_id, PATIENCE_S)
        took = time.monotonic() - began
        if state != "success":
            raise SystemExit(f"{dag_id} is {state}:\n{cluster.task_log(dag_id, run_id, 'train', 1)}")
        hour = slots.total if dag_id == "train_deferrable" else 3600 * slots.total / took
        print(
            f"{dag_id:>17}, {seconds:4.0f} s of steps in a run of {took:.0f} s: {slots.total:.1f} slot seconds; "
            f"{hour:.0f} for an hour of training",
            flush=True,
        )


def measure_overhead(cluster: AirflowCluster, service: LocalService, links: int, wait_s: float) -> None:
    with CortexTrainingClient.from_pat(service.base_url, service.token, "B", "PUBLIC") as client:
        jobs = {kind: client.create_job_from_body({"sub_job_configs": [SUB_JOB]})["job_id"] for kind in CHAINS}
        for job_id in jobs.values():
            client.wait_for_job(job_id)
    run_id = cluster.trigger_dag("waits", {kind: jobs[kind] for kind in ("deferred", "default")})
    if cluster.wait_for_run("waits", run_id, PATIENCE_S) != "success":
        raise SystemExit(f"waits: {cluster.task_states('waits', run_id)}")
    # A task's own times are of no use: Airflow sets them anew when the task resumes.
    began = moment(cluster.request("GET", f"/dags/waits/dagRuns/{quote(run_id, safe='')}")["start_date"])
    ended = {ti["task_id"]: moment(ti["end_date"]) for ti in cluster.task_instances("waits", run_id)}
    took = {kind: (ended[f"{kind}_{links - 1}"] - began) / links - wait_s for kind in CHAINS}
    for kind, what in CHAINS.items():
        print(f"{what:>23}: {took[kind]:.1f} s over the wait, {took[kind] / took['bare']:.2f} of the bare deferral's")


def moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def training_plan(folder: Path, name: str, *, steps: int) -> dict[str, Any]:
    return {
        "root": str(folder / name),
        "dataset": str(folder / "dataset" / "manifest.json"),
        "sub_jobs": [SUB_JOB],
        "steps": steps,
        "micro_batch_size": 2,
        "micro_batches_per_step": 1,
        "save_every_steps": 30,
        "learning_rate": {"schedule": "constant", "peak": 3e-3},
    }


def serve(stack: ExitStack, folder: Path, simulate: str) -> LocalService:
    service = LocalService(folder, threads=1, simulate=simulate)
    stack.callback(service.stop)
    return service.start()


def connection(service: LocalService) -> dict[str, Any]:
    return {
        "conn_type": "cortex_training",
        "host": service.base_url,
        "schema": "PUBLIC",
        "password": service.token,
        "extra": {"database": "B"},
    }


if __name__ == "__main__":
    main()
