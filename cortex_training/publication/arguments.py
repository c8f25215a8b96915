"""The command line of ``cortex-publish``: a verb, its flags, its positional arguments, and the variables that stand in.

Flags are spelled ``-flag value`` or ``-flag=value``, with one dash or two, follow the verb, and end at the first
argument that is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cortex_training.errors import ConfigurationError
from cortex_training.publication.entries import MAX_NUMBER, parse_number
from cortex_training.publication.frameworks import FRAMEWORKS
from cortex_training.publication.urls import parse_proxy

USAGE = f"""\
usage: cortex-publish VERB [FLAGS] [ARGUMENTS]

  resolve -checkpoint ROOT [-creds LIST [-proxy URL]] [-timeout 5m] [-probe] [-verify]
          print the location of the latest published save; nothing when there is none
  watch   -checkpoint ROOT [-creds LIST [-proxy URL]] [-timeout 5m] -framework {"|".join(FRAMEWORKS)}
          [-interval 10s] [-epoch N] [-attempt A] [SAVES]
          publish each save in SAVES (default: ROOT/exec/ATTEMPT) once it is complete, until SIGTERM or SIGINT
  publish -checkpoint ROOT [-creds LIST [-proxy URL]] [-timeout 5m] [-epoch N] SAVE STEP
          publish one complete save
  prune   -checkpoint ROOT [-creds LIST [-proxy URL]] [-timeout 5m] [-keep 3]
          remove all but the latest entries, and the folders only they named
  probe   -checkpoint s3://BUCKET/PREFIX -creds LIST [-proxy URL] [-timeout 5m]
          check credentials and store before a job is accepted

