"""Checkpoints: save and load on the service, bring files here, publish them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.links import (
    CortexTrainingCheckpointLink,
    CortexTrainingJobLink,
    job_url,
    location_url,
    note,
)
from airflow_cortex_training.object_storage import ObjectFolder, is_url, local_path
from airflow_cortex_training.operators.base import CortexTrainingOperator, require_text, with_fields
from airflow_cortex_training.operators.request_leg import CortexTrainingRequestOperator
from airflow_cortex_training.roots import open_log
from cortex_training.config import CheckpointType
from cortex_training.errors import ConfigurationError, NotFoundError, ProtocolError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cortex_training.connection import ConnectionSettings
    from cortex_training.client import CortexTrainingClient
    from cortex_training.publication import PublicationLog, SaveManifest

_PROGRESS_STEP = 0.1


class CortexTrainingSaveOperator(CortexTrainingRequestOperator):
    """Save a checkpoint on the service.

    Args:
        checkpoint_type: ``resumable`` (weights, optimizer, step) or ``weights-only`` (Hugging Face files,
            exportable).

    A retry whose predecessor may have saved already saves again: that costs space and changes nothing.

    Returns (XCom): ``job_id``, ``checkpoint_id``, ``checkpoint_type``, ``global_steps``, ``created_at``.
    """

    template_fields = (*CortexTrainingRequestOperator.template_fields, "checkpoint_type")
    operation = "save"

    def __init__(self, *, checkpoint_type: str = CheckpointType.RESUMABLE, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.checkpoint_type = checkpoint_type
        self._saved: str | None = None

    def check(self) -> None:
        if str(self.checkpoint_type).lower() not in set(CheckpointType):
            raise ConfigurationError.of(
                f"task {self.task_id}: checkpoint_type", self.checkpoint_type, f"use one of {', '.join(CheckpointType)}"
            )

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str:
        return client.save(self.job_id, None, str(self.checkpoint_type).lower())

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        from cortex_training.protocol.results import checkpoint_id

        saved = checkpoint_id(result)
        if not saved:
            raise ProtocolError(
                f"save on job {self.job_id} ended without a checkpoint id; it answered {sorted(result)}"
            )
        listed = listed_checkpoint(client, self.job_id, saved)
        self._saved = saved
        return {
            "job_id": self.job_id,
            "checkpoint_id": saved,
            "checkpoint_type": str(self.checkpoint_type).lower(),
            "global_steps": listed.get("global_steps"),
            "created_at": listed.get("created_at"),
        }

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        from airflow_cortex_training.lineage import of_save

        return of_save(self.job_id, self._saved, self.hook.settings()) if self._saved else None


class CortexTrainingLoadOperator(CortexTrainingRequestOperator):
    """Load a checkpoint into the training sub-job of a running job.

    Args:
        checkpoint_id: a resumable checkpoint.
        source_job_id: the job that saved it; None: this one.
        target_sub_job_id: default the job's training sub-job.

    A load does not clear gradients that a forward-backward left on the job: load before the first one. A retry that
    can't know whether its predecessor loaded loads again, which gives the same weights.

    Returns (XCom): ``job_id``, ``checkpoint_id``.
    """

    template_fields = (
        *CortexTrainingRequestOperator.template_fields,
        "checkpoint_id",
        "source_job_id",
        "target_sub_job_id",
    )
    operation = "load"

    def __init__(
        self,
        *,
        checkpoint_id: str,
        source_job_id: str | None = None,
        target_sub_job_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.checkpoint_id = checkpoint_id
        self.source_job_id = source_job_id
        self.target_sub_job_id = target_sub_job_id
        self._loaded = False

    def check(self) -> None:
        require_text(self, "checkpoint_id", self.checkpoint_id)

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str:
        return client.load(
            self.job_id, self.checkpoint_id, self.source_job_id, target_sub_job_id=self.target_sub_job_id
        )

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        self._loaded = True
        return {"job_id": self.job_id, "checkpoint_id": self.checkpoint_id}

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        from airflow_cortex_training.lineage import of_load

        if not self._loaded:
            return None
        source = self.source_job_id or self.job_id
        return of_load(source, self.checkpoint_id, self.job_id, self.hook.settings())


class CortexTrainingExportOperator(CortexTrainingOperator):
    """Download a weights-only checkpoint: below a root, as a save that can be published, or to any object storage.

    Below a root the files go to ``<root>/exec/<attempt>-e<epoch>/<checkpoint id>/``. The epoch is claimed once for a
    generation of the task, and a cleared task writes another folder, since the first one may be published. The
    manifest, with sizes and SHA-256 of all files, is written last.

    A retry goes on where the download stopped: whole files stay, and in a directory partial ones are continued. Links
    to the files are secrets; they appear in no log and no XCom.

    Args:
        job_id, checkpoint_id: usually ``save.output["job_id"]`` and ``save.output["checkpoint_id"]``.
        root: an existing directory that workers share, or ``s3://BUCKET/PREFIX``.
        credentials: of an ``s3://`` root: a list ``kind:location,…``; ``airflow:CONN_ID`` is an Airflow connection.
        path: instead of a root: a folder as Airflow's ``ObjectStoragePath`` spells it, e.g.
            ``gs://google_default@bucket/models/nightly``. Files there are not in a publication log.
        metrics: numbers to keep in the manifest, e.g. ``train.output``'s losses.

    Returns (XCom): ``path``, ``global_steps``, ``files``, ``bytes``; with a root also ``save`` (path below it) and
    ``epoch``, for `CortexTrainingPublishOperator`.
    """

    template_fields = (
        *CortexTrainingOperator.template_fields,
        "job_id",
        "checkpoint_id",
        "root",
        "credentials",
        "path",
        "metrics",
    )
    operator_extra_links = (CortexTrainingCheckpointLink(), CortexTrainingJobLink())

    def __init__(
        self,
        *,
        job_id: str,
        checkpoint_id: str,
        root: str | None = None,
        credentials: str | None = None,
        path: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.job_id = job_id
        self.checkpoint_id = checkpoint_id
        self.root = root
        self.credentials = credentials
        self.path = path
        self.metrics = metrics
        self._exported: tuple[dict[str, Any], ConnectionSettings] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        with clear_failures(names=lambda: {"job": str(self.job_id), "checkpoint": str(self.checkpoint_id)}):
            require_text(self, "job_id", self.job_id)
            require_text(self, "checkpoint_id", self.checkpoint_id)
            if bool(self.root) == bool(self.path):
                raise ConfigurationError.of(
                    f"task {self.task_id}: root, path", [self.root, self.path], "give exactly one of the two"
                )
            settings = self.hook.settings()
            with self.hook.get_conn() as client:
                note(self, CortexTrainingJobLink, job_url(client, self.job_id))
                listed = listed_checkpoint(client, self.job_id, self.checkpoint_id)
                if self.root:
                    exported = self._below_root(client, settings, self._manifest(listed), context)
                else:
                    exported = self._to_path(client, settings, self._manifest(listed))
        exported["global_steps"] = listed.get("global_steps")
        note(self, CortexTrainingCheckpointLink, location_url(exported["path"], context))
        self._exported = (exported, settings)
        return exported

    def _below_root(
        self, client: CortexTrainingClient, settings: ConnectionSettings, manifest: SaveManifest, context: Context
    ) -> dict[str, Any]:
        from cortex_training.paths import safe_relative
        from cortex_training.publication import export_save

        log = open_log(str(self.root), self.credentials)
        epoch = claimed_epoch(DurableRecord(context), log, context)
        save = f"exec/{attempt_id(context)}-e{epoch}/{safe_relative(self.checkpoint_id)}"
        way = {"proxy": settings.proxy, "ca_bundle": settings.ca_bundle}
        manifest = export_save(client, log.store, save, manifest, self._progress(), **way)
        return {"save": save, "epoch": epoch, "path": log.store.locate(save), **_sizes(manifest)}

    def _to_path(
        self, client: CortexTrainingClient, settings: ConnectionSettings, manifest: SaveManifest
    ) -> dict[str, Any]:
        from cortex_training.publication import PosixStore, export_save

        field, way = f"task {self.task_id}: path", {"proxy": settings.proxy, "ca_bundle": settings.ca_bundle}
        parent, _, leaf = str(self.path).rstrip("/").rpartition("/")
        if not parent or not leaf:
            raise ConfigurationError.of(field, self.path, "give a folder inside a bucket or a directory")
        place = ObjectFolder(field, parent) if is_url(parent) else PosixStore(local_path(parent))
        manifest = export_save(client, place, leaf, manifest, self._progress(), **way)
        return {"path": place.locate(leaf), **_sizes(manifest)}

    def _manifest(self, listed: Mapping[str, Any]) -> SaveManifest:
        from cortex_training.publication import SaveManifest

        return SaveManifest(
            job_id=self.job_id,
            checkpoint_id=self.checkpoint_id,
            checkpoint_type=CheckpointType.WEIGHTS_ONLY,
            global_steps=int(listed.get("global_steps") or 0),
            created_at=listed.get("created_at"),
            metrics=_finite_numbers(self.metrics or {}),
        )

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        from airflow_cortex_training.lineage import of_export

        return of_export(self.job_id, self.checkpoint_id, *self._exported) if self._exported else None

    def _progress(self) -> Any:
        told = -1.0

        def tell(done: int, total: int) -> None:
            nonlocal told
            part = done / total if total else 1.0
            if part - told >= _PROGRESS_STEP or part >= 1.0 > told:
                told = part
                self.log.info("downloaded %.1f of %.1f MB", done / 1e6, total / 1e6)

        return tell


class CortexTrainingPublishOperator(CortexTrainingOperator):
    """Publish a save: from now on it is what `latest` finds. Calls no service.

    Args:
        root: root of the publication log: a directory, or ``s3://BUCKET/PREFIX``.
        credentials: for ``s3://``: a list ``kind:location,…``; ``airflow:CONN_ID`` is an Airflow connection.
        save: path of the save below the root, e.g. ``export.output["save"]``.
        step: the step its weights are at, e.g. ``export.output["global_steps"]``.
        epoch: the epoch the save was made under, e.g. ``export.output["epoch"]``; None claims one here, once for a
            generation of the task, so that a retry publishes the same entry.
        loss: the loss last measured on the training run, if one was: a save of weights that diverged is refused.

    An `AssetAlias` among the `outlets` gets an event about `assets.publications(root)` when the entry is there.

    Returns (XCom): ``entry``, ``location``, ``epoch``, ``step``, ``created`` (False when it was there already).
    """

    template_fields = ("root", "save", "step", "epoch", "loss", "credentials")
    ui_color = "#e5f5e0"
    operator_extra_links = (CortexTrainingCheckpointLink(),)

    def __init__(
        self,
        *,
        root: str,
        save: str,
        step: int,
        epoch: int | None = None,
        loss: float | None = None,
        credentials: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.root = root
        self.credentials = credentials
        self.save = save
        self.step = step
        self.epoch = epoch
        self.loss = loss
        self._published: dict[str, Any] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_cortex_training.assets import about, announce, publications

        with clear_failures():
            if self.loss is not None and not math.isfinite(float(self.loss)):
                raise ConfigurationError.of(
                    f"task {self.task_id}: loss", self.loss, "the training diverged; its checkpoint is not published"
                )
            log = open_log(self.root, self.credentials)
            epoch = claimed_epoch(DurableRecord(context), log, context) if self.epoch is None else int(self.epoch)
            entry, created = log.publish(require_text(self, "save", self.save), epoch, int(self.step))
            if self.outlets:
                announce(self.outlets, context, publications(log.store.root), about(entry, log.store))
        self.log.info(
            "published %s (epoch %d, step %d)%s",
            entry.location,
            entry.epoch,
            entry.step,
            "" if created else ", as before",
        )
        note(self, CortexTrainingCheckpointLink, location_url(entry.location, context))
        self._published = {
            "entry": entry.name,
            "location": entry.location,
            "epoch": entry.epoch,
            "step": entry.step,
            "created": created,
        }
        return self._published

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        from airflow_cortex_training.lineage import of_publication

        return of_publication(self.root, self._published)


class CortexTrainingDeleteCheckpointOperator(CortexTrainingOperator):
    """Delete a checkpoint on the service. Files that were exported, and what was published, stay.

    A checkpoint that is not there fails the task for good, unless an earlier try may have deleted it: then that is
    what was wanted.

    Args:
        job_id, checkpoint_id: usually ``save.output["job_id"]`` and ``save.output["checkpoint_id"]``.

    Returns (XCom): ``job_id``, ``checkpoint_id``, ``deleted`` (False when an earlier try had done it).
    """

    template_fields = (*CortexTrainingOperator.template_fields, "job_id", "checkpoint_id")
    ui_color = "#f4e3e3"
    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(self, *, job_id: str, checkpoint_id: str, **kwargs: Any) -> None:
        super().__init__(**with_fields(kwargs))
        self.job_id = job_id
        self.checkpoint_id = checkpoint_id

    def execute(self, context: Context) -> dict[str, Any]:
        with clear_failures(names=lambda: {"job": str(self.job_id), "checkpoint": str(self.checkpoint_id)}):
            ids = {
                "job_id": require_text(self, "job_id", self.job_id),
                "checkpoint_id": require_text(self, "checkpoint_id", self.checkpoint_id),
            }
            record = DurableRecord(context)
            earlier = record.current or record.superseded or {}
            tried = all(earlier.get(name) == value for name, value in ids.items())
            with self.hook.get_conn() as client:
                note(self, CortexTrainingJobLink, job_url(client, ids["job_id"]))
                record.write(**ids)
                try:
                    client.delete_checkpoint(**ids)
                except NotFoundError:
                    if not tried:
                        # Nobody else may be blamed for it: the next try must not take this one for a deletion.
                        record.write()
                        raise
                    self.log.info("checkpoint %s is gone; an earlier try deleted it", ids["checkpoint_id"])
                    return {**ids, "deleted": False}
        return {**ids, "deleted": True}


def attempt_id(context: Context) -> str:
    """12 hex digits that name a task instance in paths: DAG, run and task ids may be too long for an entry's name."""
    ti = context["ti"]
    text = "\0".join((ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def claimed_epoch(record: DurableRecord, log: PublicationLog, context: Context) -> int:
    """The epoch of this generation of the task: claimed by its first try, remembered for the others."""
    epoch = (record.current or {}).get("epoch")
    if epoch is None:
        epoch = log.claim_epoch({"task": attempt_id(context)}).number
        record.write(epoch=epoch)
    return int(epoch)


def listed_checkpoint(client: CortexTrainingClient, job_id: str, checkpoint_id: str) -> dict[str, Any]:
    """The service's own record of a checkpoint. Raises `ConfigurationError` when the job has no such checkpoint."""
    listed = client.list_checkpoints(job_id)
    for checkpoint in listed:
        if checkpoint.get("checkpoint_id") == checkpoint_id:
            return dict(checkpoint)
    known = ", ".join(str(c.get("checkpoint_id")) for c in listed[-5:]) or "none"
    raise ConfigurationError.of("checkpoint_id", checkpoint_id, f"job {job_id} does not list it (it lists: {known})")


def _sizes(manifest: SaveManifest) -> dict[str, int]:
    return {"files": len(manifest.files), "bytes": sum(file.size for file in manifest.files)}


def _finite_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
