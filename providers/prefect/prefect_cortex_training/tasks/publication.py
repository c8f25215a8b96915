"""The publication log of a root: publish, resolve, prune."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_cortex_training.durable import always, task_pair
from prefect_cortex_training.labels import RunLabels
from prefect_cortex_training.lineage import files_asset, record_made, source_of
from prefect_cortex_training.publication_events import tell_published

if TYPE_CHECKING:
    from cortex_training.publication import PublicationLog


async def _publish(root: str, save: str, *, epoch: int, step: int, root_credentials: str | None = None) -> str:
    """Publish the save at path `save` below `root`; returns the entry's name. A save that is published already stays as
    it is.

    Args:
        root: a directory, or ``s3://BUCKET/PREFIX``.
        save, epoch, step: as `export` returns them.
        root_credentials: for ``s3://``: a list ``kind:location,...``, with no secret in it.
    """
    entry, created, ids = await asyncio.to_thread(_create_entry, root, root_credentials, save, epoch, step)
    get_run_logger().info("%s %s", "published" if created else "was published already:", entry)
    if flow_run.id:
        # Also when it was there: the execution that published it may have died before it said so.
        await _tell(RunLabels(flow_run.id), root, entry, step, ids)
    return entry


async def _tell(labels: RunLabels, root: str, entry: str, step: int, ids: dict[str, str]) -> None:
    tell_published(labels.flow_run_id, root, entry, **ids)
    made_from = await source_of(labels, ids.get("job_id"))
    await record_made(labels, files_asset(root), made_from, {"entry": entry, "step": step, **ids})


def _create_entry(
    root: str, root_credentials: str | None, save: str, epoch: int, step: int
) -> tuple[str, bool, dict[str, str]]:
    """The entry's name, whether it is new, and the ids of what was saved."""
    log = _log(root, root_credentials)
    entry, created = log.publish(save, epoch, step)
    return entry.name, created, {name: value for name, value in _ids(log, save).items() if value is not None}


def _ids(log: PublicationLog, save: str) -> dict[str, str | None]:
    from cortex_training.publication import SaveError, SaveManifest

    try:
        manifest = SaveManifest.read(log.store, save)
    except SaveError:
        # Other programs publish folders of other kinds in the same log.
        return {}
    return {"job_id": manifest.job_id, "checkpoint_id": manifest.checkpoint_id}


async def _resolve(
    root: str, *, min_step: int = 0, seq: int = 1, root_credentials: str | None = None
) -> dict[str, Any] | None:
    """The latest publication of `root`: that of the greatest (epoch, step); None when there is none of `min_step`.

    Returns ``{"entry", "location", "save", "epoch", "step"}`` and, where the save has a manifest, ``job_id``,
    ``checkpoint_id``, ``checkpoint_type`` and ``created_at``. A rerun of the flow run gets the same answer, whatever
    was published since; `seq` numbers the questions.
    """
    found = await asyncio.to_thread(_latest, root, root_credentials)
    if found is None or found["step"] < min_step:
        get_run_logger().info("%s: nothing of at least step %d is published", root, min_step)
        return None
    get_run_logger().info("the latest publication is %s", found["location"])
    return found


def _latest(root: str, root_credentials: str | None) -> dict[str, Any] | None:
    from cortex_training.publication import SaveError, SaveManifest

    log = _log(root, root_credentials)
    entry = log.latest()
    if entry is None:
        return None
    found = {
        "entry": entry.name,
        "location": log.store.locate(entry.save),
        "save": entry.save,
        "epoch": entry.epoch,
        "step": entry.step,
    }
    try:
        manifest = SaveManifest.read(log.store, entry.save)
    except SaveError:
        # Other programs publish folders of other kinds in the same log.
        return found
    return found | {
        "job_id": manifest.job_id,
        "checkpoint_id": manifest.checkpoint_id,
        "checkpoint_type": manifest.checkpoint_type,
        "created_at": manifest.created_at,
    }


async def _prune(root: str, *, keep: int = 3, root_credentials: str | None = None) -> dict[str, Any]:
    """Remove all but the latest `keep` publications of `root`, and the saves that only they named; returns
    ``{"removed", "kept"}``, numbers. The latest always stays. Safe beside publishers and a second prune.
    """
    logger = get_run_logger()

    def remove() -> dict[str, Any]:
        from cortex_training.publication import prune

        log = _log(root, root_credentials)
        gone = prune(
            log,
            keep,
            removed=lambda location: logger.info("removed %s", location),
            left=lambda location, reason: logger.warning("left %s in place: %s", location, reason),
        )
        return {"removed": len(gone), "kept": len(log.entries())}

    return await asyncio.to_thread(remove)


def _log(root: str, root_credentials: str | None) -> PublicationLog:
    from cortex_training.publication import PublicationLog, open_store

    return PublicationLog(open_store(root, root_credentials))


publish, apublish = task_pair("publish", retries=2)(_publish)
resolve, aresolve = task_pair("resolve", retries=2, noted=always)(_resolve)
# Run again it removes what is too much then, which is what was asked for.
prune, aprune = task_pair("prune", retries=2, cached=False)(_prune)
