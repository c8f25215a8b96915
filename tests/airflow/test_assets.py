"""Assets: their URIs, the events of tasks, and the watcher that remembers what it reported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Asset, AssetAlias
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_cortex_training import assets
from airflow_cortex_training.get_provider_info import get_provider_info
from airflow_cortex_training.operators.checkpoints import CortexTrainingPublishOperator
from airflow_cortex_training.triggers import publication_events
from airflow_cortex_training.triggers.publication_events import CURSOR_KEY, CortexTrainingPublicationEventTrigger
from cortex_training.errors import ConfigurationError
from cortex_training.publication import Entry, PublicationLog, SaveManifest
from tests.airflow.conftest import stored

MANIFEST = SaveManifest("job-1", "cp_1", "weights-only", 4)


@pytest.mark.parametrize(
    ("root", "uri", "storage"),
    [
        ("/mnt/finetune/models/", "cortex-training://file/mnt/finetune/models", ("file", "/mnt/finetune/models")),
        ("/mnt//a/../models", "cortex-training://file/mnt/models", ("file", "/mnt/models")),
        ("s3://bucket/a/models/", "cortex-training://s3/bucket/a/models", ("s3://bucket", "a/models")),
        ("s3://bucket", "cortex-training://s3/bucket", ("s3://bucket", "/")),
    ],
)
def test_a_log_has_one_uri_however_it_is_written(root: str, uri: str, storage: tuple[str, str]) -> None:
    asset = assets.publications(root)
    assert asset.uri == uri
    assert Asset(uri).uri == uri
    dataset = assets.convert_asset_to_openlineage(asset, None)
    assert (dataset.namespace, dataset.name) == storage


@pytest.mark.parametrize("root", ["models", "./models", "file:models"])
def test_a_relative_root_is_refused(root: str) -> None:
    with pytest.raises(ConfigurationError, match="absolute path"):
        assets.publications(root)


@pytest.mark.parametrize(
    "uri", ["cortex-training://elsewhere/x", "cortex-training://file", "cortex-training://file/a?b=c"]
)
def test_airflow_refuses_a_uri_that_is_no_log(uri: str) -> None:
    from urllib.parse import urlsplit

    with pytest.raises(ValueError, match="URI cortex-training"):
        assets.sanitize_uri(urlsplit(uri))


def test_airflow_finds_the_scheme() -> None:
    from airflow.providers_manager import ProvidersManager

    (known,) = get_provider_info()["asset-uris"]
    assert known["schemes"] == [assets.SCHEME]
    manager = ProvidersManager()
    assert manager.asset_uri_handlers[assets.SCHEME] is assets.sanitize_uri
    assert manager.asset_factories[assets.SCHEME] is assets.create_asset
    assert manager.asset_to_openlineage_converters[assets.SCHEME] is assets.convert_asset_to_openlineage


def test_a_publication_is_announced_to_an_alias_and_to_its_own_asset_only(tmp_path: Path, task_run: Any) -> None:
    log = PublicationLog(_root(tmp_path))
    _save(log, "exec/a/cp_1")
    alias, own, other = AssetAlias("fine-tuned"), assets.publications(log.store.root), Asset("s3://else/where")
    task = CortexTrainingPublishOperator(
        task_id="publish", root=log.store.root, save="exec/a/cp_1", step=4, epoch=1, outlets=[alias, own, other]
    )
    events = OutletEventAccessors()
    published = task.execute({**task_run().context(), "outlet_events": events})

    (event,) = events[alias].asset_alias_events
    assert event.dest_asset_key.uri == own.uri
    assert event.extra == {
        "entry": published["entry"],
        "location": f"{log.store.root}/exec/a/cp_1",
        "epoch": 1,
        "step": 4,
        "job_id": "job-1",
        "checkpoint_id": "cp_1",
        "checkpoint_type": "weights-only",
    }
    assert events[own].extra == event.extra
    assert events[other].extra == {}


def test_a_publication_that_failed_announces_nothing(tmp_path: Path, task_run: Any) -> None:
    alias, events = AssetAlias("fine-tuned"), OutletEventAccessors()
    task = CortexTrainingPublishOperator(
        task_id="publish", root=_root(tmp_path), save="exec/none", step=4, epoch=1, outlets=[alias]
    )
    with pytest.raises(Exception, match="no such save"):
        task.execute({**task_run().context(), "outlet_events": events})
    assert events[alias].asset_alias_events == []


class AssetState:
    """Airflow's store of an asset, as a trigger sees it; values go through JSON as they do there."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    async def aget(self, key: str, default: Any = None) -> Any:
        return json.loads(self.values[key]) if key in self.values else default

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = json.dumps(value)


def _trigger(root: str, state: AssetState) -> CortexTrainingPublicationEventTrigger:
    path, kwargs = CortexTrainingPublicationEventTrigger(root=root, asset="models", poll_s=0.01).serialize()
    assert path.endswith("triggers.publication_events.CortexTrainingPublicationEventTrigger")
    trigger = CortexTrainingPublicationEventTrigger(**json.loads(json.dumps(kwargs)))
    trigger.asset_state_store = state  # type: ignore[assignment]
    return trigger


