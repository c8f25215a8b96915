"""From weights on the service to a published folder: save, export, publish."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from cortex_training.answers import Checkpoint
from cortex_training.errors import ProtocolError
from cortex_training.paths import safe_relative
from prefect_cortex_training.credentials import connected, load_credentials
from prefect_cortex_training.durable import task_pair
from prefect_cortex_training.labels import RunLabels, root_digest
from prefect_cortex_training.submission import find_or_submit, operation_key, submit_again_if_lost

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient
    from prefect_cortex_training.credentials import CortexTrainingCredentials

HOUR_S = 3_600.0


async def _save(
    credentials: str,
    job_id: str,
    *,
    seq: int = 1,
    checkpoint_type: str = "weights-only",
    timeout_s: float = HOUR_S,
) -> str:
    """Save a checkpoint on the service; returns its id.

    ``weights-only`` can be exported and sampled from, ``resumable`` trained on. `seq` numbers the saves of a flow run
    on this job.
    """
    from cortex_training.protocol.results import checkpoint_id

    labels = RunLabels.of_current_run("save")
    async with connected(credentials) as client:
        _, result = await submit_again_if_lost(
            client,
            labels,
            operation_key("save", job_id, seq),
            job_id,
            lambda: client.save(job_id, checkpoint_type=checkpoint_type),
            timeout_s,
        )
    found = checkpoint_id(result)
    if found is None:
        raise ProtocolError(
            f"save on job {job_id}: the result names no checkpoint (it has "
            f"{', '.join(sorted(result)) or 'no fields'}); `cortex-training checkpoints` lists what was saved"
        )
    get_run_logger().info("checkpoint %s of job %s is saved (%s)", found, job_id, checkpoint_type)
    return found


async def _submit_save(credentials: str, job_id: str, *, seq: int = 1, checkpoint_type: str = "weights-only") -> str:
    """Ask for a checkpoint without waiting for it; returns the request's id, for `await_remote`. `save` with the same
    `seq` then finds it.
    """
    labels = RunLabels.of_current_run("submit_save")
    key = operation_key("save", job_id, seq)
    async with connected(credentials) as client:
        return await find_or_submit(
            client, labels, key, job_id, lambda: client.save(job_id, checkpoint_type=checkpoint_type)
        )


async def _export(credentials: str, job_id: str, checkpoint_id: str, *, root: str) -> dict[str, Any]:
    """Download a checkpoint into a publication root; returns ``{"save", "epoch", "step", "files", "bytes"}``.

    `save` is the folder's path below `root`: hand it, `epoch` and `step` to `publish`. The folder holds the
    checkpoint's files and, put there last, a manifest with their sizes and SHA-256. An interrupted download goes on
    where it stopped.
    """
    labels = RunLabels.of_current_run("export")
    digest = root_digest(root)
    attempt = hashlib.sha256(f"{labels.flow_run_id}|export|{digest}".encode()).hexdigest()[:12]
    block = await load_credentials(credentials)
    async with connected(credentials) as client:
        checkpoint = await _listed(client, job_id, checkpoint_id)
    # An epoch is claimed once per flow run and root: a claim per retry would only burn numbers.
    epoch = await labels.remember(f"epoch.{digest}", await asyncio.to_thread(_claim_epoch, root, attempt, labels))
    save = f"exec/{attempt}-e{epoch}/{safe_relative(checkpoint_id)}"
    size, files = await asyncio.to_thread(_download, block, checkpoint, job_id, root, save)
    get_run_logger().info("checkpoint %s is in %s/%s: %d files, %d bytes", checkpoint_id, root, save, files, size)
    return {"save": save, "epoch": epoch, "step": int(checkpoint["global_steps"]), "files": files, "bytes": size}


async def _listed(client: AsyncCortexTrainingClient, job_id: str, checkpoint_id: str) -> Checkpoint:
    for checkpoint in await client.list_checkpoints(job_id):
        if checkpoint.get("checkpoint_id") == checkpoint_id:
            return checkpoint
    raise ProtocolError(
        f"job {job_id} lists no checkpoint {checkpoint_id}; save one first, or look at `cortex-training checkpoints`"
    )


def _claim_epoch(root: str, attempt: str, labels: RunLabels) -> int:
    from cortex_training.publication import PublicationLog

    return PublicationLog(root).claim_epoch({"attempt": attempt, "flow_run": str(labels.flow_run_id)}).number


def _download(
    credentials: CortexTrainingCredentials, checkpoint: Checkpoint, job_id: str, root: str, save: str
) -> tuple[int, int]:
    from cortex_training.publication import PosixStore, SaveManifest, download_checkpoint

    store = PosixStore(root)
    with credentials.get_client() as client:
        files = download_checkpoint(
            client,
            job_id,
            checkpoint["checkpoint_id"],
            store.locate(save),
            proxy=credentials.proxy.get_secret_value() if credentials.proxy else None,
            ca_bundle=credentials.ca_bundle,
        )
    SaveManifest(
        job_id=job_id,
        checkpoint_id=checkpoint["checkpoint_id"],
        checkpoint_type=checkpoint.get("checkpoint_type") or "weights-only",
        global_steps=int(checkpoint["global_steps"]),
        created_at=checkpoint.get("created_at"),
        files=files,
        metrics={"avg_loss": checkpoint["avg_loss"]} if isinstance(checkpoint.get("avg_loss"), int | float) else {},
    ).write(store, save)
    return sum(file.size for file in files), len(files)


async def _publish(root: str, save: str, *, epoch: int, step: int) -> str:
    """Publish the save at path `save` below `root`; returns the entry's name. A save that is published already stays as
    it is.
    """
    entry, created = await asyncio.to_thread(_create_entry, root, save, epoch, step)
    get_run_logger().info("%s %s", "published" if created else "was published already:", entry)
    return entry


def _create_entry(root: str, save: str, epoch: int, step: int) -> tuple[str, bool]:
    from cortex_training.publication import PublicationLog

    entry, created = PublicationLog(root).publish(save, epoch, step)
    return entry.name, created


save, asave = task_pair("save", retries=2)(_save)
submit_save, asubmit_save = task_pair("submit_save", retries=2, cached=False)(_submit_save)
export, aexport = task_pair("export", retries=2)(_export)
publish, apublish = task_pair("publish", retries=2)(_publish)
