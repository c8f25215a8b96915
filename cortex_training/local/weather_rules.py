"""The rules of bad weather: which request or execution is hit, and by what. Read as a whole, errors name the field."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUTES = (
    "create-job", "list-jobs", "get-job", "cancel-job", "capacity", "experiment-run", "list-checkpoints",
    "export-checkpoint", "delete-checkpoint", "forward-backward", "forward", "generate", "generate-stream", "step",
    "save", "load", "operation", "poll", "exported-file",
)  # fmt: skip
"""Names of the routes, for `on`."""
OPERATION_TYPES = (
    "weight-sync", "cancel-request", "tail-logs", "reset-prefix-cache", "bootstrap-router-replay",
    "router-replay-discard",
)  # fmt: skip
"""What `POST /operation` is asked for, for `on`; `forward` is one of both."""
EXECUTED = ("forward-backward", "forward", "generate", "generate-stream", "step", "save", "load", "weight-sync")
"""What a sub-job executes."""

BEFORE, AFTER, ONCE_EXECUTED = "before", "after", "executed"
REQUESTS, SUBMISSIONS, EXECUTIONS = "requests", "submissions", "executions"
_MOST_SECONDS, _MOST_TIMES = 24 * 3600.0, 1_000_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,99}")
_LOSSES = {"gradients": ("gradients",), "groups": ("groups",), "both": ("gradients", "groups")}


class RuleError(ValueError):
    """A rule that cannot be; the message begins with the field's name."""


@dataclass(frozen=True)
class Act:
    """What is to happen: an action's name and its options, all filled in."""

    action: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


@dataclass(frozen=True)
class Rule:
    """One fault, and the occurrences that it hits."""

    name: str
    act: Act
    when: str
    """`before` it is handled, `after` it was, or once what it submitted is `executed`."""
    on: tuple[str, ...] = ()
    """Names of ROUTES, OPERATION_TYPES or EXECUTED; none means any."""
    path: str | None = None
    """Regular expression that ``METHOD /path?query`` must contain a match of."""
    job_id: str | None = None
    at_step: int | None = None
    """`global_steps` after the execution."""
    skip: int = 0
    times: int = 1
    """0: every one."""
    probability: float = 1.0

    @property
    def counts(self) -> str:
        """What it counts: `requests` over HTTP, `submissions` to a sub-job's queue, or `executions`."""
        kind = ACTIONS[self.act.action]
        if kind.of_executions:
            return SUBMISSIONS
        return EXECUTIONS if kind.of_jobs and self.when == ONCE_EXECUTED else REQUESTS

    def describe(self) -> dict[str, Any]:
        """The rule as a document that `read_rule` reads."""
        described = {
            "name": self.name,
            "action": self.act.action,
            "when": self.when,
            "on": list(self.on) or None,
            "path": self.path,
            "job_id": self.job_id,
            "at_step": self.at_step,
            "skip": self.skip,
            "times": self.times,
            "probability": self.probability,
            **self.act.options,
        }
        return {name: value for name, value in described.items() if value is not None}


@dataclass(frozen=True)
class Faults:
    """What `--faults FILE` says."""

    seed: int = 0
    rules: tuple[Rule, ...] = ()


Reader = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Option:
    """One option of an action; without `required` it may be left out and is then `default`."""

    read: Reader
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Kind:
    """What an action can do."""

    whens: tuple[str, ...]
    """The first is the default."""
    options: Mapping[str, Option] = field(default_factory=dict)
    of_jobs: bool = False
    """It happens to a job or to the whole service, and can be asked for at once."""
    of_executions: bool = False
    """It happens to an operation in a sub-job's queue."""


