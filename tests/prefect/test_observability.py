"""What a person, an automation and a lineage graph see of a flow run, on a real server."""

from __future__ import annotations

import asyncio
import base64
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events import Event
from prefect.events.clients import PrefectEventsClient
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.events.worker import EventsWorker
from prefect.runtime import flow_run

import prefect_cortex_training as ct
from cortex_training.publication import PublicationLog
from cortex_training.training import TrainingPlan
from cortex_training.training.metrics import read_metrics
from demo import snowflake_server
from demo.prefect_server import PrefectServer
from prefect_cortex_training.artifacts import KeptArtifact
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.labels import RunLabels, root_digest
from prefect_cortex_training.lineage import files_asset, record_made, table_asset
from prefect_cortex_training.loss_chart import loss_chart
from prefect_cortex_training.publication_events import PUBLISHED
from prefect_cortex_training.results import steps_table

from .conftest import PAT
from .test_operations import SUB_JOBS

MATERIALIZED = "prefect.asset.materialization.succeeded"


@pytest.fixture
def events(on_server: PrefectServer) -> Callable[..., list[Event]]:
    """Events of a name that the server keeps on resources whose id holds a text; they are sent from a thread."""

    def read(name: str, about: str, at_least: int) -> list[Event]:
        async def look() -> list[Event]:
            found: list[Event] = []
            for _ in range(1000):
                async with get_client() as client:
                    page = await client.read_events(EventFilter(event=EventNameFilter(name=[name])), limit=50)
                found = [event for event in page.events if about in event.resource.id]
                if len(found) >= at_least:
                    break
                await asyncio.sleep(0.2)
            return found

        EventsWorker.instance(PrefectEventsClient).wait_until_empty()
        return run_to_end(look())

    return read


def artifacts_of(root: str) -> dict[str, Any]:
    """Type and data of each artifact that shows the run in `root`; fails when one was made twice."""
    with get_client(sync_client=True) as client:
        found = [a for a in client.read_artifacts() if (a.key or "").startswith(f"training-{root_digest(root)}")]
    assert len({artifact.key for artifact in found}) == len(found)
    return {str(artifact.type): artifact.data for artifact in found}


def test_a_training_is_shown_and_its_lineage_goes_from_the_table_to_the_model(
    flow_parameters: dict[str, Any], connect_options: dict[str, Any], events: Callable[..., list[Event]]
) -> None:
    root, models = flow_parameters["root"], flow_parameters["models"]
    Path(root).mkdir()

    @flow(result_serializer="json")
    def shown() -> list[str]:
        query = "SELECT prompt, completion FROM TRAINING_EXAMPLES ORDER BY prompt, completion LIMIT 20"
        dataset = ct.build_dataset(
            "snowflake",
            query,
            out=f"{root}/dataset",
            tokenizer=flow_parameters["tokenizer"],
            max_seq_len=128,
            overlong="skip",
            connect_options=connect_options,
            tables=["training_examples"],
        )
        with ct.jobs_cancelled_at_end():
            job_id = ct.create_job("cortex", SUB_JOBS)
            ct.wait_until_running("cortex", job_id)
            plan = TrainingPlan(
                root=root, dataset=dataset["manifest"], job_id=job_id, steps=4, micro_batch_size=2, save_every_steps=2
            ).to_dict()
            trained = ct.train("cortex", plan)
            # Under another key: what is shown already is updated, and what was said is not said again.
            ct.train("cortex", {**plan, "patience_s": 60.0})
            exported = ct.export("cortex", job_id, trained["checkpoint_id"], root=models)
            entry = ct.publish(models, exported["save"], epoch=exported["epoch"], step=exported["step"])
        return [str(flow_run.id), entry, trained["checkpoint_id"]]

    flow_run_id, entry, checkpoint = shown()

    seen = artifacts_of(root)
    assert seen["progress"] == 100.0
    assert '"step"' in str(seen["table"])
    assert str(seen["table"]).count('"loss"') == 4
    assert f"`{checkpoint}`" in seen["markdown"]
    picture = seen["markdown"].partition("(data:image/svg+xml;base64,")[2].partition(")")[0]
    assert len(drawn(base64.b64decode(picture).decode())) == 4
    assert [row["step"] for row in read_metrics(root)] == [1, 2, 3, 4]

    told = [*events(PUBLISHED, root_digest(models), 1), *events(PUBLISHED, root_digest(root), 2)]
    names = [entry, *(one.name for one in reversed(PublicationLog(root).entries()))]
    assert [event.resource.name for event in told] == names
    for event in told:
        related = {resource.role: resource.id for resource in event.related}
        assert related["flow-run"] == f"prefect.flow-run.{flow_run_id}"
        assert event.payload["job_id"]
    assert PAT not in repr(told)

    made = {event.resource.id: event for event in events(MATERIALIZED, str(Path(root).parent.parent), 3)}
    table = table_asset("local", snowflake_server.DATABASE, snowflake_server.SCHEMA, "training_examples").key
    dataset, trained, model = (files_asset(place).key for place in (f"{root}/dataset", root, models))
    assert sources(made[dataset]) == [table]
    assert sources(made[trained]) == [dataset]
    assert sources(made[model]) == [trained]
    assert made[model].payload["entry"] == entry
    assert made[dataset].payload["rows"] > 0


