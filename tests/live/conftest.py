"""Real engines for the live tests, each in a folder and on ports of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.airflow_cluster import COMPONENTS, AirflowCluster

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
