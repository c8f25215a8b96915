"""Prints what the public client offers, as JSON: for each of its public callables, the parameters.

Runs in the public client's own Python. A parameter is [name, kind, whether it has a default].
"""

import inspect
import json
from typing import Any

import cortex_training
from cortex_training import client


def parameters(function: Any) -> list[list[Any]]:
    return [
        [parameter.name, parameter.kind.name, parameter.default is not parameter.empty]
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]


def main() -> None:
    offered: dict[str, Any] = {}
    for name in cortex_training.__all__:
        value = getattr(cortex_training, name)
        if inspect.isfunction(value):
            offered[name] = parameters(value)
        elif inspect.isclass(value):
            offered[name] = None
            if not issubclass(value, BaseException | str):
                offered[f"{name}.__init__"] = parameters(value)
                for method, _ in inspect.getmembers(value, callable):
                    if not method.startswith("_"):
                        offered[f"{name}.{method}"] = parameters(getattr(value, method))
            elif issubclass(value, str):
                offered |= {f"{name}.{member.name}": None for member in value}
        else:
            offered[name] = None
    in_client = [name for name, value in vars(client).items() if _is_own(value) and not name.startswith("_")]
    print(json.dumps({"callables": offered, "in_client": in_client}))


def _is_own(value: object) -> bool:
    """Whether `value` belongs to the client's module, as a definition of its own."""
    return getattr(value, "__module__", "") == client.__name__


main()