ROOT is a directory or s3://BUCKET/PREFIX; LIST is kind:location,... with the kinds secret, file and vault (s3 only).
DISPATCH_ATTEMPT and DISPATCH_EPOCH (or CORTEX_PUBLISH_ATTEMPT, CORTEX_PUBLISH_EPOCH) stand in for -attempt and -epoch.
exit status: 0 done, 1 root, store, credentials or saves at fault, 2 usage
"""

_COMMON = ("checkpoint", "creds", "proxy", "timeout")
_VALUE_FLAGS = {
    "resolve": _COMMON,
    "watch": (*_COMMON, "framework", "interval", "epoch", "attempt"),
    "publish": (*_COMMON, "epoch"),
    "prune": (*_COMMON, "keep"),
    "probe": _COMMON,
}
_SWITCHES = {"resolve": ("probe", "verify")}
_POSITIONALS = {"resolve": (0, 0), "watch": (0, 1), "publish": (2, 2), "prune": (0, 0), "probe": (0, 0)}

_DURATION = re.compile(r"(?:(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))", re.ASCII)
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class UsageError(Exception):
    """The command line itself is wrong: exit status 2."""


class HelpWanted(Exception):
    """``-h``: print the usage; exit status 0."""


@dataclass(frozen=True)
class Arguments:
    """A command line that was read; times in seconds. `attempt` and `epoch` are as given, None when they are not."""

    verb: str
    checkpoint: str
    positionals: tuple[str, ...] = ()
    creds: str | None = None
    proxy: str | None = None
    timeout_s: float = 300.0
    probe: bool = False
    verify: bool = False
    framework: str = ""
    interval_s: float = 10.0
    epoch: int | None = None
    attempt: str | None = None
    keep: int = 3


def read_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> Arguments:
    """Read a command line. Raises UsageError naming the flag or argument at fault, HelpWanted."""
    if not argv:
        raise UsageError("no verb")
    verb, *rest = argv
    if verb in ("-h", "-help", "--help", "help"):
        raise HelpWanted
    if verb not in _VALUE_FLAGS:
        raise UsageError(f"unknown verb {verb!r}")
    values, switches, positionals = _split(verb, rest)
    fewest, most = _POSITIONALS[verb]
    if len(positionals) > most:
        raise UsageError(f"{verb}: unexpected argument {positionals[most]!r} (flags come before arguments)")
    if len(positionals) < fewest:
        raise UsageError(f"{verb}: SAVE and STEP are needed")
    if not values.get("checkpoint"):
        raise UsageError(f"{verb}: -checkpoint is needed")
    if verb == "watch" and "framework" not in values:
        raise UsageError(f"watch: -framework is needed: {' or '.join(FRAMEWORKS)}")
    if verb == "probe" and "creds" not in values:
        raise UsageError("probe: -creds is needed")
    arguments = Arguments(
        verb=verb,
        checkpoint=values["checkpoint"],
        positionals=tuple(positionals),
        creds=values.get("creds"),
        proxy=_proxy(values.get("proxy")),
        timeout_s=_duration("timeout", values.get("timeout", "5m")),
        probe="probe" in switches,
        verify="verify" in switches,
        framework=_framework(values.get("framework")),
        interval_s=_duration("interval", values.get("interval", "10s")),
        epoch=_epoch(verb, values, environment),
        attempt=_attempt(verb, values, positionals, environment),
        keep=_keep(values.get("keep", "3")),
    )
    if arguments.proxy is not None and arguments.creds is None:
        raise UsageError("-proxy is for an s3:// root, with -creds")
    return arguments


def read_step(text: str) -> int:
    """STEP as publish takes it. Raises UsageError."""
    return _number("STEP", text)


def _split(verb: str, rest: Sequence[str]) -> tuple[dict[str, str], set[str], list[str]]:
    values: dict[str, str] = {}
    switches: set[str] = set()
    waiting = list(rest)
    while waiting and waiting[0].startswith("-") and waiting[0] != "-":
        spelled = waiting.pop(0)
        if spelled == "--":
            break
        name, given, value = spelled.removeprefix("-").removeprefix("-").partition("=")
        if name in ("h", "help"):
            raise HelpWanted
        if name in _SWITCHES.get(verb, ()):
            if given and value not in ("true", "false"):
                raise UsageError(f"-{name}: {value!r} is not true or false")
            (switches.discard if value == "false" else switches.add)(name)
            continue
        if name not in _VALUE_FLAGS[verb]:
            raise UsageError(f"{verb}: unknown flag -{name}")
        if not given:
            if not waiting:
                raise UsageError(f"-{name}: its value is missing")
            value = waiting.pop(0)
        values[name] = value
    return values, switches, waiting


def _duration(flag: str, text: str) -> float:
    """Seconds in a duration as Go spells it: 90s, 5m, 1h30m, 1.5s."""
    if _DURATION.sub("", text) or not text:
        raise UsageError(f"-{flag}: {text!r} is not a duration; spell it 90s, 5m or 1h30m")
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION.findall(text))
    if not 0 < seconds < 1e9:
        raise UsageError(f"-{flag}: {text!r} is not more than 0 (and less than 30 years)")
    return seconds


def _number(what: str, text: str) -> int:
    number = parse_number(text)
    if number is None:
        raise UsageError(f"{what}: {text!r} is not a whole number from 0 to {MAX_NUMBER}, in plain digits")
    return number


def _keep(text: str) -> int:
    keep = _number("-keep", text)
    if keep < 1:
        raise UsageError("-keep: at least 1; the latest entry always stays")
    return keep


def _proxy(text: str | None) -> str | None:
    try:
        return None if text is None else parse_proxy(text)
    except ConfigurationError as problem:
        raise UsageError(f"-{problem}") from None


def _framework(text: str | None) -> str:
    if text is not None and text not in FRAMEWORKS:
        raise UsageError(f"-framework: {text!r} is unknown; give {' or '.join(FRAMEWORKS)}")
    return text or ""


def _epoch(verb: str, values: Mapping[str, str], environment: Mapping[str, str]) -> int | None:
    """-epoch or its variable. A malformed variable matters only to a verb that would use it."""
    if "epoch" not in _VALUE_FLAGS[verb]:
        return None
    if "epoch" in values:
        return _number("-epoch", values["epoch"])
    variable = _variable("EPOCH", environment)
    return None if variable is None else _number(variable, environment[variable])


def _attempt(
    verb: str, values: Mapping[str, str], positionals: Sequence[str], environment: Mapping[str, str]
) -> str | None:
    """-attempt or its variable, where SAVES does not make it unused."""
    if verb != "watch":
        return None
    if "attempt" in values:
        return _one_folder("-attempt", values["attempt"])
    variable = _variable("ATTEMPT", environment)
    if positionals or variable is None:
        return None
    return _one_folder(variable, environment[variable])


def _one_folder(what: str, attempt: str) -> str:
    if not attempt or "/" in attempt or attempt in (".", "..") or not attempt.isprintable():
        raise UsageError(f"{what}: {attempt!r} is not the name of one folder below exec/")
    return attempt


def _variable(suffix: str, environment: Mapping[str, str]) -> str | None:
    """The variable that stands in for a flag; one that is set to nothing counts as unset."""
    return next((name for name in (f"DISPATCH_{suffix}", f"CORTEX_PUBLISH_{suffix}") if environment.get(name)), None)