async def _watch(root: str, state: AssetState, *, events: int, seen: int) -> list[dict[str, Any]]:
    """What a watcher that starts now reports until it remembers `seen` entries: exactly `events` of them."""
    found: list[dict[str, Any]] = []

    async def collect() -> None:
        async for event in _trigger(root, state).run():
            found.append(event.payload)

    running = asyncio.create_task(collect())
    for _ in range(500):
        await asyncio.sleep(0.01)
        if running.done() or (len(found) >= events and _reported(state) == seen):
            break
    await asyncio.sleep(0.05)  # Another look.
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (len(found), _reported(state)) == (events, seen), found
    return found


def _reported(state: AssetState) -> int:
    return len(json.loads(state.values[CURSOR_KEY])["seen"]) if CURSOR_KEY in state.values else -1


async def test_each_new_publication_is_one_event_over_restarts(tmp_path: Path) -> None:
    log, state = PublicationLog(_root(tmp_path)), AssetState()
    _publish(log, epoch=1, step=4)
    await _watch(log.store.root, state, events=0, seen=1)  # What was there before is not reported.

    _publish(log, epoch=2, step=4)
    (found,) = await _watch(log.store.root, state, events=1, seen=2)
    assert (found["epoch"], found["step"], found["job_id"], found["root"]) == (2, 4, "job-1", log.store.root)
    assert len(json.dumps(found)) < 1024
    await _watch(log.store.root, state, events=0, seen=2)  # Restarted, with nothing new.

    # While no triggerer ran; and of two exports the one with the older epoch may publish last.
    _publish(log, epoch=4, step=1)
    _publish(log, epoch=5, step=1)
    assert [e["epoch"] for e in await _watch(log.store.root, state, events=2, seen=4)] == [4, 5]
    _publish(log, epoch=3, step=9)
    assert [e["epoch"] for e in await _watch(log.store.root, state, events=1, seen=5)] == [3]


async def test_a_process_that_dies_with_an_event_reports_it_again(tmp_path: Path) -> None:
    log, state = PublicationLog(_root(tmp_path)), AssetState()
    await _watch(log.store.root, state, events=0, seen=0)
    _publish(log, epoch=1, step=4)
    trigger = _trigger(log.store.root, state)
    run = trigger.run()
    first = await anext(run)
    await run.aclose()  # Between the event and the next look.
    assert [first.payload] == await _watch(log.store.root, state, events=1, seen=1)


async def test_a_root_that_is_not_there_yet_is_an_empty_log_and_one_that_went_away_is_not(tmp_path: Path) -> None:
    root, state = tmp_path / "models", AssetState()
    await _watch(str(root), state, events=0, seen=0)
    root.mkdir()
    log = PublicationLog(str(root))
    _publish(log, epoch=1, step=1)
    await _watch(str(root), state, events=1, seen=1)
    root.rename(tmp_path / "unmounted")
    await _still(str(root), state)
    root.mkdir()  # The bare mount point.
    await _still(str(root), state)
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    await _watch(str(root), state, events=0, seen=1)


async def test_a_long_log_is_remembered_in_bounded_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_events, "MAX_SEEN", 3)
    entries = [Entry(epoch, 1, "exec/a/cp") for epoch in range(1, 7)]
    cursor = publication_events.Cursor().after(entries[:5])
    assert len(cursor.to_json()["seen"]) == 3
    again = publication_events.Cursor.from_json(json.loads(json.dumps(cursor.to_json())), "models")
    assert again.new_among(entries) == entries[5:]
    assert again.after(entries).new_among(entries) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"root": "s3://bucket/models"}, "credentials"),
        ({"root": "/models", "credentials": "file:/a"}, "credentials"),
        ({"root": "s3://bucket/models", "credentials": "file:/a,keyring:b"}, "keyring"),
        ({"root": "/models", "poll_s": 0}, "poll_s"),
    ],
)
def test_a_watcher_that_could_not_watch_is_refused_in_the_dag_file(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        assets.watched_publications(**arguments)


@pytest.mark.parametrize("credentials", ["secret:/var/run/secrets/s3", "file:/a,airflow:bucket"])
def test_every_place_that_credentials_are_found_in_may_be_named(credentials: str) -> None:
    (watcher,) = assets.watched_publications("s3://bucket/models", credentials=credentials).watchers
    assert stored(watcher.trigger).credentials == credentials


def test_watchers_of_one_root_under_two_names_are_two_triggers() -> None:
    (first,), (second,) = (assets.watched_publications("/models", name=name).watchers for name in ("a", "b"))
    assert first.trigger.serialize() != second.trigger.serialize()


async def test_kwargs_of_a_newer_release_are_refused() -> None:
    trigger = CortexTrainingPublicationEventTrigger(root="/models", asset="models", v=99)
    with pytest.raises(RuntimeError, match="newer release"):
        await anext(trigger.run())


async def _still(root: str, state: AssetState) -> None:
    """A watcher that looks several times, reports nothing and forgets nothing."""
    before = dict(state.values)
    trigger = _trigger(root, state)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(trigger.run()), timeout=0.2)
    assert state.values == before


def _root(folder: Path) -> str:
    root = folder / "models"
    root.mkdir()
    return str(root)


def _save(log: PublicationLog, save: str) -> None:
    Path(log.store.locate(save)).mkdir(parents=True)
    MANIFEST.write(log.store, save)


def _publish(log: PublicationLog, *, epoch: int, step: int) -> None:
    save = f"exec/e{epoch}/cp_{step}"
    _save(log, save)
    log.publish(save, epoch, step)
