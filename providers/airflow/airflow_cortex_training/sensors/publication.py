"""Waiting for a checkpoint to be published, whoever publishes it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.operators.base import require_text, with_fields
from airflow_cortex_training.roots import open_log
from airflow_cortex_training.sensors.base import CortexTrainingSensor
from airflow_cortex_training.triggers.publication import CortexTrainingPublicationTrigger, counts, told
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from cortex_training.publication import PublicationLog


class CortexTrainingCheckpointPublishedSensor(CortexTrainingSensor):
    """Waits until the latest publication of a root is new enough. Calls no service.

    Args:
        root: a directory, or ``s3://BUCKET/PREFIX``, as workers (and triggerers, when deferrable) see it.
        credentials: for ``s3://``: a list ``kind:location,…``; ``airflow:CONN_ID`` is an Airflow connection.
        after: name of an entry, e.g. ``resolve.output["entry"]``: only a later one counts.
        min_step: only an entry with at least so many steps counts.
        deferrable, inline_s: see `CortexTrainingSensor`.

    Returns (XCom): ``entry`` (its name), ``location``, ``save`` (path below the root), ``epoch``, ``step``.
    """

    template_fields = ("root", "credentials", "after", "min_step")
    ui_color = "#e5f5e0"

    def __init__(
        self,
        *,
        root: str,
        credentials: str | None = None,
        after: str | None = None,
        min_step: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.root = root
        self.credentials = credentials
        self.after = after
        self.min_step = min_step

    def check(self) -> None:
        from cortex_training.publication import Entry, PublicationError

        self.root = require_text(self, "root", self.root)
        self.min_step = int(self.min_step)
        if self.after:
            try:
                Entry.parse(self.after)
            except PublicationError as error:
                raise ConfigurationError.of(f"task {self.task_id}: after", self.after, str(error)) from error

    def source(self) -> AbstractContextManager[_Root]:
        return contextlib.nullcontext(_Root(self.root, self.credentials))

    def look(self, source: _Root) -> dict[str, Any] | None:
        entry = source.log().latest()
        return told(entry) if entry is not None and counts(entry, self.after, self.min_step) else None

    def trigger(self, *, started: float, not_before: float, deadline: float) -> CortexTrainingPublicationTrigger:
        return CortexTrainingPublicationTrigger(
            root=self.root,
            credentials=self.credentials,
            after=self.after or None,
            min_step=self.min_step,
            started=started,
            not_before=not_before,
            deadline=deadline,
        )

    def concluded(self, event: dict[str, Any]) -> dict[str, Any]:
        return {name: event[name] for name in ("entry", "location", "save", "epoch", "step")}

    def ids(self) -> dict[str, Any]:
        return {"root": self.root}

    def awaited(self) -> str:
        after = f" after {self.after}" if self.after else ""
        return f"a publication in {self.root}{after} of step {self.min_step} or more"


class _Root:
    """A root that is opened at the first look that finds it: who publishes first may make it."""

    def __init__(self, root: str, credentials: str | None) -> None:
        self._root = root
        self._credentials = credentials
        self._log: PublicationLog | None = None

    def log(self) -> PublicationLog:
        if self._log is None:
            self._log = open_log(self._root, self._credentials)
        return self._log