def sources(event: Event) -> list[str]:
    return [resource.id for resource in event.related if resource.role == "asset"]


def test_an_artifact_is_made_once_and_found_again_by_another_process(on_server: PrefectServer) -> None:
    @flow
    def shows() -> None:
        labels = RunLabels.of_current_run("a test")
        for number in range(3):
            # Each has no memory of the one before, as after a crash.
            run_to_end(KeptArtifact(labels, "made-once", "markdown").show(f"number {number}", "a test"))

    shows()
    with get_client(sync_client=True) as client:
        found = [artifact for artifact in client.read_artifacts() if artifact.key == "made-once"]
    assert [artifact.data for artifact in found] == ["number 2"]


def test_an_asset_is_recorded_once_for_equal_facts(
    on_server: PrefectServer, events: Callable[..., list[Event]], tmp_path: Path
) -> None:
    made = files_asset(str(tmp_path / "made twice"))

    @flow(result_serializer="json")
    def records() -> None:
        labels = RunLabels.of_current_run("a test")
        for rows in (1, 1, 2):
            run_to_end(record_made(labels, made, [], {"rows": rows}))

    records()
    assert sorted(event.payload["rows"] for event in events(MATERIALIZED, made.key, 2)) == [1, 2]


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("rows", "snowflake://org-acct/DB/SCH/ROWS"),
        ("other.rows", "snowflake://org-acct/DB/OTHER/ROWS"),
        ("d.s.rows", "snowflake://org-acct/D/S/ROWS"),
        ('"Mixed"', "snowflake://org-acct/DB/SCH/Mixed"),
    ],
)
def test_a_table_is_named_in_full(table: str, key: str) -> None:
    assert table_asset("ORG-ACCT", "DB", "SCH", table).key == key


def test_files_are_named_by_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files_asset("models").key == files_asset(f"{tmp_path}/models/").key == f"file://{tmp_path}/models"
    assert files_asset("s3://bucket/a/b/").key == "s3://bucket/a/b"
    assert " " not in files_asset("/with blanks/and#marks").key


def test_a_long_run_is_a_short_table_with_both_ends() -> None:
    rows = [{"step": step, "loss": 1 / step, "epoch": 1} for step in range(1, 5001)]
    table = steps_table(rows)
    assert len(table) == 50
    assert (table[0]["step"], table[-1]["step"]) == (1, 5000)
    assert table[2]["loss"] == float(f"{1 / table[2]['step']:.6g}")
    assert steps_table(rows[:3]) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.333333}]


def drawn(svg: str) -> list[tuple[float, float]]:
    (line,) = [element for element in ElementTree.fromstring(svg) if element.tag.endswith("polyline")]
    return [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]  # type: ignore[misc]


def test_a_falling_loss_is_drawn_falling_and_stays_in_the_picture() -> None:
    points = drawn(loss_chart([{"step": k, "loss": 3.0 - k / 10} for k in range(1, 11)], "a <run> & more"))
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    # Downwards is a larger number in SVG.
    assert [y for _, y in points] == sorted(y for _, y in points)
    assert all(0 < x < 960 and 0 < y < 540 for x, y in points)


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0], [0.0, 0.0], [1.0, float("nan"), 3.0], [1.0, None, 2.0]])
def test_what_is_hard_to_draw_is_drawn(losses: list[float | None]) -> None:
    points = drawn(loss_chart([{"step": k, "loss": loss} for k, loss in enumerate(losses, 1)], "t"))
    assert len(points) == sum(loss is not None and loss == loss for loss in losses)


def test_a_long_curve_is_thinned_and_an_empty_one_refused() -> None:
    svg = loss_chart([{"step": k, "loss": 1.0 / k} for k in range(1, 100_001)], "t")
    assert len(drawn(svg)) <= 600
    assert len(svg) < 20_000
    with pytest.raises(ValueError, match="finite"):
        loss_chart([{"step": 1, "loss": float("inf")}], "t")
