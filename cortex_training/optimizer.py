"""The optimizer block of a training configuration, brought into the one form that the service documents.

People paste what their last trainer took: DeepSpeed's ``{"type": …, "params": {…}}``, ``beta1`` and ``beta2``, a
clipping threshold or a scheduler among the optimizer's settings. What means the same is rewritten, the rest is refused
by name; nothing is filled in, because a default chosen here would override the service's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cortex_training.errors import ConfigurationError

_SCHEDULER_FIELDS = {
    "lr_scheduler", "lr_scheduler_type", "num_warmup_steps", "training_horizon", "warmup_ratio", "warmup_steps",
    "warmup_steps_proportion",
}  # fmt: skip
_BETAS = {"beta1": (0, 0.9), "beta2": (1, 0.999)}
"""Position in ``betas``, and the value of AdamW that stands in for a partner that is not given."""


class NormalizedOptimizer(NamedTuple):
    optimizer: dict[str, Any]
    """Of name, lr, weight_decay, betas, eps and fused, those that were given."""
    gradient_clipping: float | None
    """What was found among the optimizer's settings; it belongs beside the optimizer in the training configuration."""


def normalize_optimizer(optimizer: Mapping[str, Any], *, location: str = "optimizer") -> NormalizedOptimizer:
    """`optimizer`, not changed itself, in the service's form.

    `location` names the block in errors. Raises ConfigurationError for unknown fields, values out of range, and two
    spellings of one setting that disagree.
    """
    if not isinstance(optimizer, Mapping) or not optimizer:
        raise ConfigurationError.of(
            location, optimizer, "must be a non-empty object, e.g. {'name': 'AdamW', 'lr': 1e-4}"
        )
    settings = _flattened(location, optimizer)
    _refuse_scheduler(location, settings)
    if "type" in settings:
        _settle(location, settings, "name", settings.pop("type"))
    _join_betas(location, settings)
    unknown = sorted(map(str, set(settings) - set(_CHECKS)))
    if unknown:
        allowed = [name for name in _CHECKS if name != "gradient_clipping"]
        raise ConfigurationError(
            f"{location} contains unsupported field(s): {unknown}; supported are {allowed}",
            field=f"{location}.{unknown[0]}",
        )
    checked = {name: check(f"{location}.{name}", settings[name]) for name, check in _CHECKS.items() if name in settings}
    return NormalizedOptimizer(gradient_clipping=checked.pop("gradient_clipping", None), optimizer=checked)


def _flattened(location: str, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(optimizer)
    params = settings.pop("params", {})
    if not isinstance(params, Mapping):
        raise ConfigurationError.of(f"{location}.params", params, "must be an object")
    for name, value in params.items():
        _settle(location, settings, name, value)
    return settings


def _settle(location: str, settings: dict[str, Any], name: str, value: Any) -> None:
    if name in settings and settings[name] != value:
        raise ConfigurationError(
            f"{location} gives {name} twice, as {settings[name]!r} and {value!r}: keep one", field=f"{location}.{name}"
        )
    settings[name] = value


def _refuse_scheduler(location: str, settings: Mapping[str, Any]) -> None:
    found = sorted(_SCHEDULER_FIELDS & set(settings))
    if found:
        raise ConfigurationError(
            f"{location} contains learning-rate schedule field(s) {found}: the service has no scheduler; pass the rate "
            "of each step to step(), or give a training plan a learning_rate schedule",
            field=f"{location}.{found[0]}",
        )


def _join_betas(location: str, settings: dict[str, Any]) -> None:
    given = {name: settings.pop(name) for name in _BETAS if name in settings}
    if not given:
        return
    betas = [default for _, default in _BETAS.values()]
    known = settings.get("betas")
    if isinstance(known, list | tuple) and len(known) == 2:
        betas = list(known)
    for name, value in given.items():
        betas[_BETAS[name][0]] = value
    _settle(location, settings, "betas", type(known)(betas) if isinstance(known, list | tuple) else betas)


def _number(minimum: float, *, excluded: bool = False, below: float = math.inf) -> Callable[[str, Any], float]:
    """A check for a finite number of at least `minimum` (above it, if that is `excluded`) and less than `below`."""
    bounds = f"{'above' if excluded else 'at least'} {minimum:g}" + (
        "" if below == math.inf else f" and below {below:g}"
    )

    def check(field: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < minimum or value >= below or (excluded and value == minimum):
            raise ConfigurationError.of(field, value, f"must be a finite number, {bounds}")
        return float(value)

    return check


def _check_betas(field: str, value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigurationError.of(field, value, "must be two numbers, e.g. [0.9, 0.999]")
    return [_number(0, below=1)(f"{field}[{index}]", beta) for index, beta in enumerate(value)]


def _check_name(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError.of(field, value, "must be the name of an optimizer, e.g. 'AdamW'")
    return value


def _check_fused(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError.of(field, value, "must be true or false")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "name": _check_name,
    "lr": _number(0),
    "weight_decay": _number(0),
    "betas": _check_betas,
    "eps": _number(0, excluded=True),
    "fused": _check_fused,
    "gradient_clipping": _number(0),
}
