"""Operations that take the time that is asked: durations by operation, drawn from a seed."""

from __future__ import annotations

import hashlib
import json
import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex_training.local.assumptions import Assumptions
from cortex_training.local.job_spec import SubJobSpec

if TYPE_CHECKING:
    from cortex_training.local.simulated_engine import SimulatedSampling, SimulatedTraining

OPERATIONS = (
    "forward-backward", "forward", "generate", "generate-stream", "step", "save", "load", "weight-sync",
)  # fmt: skip
_DEFAULT = "default"
_MOST_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Duration:
    """How long one kind of operation takes: lognormal, or always `median` seconds when `sigma` is 0."""

    median: float
    sigma: float = 0.0
    """Standard deviation of the duration's natural logarithm."""
    factor: float = 1.0
    """Multiplies the duration of every operation of this kind after the first `after` of a sub-job."""
    after: int = 0

    def draw(self, number: int, chance: random.Random) -> float:
        """Seconds that the `number`-th operation takes, counted from 1."""
        seconds = self.median * math.exp(self.sigma * chance.gauss(0.0, 1.0))
        return min(seconds * (self.factor if number > self.after else 1.0), _MOST_SECONDS)


@dataclass(frozen=True)
class Simulation:
    """What `--simulate` says. Equal seeds and an equal order of creation give equal durations."""

    durations: Mapping[str, Duration]
    """By operation; `default` for those that are not named."""
    seed: int = 0

    def engine(self, spec: SubJobSpec, assumptions: Assumptions, place: str) -> SimulatedTraining | SimulatedSampling:
        """What a sub-job computes with instead of a model. Durations follow from its `place` among all others."""
        # Imported here because it needs what settings need not.
        from cortex_training.local.simulated_engine import SimulatedSampling, SimulatedTraining

        pace = Pace(self, place)
        if spec.kind == "training":
            return SimulatedTraining(spec, assumptions, pace)
        return SimulatedSampling(spec, pace)


class Pace:
    """The durations of one sub-job's operations, in order."""

    def __init__(self, simulation: Simulation, place: str) -> None:
        self._simulation = simulation
        self._place = place
        self._counts: dict[str, int] = {}

    def next(self, operation: str) -> float:
        """Seconds that the next operation of this kind takes."""
        number = self._counts[operation] = self._counts.get(operation, 0) + 1
        durations = self._simulation.durations
        duration = durations.get(operation) or durations.get(_DEFAULT) or Duration(0.0)
        origin = f"{self._simulation.seed}/{self._place}/{operation}/{number}"
        digest = hashlib.sha256(origin.encode()).digest()
        return duration.draw(number, random.Random(int.from_bytes(digest[:8], "big")))


def read_simulation(given: str) -> Simulation:
    """Read `--simulate`: a .json or .toml file, or an expression.

    An expression is ``[operation:]name=value,...`` with ``;`` between operations, where a bare number is a median:
    ``0.2``, ``median=1,sigma=0.3``, ``default:0.05;step:median=0.2,sigma=0.5,factor=4,after=100;seed=7``.
    Raises ValueError naming the field, OSError when a file cannot be read.
    """
    path = Path(given)
    if path.suffix not in (".json", ".toml"):
        return _from_document("--simulate", _parse(given))
    try:
        text = path.read_text()
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not {path.suffix[1:].upper()}: {error}") from None
    return _from_document(str(path), document)


def _from_document(place: str, document: Any) -> Simulation:
    if not isinstance(document, dict):
        raise ValueError(f"{place}: must be an object, got {document!r:.200}")
    unknown = sorted(set(document) - {"seed", "durations"})
    if unknown:
        raise ValueError(f"{place}: {unknown[0]}: is not known; there are seed, durations")
    seed, durations = document.get("seed", 0), document.get("durations", {})
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"{place}: seed: must be a whole number, got {seed!r:.200}")
    if not isinstance(durations, dict) or not durations:
        raise ValueError(f"{place}: durations: must hold {_DEFAULT} or operations, got {durations!r:.200}")
    return Simulation({name: _duration(place, name, one) for name, one in durations.items()}, seed)


def _duration(place: str, name: str, given: Any) -> Duration:
    if name not in (_DEFAULT, *OPERATIONS):
        raise ValueError(f"{place}: durations.{name}: must be {_DEFAULT} or one of {', '.join(OPERATIONS)}")
    fields = given if isinstance(given, dict) else {"median": given}
    unknown = sorted(set(fields) - {"median", "sigma", "factor", "after"})
    if unknown or "median" not in fields:
        problem = f"{unknown[0]}: is not known" if unknown else "median: is missing"
        raise ValueError(f"{place}: durations.{name}.{problem}; there are median, sigma, factor, after")
    limits = {"median": _MOST_SECONDS, "sigma": 5.0, "factor": 1e6, "after": 1e9}
    for field_name, value in fields.items():
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= limits[field_name]
        if not right or (field_name == "after" and not isinstance(value, int)):
            kind = "a whole number" if field_name == "after" else "a number"
            raise ValueError(
                f"{place}: durations.{name}.{field_name}: must be {kind} from 0 to {limits[field_name]:g}, "
                f"got {value!r:.200}"
            )
    return Duration(**fields)


def _parse(expression: str) -> dict[str, Any]:
    """The document that an expression stands for."""
    document: dict[str, Any] = {"durations": {}}
    for part in filter(None, (one.strip() for one in expression.split(";"))):
        if part.startswith("seed="):
            document["seed"] = _number("seed", part[len("seed=") :])
            continue
        operation, separator, settings = part.rpartition(":")
        fields: dict[str, Any] = {}
        for setting in settings.split(","):
            name, given, value = setting.rpartition("=")
            fields[name.strip() if given else "median"] = _number(name or "median", value)
        document["durations"][operation.strip() if separator else _DEFAULT] = fields
    return document


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if text.strip().lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"--simulate: {name}: must be a number, got {text!r:.200}") from None
