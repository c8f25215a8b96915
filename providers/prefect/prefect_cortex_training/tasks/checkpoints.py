"""Checkpoints of a job: save, load, export."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from cortex_training.answers import Checkpoint
from cortex_training.errors import ProtocolError
from cortex_training.paths import safe_relative
from prefect_cortex_training.credentials import connected, load_credentials
from prefect_cortex_training.durable import always, task_pair
from prefect_cortex_training.labels import RunLabels, root_digest
from prefect_cortex_training.submission import (
    find_or_submit,
    numbers_of,
    operation_key,
    submit_again_if_lost,
    submit_once,
)

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.publication import SaveManifest, Store
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


async def _export(
    credentials: str, job_id: str, checkpoint_id: str, *, root: str, root_credentials: str | None = None
) -> dict[str, Any]:
    """Download a checkpoint into a publication root; returns ``{"save", "epoch", "step", "files", "bytes"}``.

    `save` is the folder's path below the root (a directory, or ``s3://BUCKET/PREFIX`` with `root_credentials`, a list
    ``kind:location,...``): hand it, `epoch` and `step` to `publish`. The folder holds the checkpoint's files and, put
    there last, a manifest with their sizes and SHA-256. An interrupted download goes on where it stopped.
    """
    labels = RunLabels.of_current_run("export")
    digest = root_digest(root)
    attempt = hashlib.sha256(f"{labels.flow_run_id}|export|{digest}".encode()).hexdigest()[:12]
    block = await load_credentials(credentials)
    async with connected(credentials) as client:
        checkpoint = await _listed(client, job_id, checkpoint_id)
    store = await asyncio.to_thread(_open, root, root_credentials)
    # An epoch is claimed once per flow run and root: a claim per retry would only burn numbers.
    epoch = await labels.remember(f"epoch.{digest}", await asyncio.to_thread(_claim_epoch, store, attempt, labels))
    save = f"exec/{attempt}-e{epoch}/{safe_relative(checkpoint_id)}"
    files = (await asyncio.to_thread(_download, block, checkpoint, job_id, store, save)).files
    size = sum(file.size for file in files)
    get_run_logger().info(
        "checkpoint %s is in %s: %d files, %d bytes", checkpoint_id, store.locate(save), len(files), size
    )
    return {"save": save, "epoch": epoch, "step": int(checkpoint["global_steps"]), "files": len(files), "bytes": size}


async def _listed(client: AsyncCortexTrainingClient, job_id: str, checkpoint_id: str) -> Checkpoint:
    for checkpoint in await client.list_checkpoints(job_id):
        if checkpoint.get("checkpoint_id") == checkpoint_id:
            return checkpoint
    raise ProtocolError(
        f"job {job_id} lists no checkpoint {checkpoint_id}; save one first, or look at `cortex-training checkpoints`"
    )


def _open(root: str, root_credentials: str | None) -> Store:
    from cortex_training.publication import open_store

    return open_store(root, root_credentials)


def _claim_epoch(store: Store, attempt: str, labels: RunLabels) -> int:
    from cortex_training.publication import PublicationLog

    return PublicationLog(store).claim_epoch({"attempt": attempt, "flow_run": str(labels.flow_run_id)}).number


def _download(
    credentials: CortexTrainingCredentials, checkpoint: Checkpoint, job_id: str, store: Store, save: str
) -> SaveManifest:
    from cortex_training.publication import SaveManifest, export_save

    manifest = SaveManifest(
        job_id=job_id,
        checkpoint_id=checkpoint["checkpoint_id"],
        checkpoint_type=checkpoint.get("checkpoint_type") or "weights-only",
        global_steps=int(checkpoint["global_steps"]),
        created_at=checkpoint.get("created_at"),
        metrics={"avg_loss": checkpoint["avg_loss"]} if isinstance(checkpoint.get("avg_loss"), int | float) else {},
    )
    proxy = credentials.proxy.get_secret_value() if credentials.proxy else None
    with credentials.get_client() as client:
        return export_save(client, store, save, manifest, proxy=proxy, ca_bundle=credentials.ca_bundle)


async def _load(
    credentials: str,
    job_id: str,
    checkpoint_id: str,
    *,
    source_job_id: str | None = None,
    target_sub_job_id: str | None = None,
    seq: int = 1,
    timeout_s: float = HOUR_S,
) -> dict[str, Any]:
    """Load a checkpoint into a job's training sub-job; returns ``{"request_id", "global_steps"}``.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        checkpoint_id: a ``resumable`` checkpoint.
        source_job_id: the job that saved it; None for `job_id` itself.
        target_sub_job_id: None for the first training sub-job.
        seq: number of this load among the loads of the flow run on this job.
        timeout_s: longest wait for the request.

    Loading again would undo what was trained since, so a load that may have been executed is never sent again; raises
    OutcomeUnknown when a crash hides whether it was. Gradients that wait for a step may survive a load: load before
    the first forward-backward.
    """
    labels = RunLabels.of_current_run("load")
    key = operation_key("load", job_id, seq)
    async with connected(credentials) as client:
        request_id = await submit_once(
            labels,
            key,
            job_id,
            lambda: client.load(job_id, checkpoint_id, source_job_id, target_sub_job_id=target_sub_job_id),
        )
        result = await client.poll_request(job_id, request_id, timeout_s=timeout_s)
    get_run_logger().info("checkpoint %s is loaded into job %s", checkpoint_id, job_id)
    return {"request_id": request_id, **numbers_of(result, "global_steps")}


save, asave = task_pair("save", retries=2, noted=always)(_save)
submit_save, asubmit_save = task_pair("submit_save", retries=2, cached=False)(_submit_save)
export, aexport = task_pair("export", retries=2)(_export)
load, aload = task_pair("load", retries=0, noted=always)(_load)