def read_faults(path: Path) -> Faults:
    """Read a rule file: TOML when its name ends so, else JSON. Raises RuleError; OSError when it cannot be read."""
    text = path.read_text()
    try:
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise RuleError(f"{path}: not {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from None
    try:
        return read_document(document)
    except RuleError as error:
        raise RuleError(f"{path}: {error}") from None


def read_document(document: object) -> Faults:
    """Read ``{"seed": 0, "rules": [...]}``. Raises RuleError."""
    fields = _object("the document", document)
    _only("", fields, ("seed", "rules"))
    seed = _whole("seed", fields.get("seed", 0), least=0)
    listed = fields.get("rules", [])
    if not isinstance(listed, list):
        raise RuleError(f"rules: must be a list, got {_shown(listed)}")
    return Faults(seed, read_rules(listed, taken=()))


def read_rules(listed: list[Any], *, taken: tuple[str, ...]) -> tuple[Rule, ...]:
    """Read several rules, all or none; `taken` are names in use. Raises RuleError."""
    rules: list[Rule] = []
    names = set(taken)
    for position, one in enumerate(listed):
        place = f"rules[{position}]."
        fields = _object(place.rstrip("."), one)
        if "name" not in fields:
            number = len(names) + 1
            while f"rule-{number}" in names:
                number += 1
            fields = {**fields, "name": f"rule-{number}"}
        rule = read_rule(fields, place=place)
        if rule.name in names:
            raise RuleError(f"{place}name: {rule.name!r} names another rule already")
        names.add(rule.name)
        rules.append(rule)
    return tuple(rules)


def read_rule(document: object, *, place: str = "") -> Rule:
    """Read one rule. Raises RuleError whose field names begin with `place`."""
    fields = _object(place.rstrip(".") or "the rule", document)
    act = _read_act(fields, _MATCHING, place)
    kind = ACTIONS[act.action]
    when = _one_of(f"{place}when", fields.get("when", kind.whens[0]), kind.whens)
    rule = Rule(
        name=_name(f"{place}name", fields.get("name")),
        act=act,
        when=when,
        on=_operations(f"{place}on", fields.get("on")),
        path=_pattern(f"{place}path", fields.get("path")),
        job_id=_optional(_text)(f"{place}job_id", fields.get("job_id")),
        at_step=_optional(_count)(f"{place}at_step", fields.get("at_step")),
        skip=_count(f"{place}skip", fields.get("skip", 0)),
        times=_count(f"{place}times", fields.get("times", 1)),
        probability=_probability(f"{place}probability", fields.get("probability", 1.0)),
    )
    _refuse_what_never_happens(rule, place)
    return rule


def read_act(document: object) -> tuple[Act, str | None]:
    """Read an action that is to happen at once, and the job it happens to. Raises RuleError."""
    fields = _object("the action", document)
    act = _read_act(fields, ("action", "job_id"), "")
    if not ACTIONS[act.action].of_jobs:
        possible = ", ".join(name for name, kind in ACTIONS.items() if kind.of_jobs)
        raise RuleError(f"action: {act.action} happens to a request; at once there are {possible}")
    return act, _optional(_text)("job_id", fields.get("job_id"))


def _read_act(fields: Mapping[str, Any], others: tuple[str, ...], place: str) -> Act:
    action = _one_of(f"{place}action", fields.get("action"), tuple(ACTIONS))
    options = ACTIONS[action].options
    _only(place, fields, (*others, *options))
    given: dict[str, Any] = {}
    for name, option in options.items():
        if name in fields:
            given[name] = option.read(f"{place}{name}", fields[name])
        elif option.required:
            raise RuleError(f"{place}{name}: is missing; {action} needs it")
        else:
            given[name] = option.default
    return Act(action, given)


def _refuse_what_never_happens(rule: Rule, place: str) -> None:
    """A rule that cannot fire would be a test that cannot fail."""
    if rule.at_step is not None and rule.counts != EXECUTIONS:
        raise RuleError(f"{place}at_step: counts executions: use it with when = executed and an action on jobs")
    if rule.counts != REQUESTS:
        if rule.path is not None:
            raise RuleError(f"{place}path: {rule.act.action} counts {rule.counts}, which have no path; use on")
        foreign = [name for name in rule.on if name not in EXECUTED]
        if foreign:
            raise RuleError(f"{place}on: {foreign[0]!r} executes nothing; there are {', '.join(EXECUTED)}")


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RuleError(f"{name}: must be an object, got {_shown(value)}")
    return value


def _only(place: str, fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise RuleError(f"{place}{unknown[0]}: is not known; there are {', '.join(known)}")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise RuleError(f"{name}: must be one of {', '.join(known)}, got {_shown(value)}")
    return value


def _whole(name: str, value: object, *, least: int, most: int = _MOST_TIMES) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RuleError(f"{name}: must be a whole number from {least} to {most}, got {_shown(value)}")
    return value


def _count(name: str, value: object) -> int:
    return _whole(name, value, least=0)


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RuleError(f"{name}: must be a number from {least:g} to {most:g}, got {_shown(value)}")
    return float(value)


def _probability(name: str, value: object) -> float:
    return _number(name, value, 0.0, 1.0)


def _seconds(name: str, value: object) -> float:
    return _number(name, value, 0.0, _MOST_SECONDS)


def _span(name: str, value: object) -> float | list[float]:
    """Seconds, or the least and the most of them, to draw from."""
    if not isinstance(value, list):
        return _seconds(name, value)
    if len(value) != 2:
        raise RuleError(f"{name}: must be a number or two, the least and the most, got {_shown(value)}")
    least, most = (_seconds(name, one) for one in value)
    if least > most:
        raise RuleError(f"{name}: the least comes first, got {_shown(value)}")
    return [least, most]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RuleError(f"{name}: must be a text, got {_shown(value)}")
    return value


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise RuleError(f"{name}: must be 1 to 100 letters, digits, spaces and . _ -, got {_shown(value)}")
    return value


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RuleError(f"{name}: must be true or false, got {_shown(value)}")
    return value


def _optional(read: Reader) -> Reader:
    return lambda name, value: None if value is None else read(name, value)


def _operations(name: str, value: object) -> tuple[str, ...]:
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise RuleError(f"{name}: must be a name or a list of names, got {_shown(value)}")
    known = (*ROUTES, *OPERATION_TYPES)
    return tuple(_one_of(name, one, known) for one in listed)


def _pattern(name: str, value: object) -> str | None:
    if value is None:
        return None
    try:
        re.compile(_text(name, value))
    except re.error as error:
        raise RuleError(f"{name}: is not a regular expression: {error}, got {_shown(value)}") from None
    return str(value)


def _status(name: str, value: object) -> int:
    return _whole(name, value, least=200, most=599)


def _redirect_status(name: str, value: object) -> int:
    if value not in (301, 302, 303, 307, 308):
        raise RuleError(f"{name}: must be 301, 302, 303, 307 or 308, got {_shown(value)}")
    return int(str(value))


def _headers(name: str, value: object) -> dict[str, str]:
    headers = _object(name, value)
    for header, content in headers.items():
        if not re.fullmatch(r"[A-Za-z0-9-]+", header) or not isinstance(content, str) or not content.isprintable():
            raise RuleError(f"{name}.{header}: must be a header's name with a text on one line, got {_shown(content)}")
        if not content.isascii():
            raise RuleError(f"{name}.{header}: must be ASCII, got {_shown(content)}")
    return dict(headers)


def _location(name: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]+", value):
        raise RuleError(f"{name}: must be a URL or a path in ASCII, got {_shown(value)}")
    return value


def _body(name: str, value: object) -> Any:
    if not isinstance(value, dict | str):
        raise RuleError(f"{name}: must be an object, sent as JSON, or a text, got {_shown(value)}")
    return value


def _patch(name: str, value: object) -> Mapping[str, Any]:
    return _object(name, value)


def _losses(name: str, value: object) -> str:
    return _one_of(name, value, tuple(_LOSSES))


def _choice(*known: str) -> Reader:
    return lambda name, value: _one_of(name, value, known)


def what_is_lost(loses: str) -> tuple[str, ...]:
    """`gradients`, `groups` or both of them, for a value of the option `loses`."""
    return _LOSSES[loses]


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else shown[:200] + "…"


_MATCHING = ("name", "action", "when", "on", "path", "job_id", "at_step", "skip", "times", "probability")
_ANY = (BEFORE, AFTER, ONCE_EXECUTED)
_REPLIED = (AFTER, ONCE_EXECUTED)

ACTIONS: dict[str, Kind] = {
    "delay": Kind(_ANY, {"seconds": Option(_span, required=True)}),
    "hang": Kind(_ANY),
    "hold": Kind((AFTER, BEFORE, ONCE_EXECUTED)),
    "drop": Kind(_ANY),
    "late": Kind((BEFORE,), {"seconds": Option(_span, required=True)}),
    "repeat": Kind((AFTER,)),
    "answer": Kind(
        _ANY,
        {
            "status": Option(_status, required=True),
            "body": Option(_body),
            "headers": Option(_headers),
            "retry_after": Option(_seconds),
        },
    ),
    "redirect": Kind(
        (BEFORE,), {"location": Option(_location, required=True), "status": Option(_redirect_status, 307)}
    ),
    "cut": Kind(_REPLIED, {"bytes": Option(_count, 0)}),
    "corrupt": Kind(_REPLIED, {"byte": Option(_count, 0)}),
    "patch": Kind(_REPLIED, {"body": Option(_patch, required=True)}),
    "wrong-hash": Kind((AFTER,)),
    "duplicate-events": Kind((AFTER,)),
    "stuck-cursor": Kind((AFTER,)),
    "restart-worker": Kind(
        _ANY,
        {
            "loses": Option(_losses),
            "sub_job": Option(_text),
            "seconds": Option(_seconds, 0.0),
            "requests": Option(_choice("kept", "failed"), "kept"),
        },
        of_jobs=True,
    ),
    "forget-groups": Kind(
        _ANY,
        {"groups": Option(_choice("all", "partial", "completed"), "all"), "sub_job": Option(_text)},
        of_jobs=True,
    ),
    "fail-job": Kind(
        _ANY,
        {
            "state": Option(_choice("failed", "terminated"), "failed"),
            "reason": Option(_text, "the weather ended the job"),
        },
        of_jobs=True,
    ),
    "set-capacity": Kind(
        _ANY,
        {
            "gpus": Option(_count, required=True),
            "hardware": Option(_choice("H200", "B200", "B300")),
            "evict": Option(_boolean, False),
        },
        of_jobs=True,
    ),
    "expire-token": Kind(
        _ANY,
        {"requests": Option(_count, 0), "code": Option(_choice("390112", "390114", "390100"), "390112")},
        of_jobs=True,
    ),
    "slow-cancel": Kind((BEFORE,), {"seconds": Option(_seconds, required=True)}, of_jobs=True),
    "fail-request": Kind(
        (BEFORE, ONCE_EXECUTED), {"error": Option(_text, "the weather made this request fail")}, of_executions=True
    ),
    "slow-operation": Kind((BEFORE,), {"seconds": Option(_span, required=True)}, of_executions=True),
}
"""Every action: when it can happen, and its options."""
