"""Real engines for the live tests, each in a folder and on ports of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex_training.datasets import build_dataset
from cortex_training.local.models import model_folder
from demo.airflow_cluster import COMPONENTS, AirflowCluster
from tests.faults.proxy import FaultProxy

DAGS = Path(__file__).parent / "dags"

# A killed triggerer is missed after seconds, not after half a minute.
QUICK_FAILOVER = {
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "5",
}


@pytest.fixture
def start_airflow(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., AirflowCluster]]:
    """A function that starts an Airflow: `start_airflow(dags_folder, connections={...}, environment={...})`.

    When the test failed, the ends of the components' logs are printed.
    """
    clusters: list[AirflowCluster] = []

    def start(dags_folder: Path = DAGS, **options: Any) -> AirflowCluster:
        cluster = AirflowCluster(tmp_path / f"airflow-{len(clusters)}", dags_folder, **options)
        clusters.append(cluster)
        cluster.start()
        return cluster

    failed_before = request.session.testsfailed
    yield start
    for cluster in clusters:
        cluster.stop()
        if request.session.testsfailed > failed_before:
            for component in COMPONENTS:
                sys.stdout.write(f"\n--- {component} ---\n{cluster.log_tail(component)}\n")


def cortex_connection(service: Any, proxy: FaultProxy) -> dict[str, Any]:
    """The local service behind the proxy, as an Airflow connection."""
    return {
        "conn_type": "cortex_training",
        "host": proxy.base_url,
        "schema": service.schema,
        "password": "a-token-for-the-local-service",
        "extra": {"database": service.database},
    }


def training_plan(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A plan for the tiny model that owns its job, in ``<folder>/<name>``; makes its dataset if there is none yet."""
    manifest = folder / "dataset" / "manifest.json"
    if not manifest.exists():
        rows = [{"prompt": f"What comes after {n}?", "completion": f"After {n} comes {n + 1}."} for n in range(100)]
        build_dataset(rows, manifest.parent, tokenizer=model_folder("tiny"), max_seq_len=128, seed=1)
    training = {"optimizer": {"name": "AdamW", "lr": 3e-3}, "max_seq_len": 128, "train_batch_size": 2, "n_gpus": 1}
    return {
        "root": str(folder / name),
        "dataset": str(manifest),
        "sub_jobs": [
            {
                "job_type": "training",
                "model_name": "tiny",
                "dtype": "float32",
                "seed": 7,
                "training_config": training,
            }
        ],
        "micro_batch_size": 2,
        "micro_batches_per_step": 2,
        "save_every_steps": 4,
        "learning_rate": {"schedule": "constant", "peak": 3e-3},
        **changes,
    }
