"""Whether anybody watches or drives: a flow run that nobody would wake up is better off waiting by itself.

Watchers and drivers say that they are there in a variable on the Prefect server, one for all watchers and one for all
drivers, because any will do.
"""

from __future__ import annotations

import time
from typing import Any

from prefect.variables import Variable

from prefect_cortex_training.patience import waits_for_server

WATCHERS = "cortex_training_watch"
DRIVERS = "cortex_training_drive"

ALIVE_S = 90.0
"""Who has said nothing for so long is gone."""

_TELL_EVERY_S = 20.0


class Presence:
    """A process saying that it is there, in the variable `name`."""

    def __init__(self, name: str, *, every_s: float = 0.0) -> None:
        """`every_s`: seconds between two passes of the process. One that comes by seldom is there in between."""
        self._name = name
        self._valid_s = max(ALIVE_S, 3 * every_s)
        self._told: float | None = None

    async def tell(self) -> None:
        """Say so, every 20 seconds at most."""
        if self._told is not None and time.monotonic() - self._told < _TELL_EVERY_S:
            return
        await Variable.aset(self._name, {"until": time.time() + self._valid_s}, overwrite=True)
        self._told = time.monotonic()


@waits_for_server
async def somebody_is_there(name: str) -> bool:
    """Whether a process has said in the variable `name` that it is there, not long ago."""
    value: Any = await Variable.aget(name, None)
    return isinstance(value, dict) and float(value.get("until", 0.0)) > time.time()
