"""What Airflow stores of a trigger: exactly what its constructor takes, with a version, over releases."""

from __future__ import annotations

import inspect
from typing import Any

TRIGGER_VERSION = 4
"""The highest version of kwargs that is read here. A trigger class writes the one at which its own fields last changed.

1: the first. 2: job and training triggers got ``cancel_on_kill``, job triggers ``generation``. 3: the trigger of jobs
that end. 4: the trigger of drains.
"""


class StoredArguments:
    """A trigger that keeps each keyword of its ``__init__`` in an attribute of that name, `v` and `unknown` among them.

    `unknown` is what a newer release stored and this one has no word for. It is stored again as it was.
    """

    v: int
    unknown: dict[str, Any]

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kind = type(self)
        taken = inspect.signature(kind.__init__).parameters.values()
        kept = {p.name: getattr(self, p.name) for p in taken if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return f"{kind.__module__}.{kind.__qualname__}", {**kept, **self.unknown}

    def check_version(self) -> None:
        """Raise when the arguments were stored by a newer release than this one.

        Called from ``run``, not from ``__init__``: an exception there would end Airflow's whole trigger runner.
        """
        if self.v > TRIGGER_VERSION or self.unknown:
            raise RuntimeError(
                f"{type(self).__name__} was deferred by a newer release (version {self.v}, unknown fields "
                f"{sorted(self.unknown)}); this triggerer reads up to version {TRIGGER_VERSION}. Upgrade "
                "airflow-provider-cortex-training where triggerers run, then retry the task."
            )
