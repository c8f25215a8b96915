"""What is true of every operator, sensor, trigger and watcher: no secret stays, and deferring changes no result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.triggers.base import BaseTrigger

from airflow_cortex_training import links
from airflow_cortex_training.operators.checkpoints import CortexTrainingLoadOperator, CortexTrainingSaveOperator
from airflow_cortex_training.operators.sampling import CortexTrainingGenerateOperator, CortexTrainingWeightSyncOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.operators.training import CortexTrainingForwardBackwardOperator, CortexTrainingStepOperator
from airflow_cortex_training.triggers.drains import CortexTrainingDrainTrigger
from airflow_cortex_training.triggers.publication_events import CortexTrainingPublicationEventTrigger
from tests.airflow.conftest import PAT, TaskRun, fire_at_once
from tests.airflow.tour import PROMPT, Tour, can_defer, everything_said, provided, travel

OPERATORS = [kind for package in ("operators", "sensors") for kind in provided(package, BaseOperator)]
BOTH_WAYS = [kind for kind in OPERATORS if can_defer(kind)]

ALWAYS_DEFERRED = {
    CortexTrainingForwardBackwardOperator,
    CortexTrainingStepOperator,
    CortexTrainingSaveOperator,
    CortexTrainingLoadOperator,
    CortexTrainingWeightSyncOperator,
    CortexTrainingGenerateOperator,
    CortexTrainingTrainOperator,
}
"""The others look once on the worker, and may find that there is nothing to wait for."""

VARYING = [
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UUID"),
    (r"\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)", "TIME"),
    (r'"available_gpus": \d+', '"available_gpus": SOME'),
    (r'"bytes": \d+, "missing"', '"bytes": SOME, "missing"'),
    (r"tour-(worker|triggerer)\d*", "TOUR"),
    (r"[A-Z2-7]{40,}", "SAVE"),
]


@pytest.fixture(scope="module")
def tours(
    request: pytest.FixtureRequest, local_service: Any, s3_server: Any, manifest: str
) -> Iterator[dict[str, Tour]]:
    """The same tour on the worker and over the triggerer."""
    made: dict[str, Tour] = {}
    bucket = "tour"
    s3_server.client().create_bucket(Bucket=bucket)
    with pytest.MonkeyPatch.context() as patch:
        fire_at_once(patch)
        extra = {"database": local_service.database}
        ours = {"conn_type": "cortex_training", "host": local_service.base_url, "schema": local_service.schema}
        patch.setenv("AIRFLOW_CONN_TOUR", json.dumps({**ours, "password": PAT, "extra": extra}))
        keys = {"login": s3_server.access_key_id, "password": s3_server.secret_access_key}
        storage = {"conn_type": "aws", **keys, "extra": {"endpoint_url": s3_server.endpoint}}
        patch.setenv("AIRFLOW_CONN_STORAGE", json.dumps(storage))
        for way in ("worker", "triggerer"):
            folder = request.getfixturevalue("tmp_path_factory").mktemp(f"tour-{way}")
            tour = made[way] = Tour(TaskRun, folder, "tour", deferrable=way == "triggerer")
            place = {"root": f"s3://{bucket}/tour-{way}", "credentials": "airflow:storage"}
            with everything_said(request.config) as said:
                travel(tour, manifest, place)
                tour.said = said()
        yield made


def test_the_tour_leaves_none_out(tours: dict[str, Tour]) -> None:
    assert set(tours["triggerer"].results) == set(OPERATORS)
    waits = {type(trigger) for trigger in tours["triggerer"].triggers()}
    # A watcher belongs to no task, and nothing is sampled on this tour that a drain would wait for.
    elsewhere = {CortexTrainingPublicationEventTrigger, CortexTrainingDrainTrigger}
    assert waits | elsewhere == set(provided("triggers", BaseTrigger))
    shown = {type(link) for o in tours["triggerer"].operators for link in o.operator_extra_links}
    known = {kind for kind in vars(links).values() if isinstance(kind, type) and issubclass(kind, BaseOperatorLink)}
    assert shown == known - {BaseOperatorLink}


@pytest.mark.parametrize("way", ["worker", "triggerer"])
def test_no_secret_and_no_prompt_stays(tours: dict[str, Tour], s3_server: Any, way: str) -> None:
    left = list(tours[way].left())
    # It was listened to.
    assert "weight-sync is request" in tours[way].said
    for text in left:
        assert PAT not in text
        assert s3_server.secret_access_key not in text
        assert PROMPT not in text
        # A link to a checkpoint's file works for anybody who has it.
        assert "signature=" not in text.lower()


def test_what_is_stored_is_small(tours: dict[str, Tour]) -> None:
    for run in tours["triggerer"].runs:
        for document in (*run.store.writes, *run.events):
            assert len(json.dumps(document)) < 1000
    for trigger in tours["triggerer"].triggers():
        assert len(json.dumps(trigger.serialize())) < 1000


@pytest.mark.parametrize("kind", BOTH_WAYS, ids=lambda kind: kind.__name__)
def test_both_ways_give_the_same(tours: dict[str, Tour], kind: type) -> None:
    by_worker, by_triggerer = (_scrubbed(tours[way].results[kind]) for way in ("worker", "triggerer"))
    assert by_triggerer == by_worker
    deferrals = [len(run.deferrals) for run in tours["triggerer"].runs if run.task_id == kind.__name__]
    assert any(deferrals) or kind not in ALWAYS_DEFERRED
    assert not any(run.deferrals for run in tours["worker"].runs)


def _scrubbed(result: Any) -> Any:
    """A result without what is different in every run."""
    text = json.dumps(result)
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text
