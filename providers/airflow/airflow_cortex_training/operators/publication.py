"""Looking up what is published, and removing what is old. Neither calls the training service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException

from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.links import CortexTrainingCheckpointLink, location_url, note
from airflow_cortex_training.operators.base import CortexTrainingOperator, with_fields
from airflow_cortex_training.roots import open_log
from cortex_training.errors import ConfigurationError, CortexTrainingError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.publication import Entry, PublicationLog

MISSING = ("fail", "skip")
_MANIFEST_FIELDS = ("job_id", "checkpoint_id", "checkpoint_type", "created_at")


class NothingPublished(CortexTrainingError, LookupError):
    """The root has no publication (yet)."""


class CortexTrainingResolveOperator(CortexTrainingOperator):
    """Find the latest publication of a root: the one of the greatest (epoch, step).

    Args:
        root: a directory, or ``s3://BUCKET/PREFIX``.
        credentials: for ``s3://``: a list ``kind:location,…``; ``airflow:CONN_ID`` is an Airflow connection.
        min_step: what is published with fewer steps does not count.
        missing: what to do when nothing is published: ``fail`` (a retry looks again) or ``skip`` this task.

    Returns (XCom): ``entry`` (its name), ``location``, ``save`` (path below the root), ``epoch``, ``step``, and of the
    save's manifest, where it has one, ``job_id``, ``checkpoint_id``, ``checkpoint_type`` and ``created_at``.
    """

    template_fields = ("root", "credentials", "min_step")
    ui_color = "#e5f5e0"
    operator_extra_links = (CortexTrainingCheckpointLink(),)

    def __init__(
        self, *, root: str, credentials: str | None = None, min_step: int = 0, missing: str = "fail", **kwargs: Any
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.root = root
        self.credentials = credentials
        self.min_step = min_step
        if missing not in MISSING:
            raise ConfigurationError.of(f"task {self.task_id}: missing", missing, f"use one of {', '.join(MISSING)}")
        self.missing = missing

    def execute(self, context: Context) -> dict[str, Any]:
        with clear_failures():
            log = open_log(self.root, self.credentials)
            entry = log.latest()
            if entry is None or entry.step < int(self.min_step):
                found = f"the latest is step {entry.step}" if entry else "nothing is published"
                missing = f"{self.root}: {found}; at least step {self.min_step} is wanted"
                raise AirflowSkipException(missing) if self.missing == "skip" else NothingPublished(missing)
        self.log.info("the latest publication is %s (epoch %d, step %d)", entry.location, entry.epoch, entry.step)
        note(self, CortexTrainingCheckpointLink, location_url(entry.location, context))
        return described(log, entry)


class CortexTrainingPruneOperator(CortexTrainingOperator):
    """Remove all but the latest publications of a root, and the saves that only they named.

    Safe beside publishers and a second prune; a retry removes what is left to remove.

    Args:
        root, credentials: as in `CortexTrainingResolveOperator`.
        keep: how many publications stay, at least 1.

    Returns (XCom): ``removed`` (how many saves), ``kept`` (how many publications), ``latest`` (name of the last one).
    """

    template_fields = ("root", "credentials", "keep")
    ui_color = "#f4e3e3"

    def __init__(self, *, root: str, keep: int = 3, credentials: str | None = None, **kwargs: Any) -> None:
        super().__init__(**with_fields(kwargs))
        self.root = root
        self.keep = keep
        self.credentials = credentials

    def execute(self, context: Context) -> dict[str, Any]:
        from cortex_training.publication import prune

        with clear_failures():
            log = open_log(self.root, self.credentials)
            removed = prune(
                log,
                int(self.keep),
                removed=lambda location: self.log.info("removed %s", location),
                left=lambda location, reason: self.log.warning("left %s in place: %s", location, reason),
            )
            kept = log.entries()
        return {"removed": len(removed), "kept": len(kept), "latest": kept[-1].name if kept else None}


def described(log: PublicationLog, entry: Entry) -> dict[str, Any]:
    """A publication as tasks hand it on. Raises `SaveError` when its save has a manifest that is broken."""
    from cortex_training.publication import SaveManifest
    from cortex_training.publication.save import MANIFEST_NAME

    told: dict[str, Any] = {
        "entry": entry.name,
        "location": entry.location,
        "save": entry.save,
        "epoch": entry.epoch,
        "step": entry.step,
    }
    # A trainer's own saves, which `cortex-publish watch` published, have none.
    if log.store.exists(f"{entry.save}/{MANIFEST_NAME}"):
        manifest = SaveManifest.read(log.store, entry.save)
        told |= {name: getattr(manifest, name) for name in _MANIFEST_FIELDS}
    return told
