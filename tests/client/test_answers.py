"""Typed answers are what the service sent: both clients name the same types, and unknown keys stay."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient, answers
from cortex_training.answers import Capacity, Checkpoint, CheckpointExport, Job, LogPage, RequestStatus


def returned(kind: type, name: str) -> Any:
    return typing.get_type_hints(inspect.unwrap(getattr(kind, name)))["return"]


def test_both_clients_return_the_same_types() -> None:
    for name, function in vars(CortexTrainingClient).items():
        if inspect.isfunction(function) and not name.startswith(("_", "stream_", "close")):
            assert returned(CortexTrainingClient, name) == returned(AsyncCortexTrainingClient, name), name


@pytest.mark.parametrize(
    ("name", "arguments", "sent", "kind"),
    [
        ("get_job", ["j"], {"job_id": "j", "status": "running", "zone": 3}, Job),
        ("wait_for_job", ["j"], {"job_id": "j", "status": "running", "zone": 3}, Job),
        ("get_request_status", ["j", "r"], {"status": "pending", "queue": 7}, RequestStatus),
        ("export_checkpoint", ["j", "c"], {"files": [{"url": "u", "etag": "e"}], "region": "x"}, CheckpointExport),
        ("tail_logs", ["j"], {"entries": ["line"], "eof": True, "pod": "p"}, LogPage),
    ],
)
def test_unknown_keys_stay(
    clients: Any, weather: Any, scripted: Any, name: str, arguments: list[str], sent: Any, kind: Any
) -> None:
    weather.sequence(scripted.Reply(body=sent))
    assert getattr(clients(weather.url), name)(*arguments) == sent
    assert returned(CortexTrainingClient, name) is kind


def test_unknown_keys_stay_in_lists(clients: Any, weather: Any, scripted: Any) -> None:
    jobs = [{"job_id": "j", "zone": 3}]
    checkpoints = [{"checkpoint_id": "c", "shards": 8}]
    weather.sequence(scripted.Reply(body={"jobs": jobs}), scripted.Reply(body={"checkpoints": checkpoints}))
    client = clients(weather.url)
    assert client.list_jobs() == jobs
    assert client.list_checkpoints("j") == checkpoints
    assert returned(CortexTrainingClient, "list_checkpoints") == list[Checkpoint]


def test_capacity_always_has_its_keys(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body={"zone": 3}))
    capacity = clients(weather.url).get_capacity()
    assert capacity.keys() == {*Capacity.__required_keys__, "zone"}


def test_every_type_says_what_it_is() -> None:
    kinds = [value for value in vars(answers).values() if typing.is_typeddict(value)]
    assert len(kinds) > 15
    assert [kind.__name__ for kind in kinds if not kind.__doc__] == []
