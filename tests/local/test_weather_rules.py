"""Rules of bad weather: what they may say, and which occurrences they hit."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cortex_training.local.app import build_app
from cortex_training.local.service import Service
from cortex_training.local.settings import ServiceSettings
from cortex_training.local.weather import Meeting, Weather
from cortex_training.local.weather_rules import (
    ACTIONS,
    OPERATION_TYPES,
    ROUTES,
    Faults,
    RuleError,
    read_act,
    read_document,
    read_faults,
    read_rule,
)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "the document: must be an object"),
        ({"rule": []}, "rule: is not known; there are seed, rules"),
        ({"seed": -1}, "seed: must be a whole number from 0"),
        ({"seed": True}, "seed: must be a whole number"),
        ({"rules": {}}, "rules: must be a list"),
        ({"rules": [3]}, r"rules\[0\]: must be an object"),
        ({"rules": [{"action": "drop"}, {}]}, r"rules\[1\].action: must be one of delay, "),
        ({"rules": [{"action": "rain"}]}, r"rules\[0\].action: must be one of .* got 'rain'"),
        ({"rules": [{"action": "drop", "seconds": 1}]}, r"rules\[0\].seconds: is not known; there are name, action"),
        ({"rules": [{"action": "drop", "on": "steps"}]}, r"rules\[0\].on: must be one of .* got 'steps'"),
        ({"rules": [{"action": "drop", "on": {"step": 1}}]}, r"rules\[0\].on: must be a name or a list"),
        ({"rules": [{"action": "drop", "path": "("}]}, r"rules\[0\].path: is not a regular expression"),
        ({"rules": [{"action": "drop", "when": "later"}]}, r"rules\[0\].when: must be one of before, after, executed"),
        ({"rules": [{"action": "late", "seconds": 1, "when": "after"}]}, r"when: must be one of before, got 'after'"),
        ({"rules": [{"action": "drop", "skip": -1}]}, r"rules\[0\].skip: must be a whole number from 0"),
        ({"rules": [{"action": "drop", "times": 1.5}]}, r"rules\[0\].times: must be a whole number"),
        ({"rules": [{"action": "drop", "probability": 1.1}]}, r"probability: must be a number from 0 to 1, got 1.1"),
        ({"rules": [{"action": "drop", "name": "a/b"}]}, r"rules\[0\].name: must be 1 to 100 letters"),
        ({"rules": [{"action": "drop", "name": "a"}, {"action": "hang", "name": "a"}]}, "'a' names another rule"),
        ({"rules": [{"action": "drop", "job_id": 3}]}, r"rules\[0\].job_id: must be a text"),
        ({"rules": [{"action": "delay"}]}, r"rules\[0\].seconds: is missing; delay needs it"),
        ({"rules": [{"action": "delay", "seconds": [2, 1]}]}, "seconds: the least comes first"),
        ({"rules": [{"action": "delay", "seconds": float("nan")}]}, "seconds: must be a number from 0 to 86400"),
        ({"rules": [{"action": "answer", "status": 99}]}, "status: must be a whole number from 200 to 599"),
        ({"rules": [{"action": "answer", "status": 500, "headers": {"a": "b\r\nc: d"}}]}, "headers.a: must be a"),
        ({"rules": [{"action": "answer", "status": 500, "body": 3}]}, "body: must be an object, sent as JSON, or"),
        ({"rules": [{"action": "redirect", "location": "/x\r\ny"}]}, "location: must be a URL or a path"),
        ({"rules": [{"action": "redirect", "location": "/x", "status": 304}]}, "status: must be 301, 302, 303"),
        (
            {"rules": [{"action": "restart-worker", "loses": "weights"}]},
            "loses: must be one of gradients, groups, both",
        ),
        ({"rules": [{"action": "set-capacity", "gpus": 1, "hardware": "H100"}]}, "hardware: must be one of H200"),
        ({"rules": [{"action": "fail-job", "at_step": 3}]}, "at_step: counts executions: use it with when = executed"),
        ({"rules": [{"action": "drop", "when": "executed", "at_step": 3}]}, "at_step: counts executions"),
        ({"rules": [{"action": "fail-request", "on": "poll"}]}, "on: 'poll' executes nothing"),
        ({"rules": [{"action": "fail-request", "path": "step"}]}, "path: fail-request counts submissions"),
        ({"rules": [{"action": "fail-job", "when": "executed", "on": "cancel-job"}]}, "'cancel-job' executes nothing"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_field(document: Any, problem: str) -> None:
    with pytest.raises(RuleError, match=problem):
        read_document(document)


def test_a_file_is_json_or_toml_and_named_in_errors(tmp_path: Path) -> None:
    toml, other = tmp_path / "night.toml", tmp_path / "night.json"
    toml.write_text('seed = 3\n[[rules]]\naction = "delay"\nseconds = [0.1, 0.2]\non = ["poll", "step"]\n')
    other.write_text(
        json.dumps({"seed": 3, "rules": [{"action": "delay", "seconds": [0.1, 0.2], "on": ["poll", "step"]}]})
    )
    assert read_faults(toml) == read_faults(other)
    other.write_text("{")
    with pytest.raises(RuleError, match=r"night\.json: not JSON"):
        read_faults(other)
    toml.write_text('[[rules]]\naction = "drop"\nskip = "2"\n')
    with pytest.raises(RuleError, match=r"night\.toml: rules\[0\]\.skip: must be a whole number"):
        read_faults(toml)


@pytest.mark.parametrize("action", ACTIONS)
def test_what_a_rule_says_of_itself_is_the_same_rule(action: str) -> None:
    needed = {
        "seconds": 1, "status": 302, "location": "/x", "body": {"a": 1}, "gpus": 3,
    }  # fmt: skip
    kind = ACTIONS[action]
    options = {name: needed[name] for name, option in kind.options.items() if option.required}
    for when in kind.whens:
        rule = read_rule({"name": "one", "action": action, "when": when, **options})
        assert read_rule(rule.describe()) == rule


def test_only_what_happens_to_jobs_can_happen_at_once() -> None:
    act, job_id = read_act({"action": "restart-worker", "job_id": "j", "loses": "groups"})
    assert (act["loses"], act["requests"], job_id) == ("groups", "kept", "j")
    with pytest.raises(RuleError, match="action: drop happens to a request; at once there are restart-worker, "):
        read_act({"action": "drop"})
    with pytest.raises(RuleError, match="skip: is not known"):
        read_act({"action": "fail-job", "skip": 1})


def test_every_route_of_the_api_has_a_name_for_rules(tmp_path: Path) -> None:
    service = Service(ServiceSettings(data_dir=tmp_path, faults=Faults()))
    door = build_app(service)._app  # type: ignore[attr-defined]
    names = {route.name.replace("_", "-") for route in door._routes if route.path.startswith(("/api/", "/exports/"))}
    assert names == set(ROUTES)
    service.stop()


async def hits(rule: dict[str, Any], count: int, *, seed: int = 0) -> list[int]:
    """Which of `count` steps a rule hits, counted from 1."""
    weather = Weather(read_document({"seed": seed, "rules": [rule]}))
    return [number for number in range(1, count + 1) if weather.requested(Meeting(("step",)))]


async def test_occurrences_are_counted_from_the_first() -> None:
    assert await hits({"action": "drop", "on": "step"}, 5) == [1]
    assert await hits({"action": "drop", "on": "step", "skip": 2, "times": 2}, 9) == [3, 4]
    assert await hits({"action": "drop", "skip": 3, "times": 0}, 6) == [4, 5, 6]
    assert await hits({"action": "drop", "on": "poll"}, 5) == []


async def test_chance_comes_from_the_seed_and_the_rule_name() -> None:
    rule = {"name": "rain", "action": "drop", "times": 0, "probability": 0.3}
    first = await hits(rule, 200)
    assert await hits(rule, 200) == first
    assert 30 < len(first) < 90
    assert await hits(rule, 200, seed=1) != first
    assert await hits({**rule, "name": "snow"}, 200) != first


async def test_every_rule_counts_every_meeting_whatever_the_others_do() -> None:
    weather = Weather(read_document({"rules": [{"action": "drop"}, {"action": "hang", "skip": 1}]}))
    fired = [[one.rule.name for one in weather.requested(Meeting(("step",)))] for _ in range(3)]
    assert fired == [["rule-1"], ["rule-2"], []]


async def test_rules_choose_by_job_path_and_step() -> None:
    weather = Weather(
        read_document(
            {
                "rules": [
                    {"name": "job", "action": "drop", "job_id": "b"},
                    {"name": "path", "action": "drop", "path": r"^GET .*cursor=2"},
                    {"name": "step", "action": "fail-job", "when": "executed", "on": "step", "at_step": 2},
                ]
            }
        )
    )
    assert not weather.requested(Meeting(("step",), "POST /a/step", "a"))
    assert [one.rule.name for one in weather.requested(Meeting(("step",), "POST /b/step", "b"))] == ["job"]
    assert [one.rule.name for one in weather.requested(Meeting(("poll",), "GET /a/1?cursor=2", "a"))] == ["path"]
    assert [bool(weather.executed(Meeting(("step",), job_id="a", global_steps=n))) for n in (1, 2, 3)] == [
        False,
        True,
        False,
    ]


async def test_rules_that_are_added_are_added_all_or_none() -> None:
    weather = Weather(Faults())
    weather.add([{"action": "drop"}, {"action": "hang"}])
    with pytest.raises(RuleError, match=r"rules\[1\]\.action"):
        weather.add([{"action": "drop"}, {"action": "?"}])
    assert [one.rule.name for one in weather.rules] == ["rule-1", "rule-2"]
    weather.remove("rule-1")
    [third] = weather.add([{"action": "drop"}])
    assert third.rule.name == "rule-3"


def test_the_manual_names_every_action_with_its_fields_and_shows_a_file_that_is_read() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "local-service.md").read_text()
    [shown] = re.findall(r"^```toml\n(\[\[rules|seed.*?)^```", manual, re.DOTALL | re.MULTILINE)
    assert len(read_document(tomllib.loads(shown)).rules) == 4
    table = manual[manual.index("### A rule") : manual.index("### The control port")]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", table, re.MULTILINE))
    for action, kind in ACTIONS.items():
        assert all(f"`{option}`" in rows[action] for option in kind.options), action
        told = rows[action].partition(" | ")[0]
        assert f"`{kind.whens[0]}`" in told, action
        assert ("any" in told) is (len(kind.whens) == 3), action
    assert all(f"`{name}`" in table for name in (*ROUTES, *OPERATION_TYPES))


async def test_a_rule_that_was_removed_meanwhile_holds_nothing_back() -> None:
    weather = Weather(read_document({"rules": [{"name": "held", "action": "hold"}]}))
    [active] = weather.requested(Meeting(("step",)))
    weather.remove("held")
    await asyncio.wait_for(weather.hold(active), 5)
