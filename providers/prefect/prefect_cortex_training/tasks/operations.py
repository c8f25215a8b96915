"""Single operations on a running job. One task is one remote effect; a rerun finds it instead of repeating it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid5

from prefect.logging import get_run_logger

from cortex_training.errors import ConfigurationError, NotFoundError, OutcomeUnknown, ProtocolError, RequestFailed
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.durable import always, task_pair
from prefect_cortex_training.labels import RunLabels
from prefect_cortex_training.lineage import files_asset, remember_source
from prefect_cortex_training.settling import settle_step
from prefect_cortex_training.submission import (
    find_or_submit,
    numbers_of,
    operation_key,
    submit_again_if_lost,
    submit_once,
)

HOUR_S = 3_600.0


async def _forward_backward(
    credentials: str,
    job_id: str,
    dataset: str,
    *,
    step: int,
    micro_batch: int = 0,
    micro_batch_size: int,
    micro_batches_per_step: int = 1,
    seed: int = 0,
    timeout_s: float = HOUR_S,
) -> dict[str, Any]:
    """Add the gradients of one micro-batch of a dataset; returns ``{"request_id", "avg_loss"}``.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        dataset: path of a dataset's ``manifest.json``.
        step, micro_batch: which micro-batch; steps count from 1, micro-batches from 0. They are the operation's number.
        micro_batch_size: packed sequences in the micro-batch.
        micro_batches_per_step, seed: as in the other calls on this dataset, or batches overlap.
        timeout_s: longest wait for the request.

    The group id follows from the flow run and the micro-batch: whoever executes the flow run, even two processes at
    once, sends the same group, and the service runs it once. A request that the service confirms as failed is noted in
    the flow run's labels; the next run of the task uses the next group id.
    """
    frame = await asyncio.to_thread(_frame, dataset, step, micro_batch, micro_batch_size, micro_batches_per_step, seed)
    labels = RunLabels.of_current_run("forward_backward")
    key = f"forward_backward.{job_id}.{step}.{micro_batch}"
    known = await labels.read()
    failed = sum(name.startswith(f"{key}.failed.") for name in known)
    if f"asset.{job_id}" not in known:
        await remember_source(labels, job_id, files_asset(dataset.removesuffix("/manifest.json")))
    group_id = str(uuid5(labels.flow_run_id, f"{key}.{failed}"))
    async with connected(credentials) as client:
        request_id = await client.forward_backward(job_id, frame, chunk_group_id=group_id)
        try:
            result = await client.poll_request(job_id, request_id, timeout_s=timeout_s)
        except RequestFailed:
            # Whoever else sees this failure writes the same label, so one failure counts once.
            await labels.write({f"{key}.failed.{failed}": True})
            raise
    return {"request_id": request_id, **numbers_of(result, "avg_loss")}


def _frame(
    dataset: str, step: int, micro_batch: int, micro_batch_size: int, micro_batches_per_step: int, seed: int
) -> bytes:
    from cortex_training.datasets import Dataset

    # Sizes are checked, hashes were when the dataset was built: reading all shards for each micro-batch would cost
    # more than it tells.
    batches = Dataset.open(dataset, verify=False).batches(micro_batch_size, micro_batches_per_step, seed)
    return batches.frame(step, micro_batch)


async def _step(
    credentials: str,
    job_id: str,
    *,
    seq: int,
    expected_global_step: int,
    learning_rate: float | None = None,
    timeout_s: float = HOUR_S,
) -> dict[str, Any]:
    """Take one optimizer step; returns ``{"request_id", "global_steps", "last_lr"}``.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        seq: number of this step among the steps of the flow run on this job; two calls with one number are one step.
        expected_global_step: the service's ``global_steps`` after this step.
        learning_rate: None uses the job's own.
        timeout_s: longest wait for the request.

    A step that may have been executed is never sent again: the intent is written into the flow run's labels before the
    request, the request's id after it, and a rerun waits for that request. When a crash fell between the two, or the
    service does not know the request, a save settles it: its ``global_steps`` tell whether the step was executed. If
    it was not it may still be, so this job must not be used any more: raises OutcomeUnknown, which names the
    checkpoint to go on from in a new one. Raises ProtocolError when the service counts other steps than expected (its
    weights are then not the ones this flow run made).
    """
    labels = RunLabels.of_current_run("step")
    key = operation_key("step", job_id, seq)
    async with connected(credentials) as client:
        try:
            request_id = await submit_once(labels, key, job_id, lambda: client.step(job_id, learning_rate))
            result = await client.poll_request(job_id, request_id, timeout_s=timeout_s)
        except (NotFoundError, OutcomeUnknown) as unknown:
            settled = await settle_step(client, labels, key, job_id, expected_global_step, timeout_s, unknown)
            request_id, result = settled
    counted = result.get("global_steps")
    if counted != expected_global_step:
        raise ProtocolError(
            f"step {seq} of job {job_id} was answered global_steps={counted!r}, expected {expected_global_step}: a "
            "step was executed twice or elsewhere. Cancel the job and go on from its last good checkpoint in a new one"
        )
    return {"request_id": request_id, **numbers_of(result, "global_steps", "last_lr")}


async def _weight_sync(
    credentials: str,
    job_id: str,
    *,
    seq: int = 1,
    weight_format: str | None = None,
    source_sub_job_id: str | None = None,
    target_sub_job_ids: list[str] | None = None,
    timeout_s: float = HOUR_S,
) -> dict[str, Any]:
    """Copy the training sub-job's weights to sampling sub-jobs; returns ``{"request_id"}``.

    Without ids the first training sub-job is copied to the first sampling sub-job. `weight_format` ``"lora"`` copies
    adapters only. `seq` numbers the syncs of a flow run on this job.
    """
    source = source_sub_job_id or f"{job_id}:training:0"
    targets = target_sub_job_ids or [f"{job_id}:sampling:0"]
    labels = RunLabels.of_current_run("weight_sync")
    async with connected(credentials) as client:
        request_id, _ = await submit_again_if_lost(
            client,
            labels,
            operation_key("weight_sync", job_id, seq),
            job_id,
            lambda: client.weight_sync(job_id, source, targets, weight_format=weight_format),
            timeout_s,
        )
    return {"request_id": request_id}


async def _submit_weight_sync(
    credentials: str,
    job_id: str,
    *,
    seq: int = 1,
    weight_format: str | None = None,
    source_sub_job_id: str | None = None,
    target_sub_job_ids: list[str] | None = None,
) -> str:
    """Begin a weight sync without waiting for it; returns the request's id, for `await_remote`. Arguments are those of
    `weight_sync`, which finds it under the same `seq`.
    """
    source = source_sub_job_id or f"{job_id}:training:0"
    targets = target_sub_job_ids or [f"{job_id}:sampling:0"]
    labels = RunLabels.of_current_run("submit_weight_sync")
    async with connected(credentials) as client:
        return await find_or_submit(
            client,
            labels,
            operation_key("weight_sync", job_id, seq),
            job_id,
            lambda: client.weight_sync(job_id, source, targets, weight_format=weight_format),
        )


async def _submit_generate(
    credentials: str,
    job_id: str,
    prompts: list[str] | list[list[int]],
    *,
    seq: int,
    sampling_params: dict[str, Any] | None = None,
    routing_key: str | None = None,
) -> str:
    """Ask for completions without waiting for them; returns the request's id, for `await_remote`. `generate` with the
    same `seq` then writes them.
    """
    labels = RunLabels.of_current_run("submit_generate")
    async with connected(credentials) as client:
        return await find_or_submit(
            client,
            labels,
            operation_key("generate", job_id, seq),
            job_id,
            lambda: client.generate(job_id, prompts, sampling_params, routing_key),
        )


async def _generate(
    credentials: str,
    job_id: str,
    prompts: list[str] | list[list[int]],
    *,
    out: str,
    seq: int,
    sampling_params: dict[str, Any] | None = None,
    routing_key: str | None = None,
    timeout_s: float = HOUR_S,
) -> dict[str, Any]:
    """Complete `prompts` with the sampling sub-job's weights; writes them to `out`, returns ``{"request_id", "count",
    "path"}``.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        prompts: texts, or lists of token ids.
        out: JSON file to write: a list of ``{"prompt", "text", "token_ids", "finish_reason"}``. Its folder must exist.
        seq: number of this call among the calls of the flow run on this job.
        sampling_params, routing_key: as the service has them.
        timeout_s: longest wait for the request.

    Completions go to a file, because what a task returns is stored beside Prefect's own records.
    """
    target = Path(out)
    if not target.parent.is_dir():
        raise ConfigurationError.of("out", out, f"its folder {target.parent} does not exist; create it first")
    labels = RunLabels.of_current_run("generate")
    async with connected(credentials) as client:
        request_id, result = await submit_again_if_lost(
            client,
            labels,
            operation_key("generate", job_id, seq),
            job_id,
            lambda: client.generate(job_id, prompts, sampling_params, routing_key),
            timeout_s,
        )
    results: list[Mapping[str, Any]] = list(result.get("results") or [])
    if len(results) != len(prompts):
        raise ProtocolError(
            f"generate on job {job_id}: {len(prompts)} prompts were answered with {len(results)} results"
        )
    kept = ("text", "token_ids", "finish_reason")
    completions = [
        {"prompt": prompt, **{name: completion[name] for name in kept if name in completion}}
        for prompt, completion in zip(prompts, results, strict=True)
    ]
    text = json.dumps(completions, ensure_ascii=False, indent=1)
    await asyncio.to_thread(_write_durably, target, text.encode())
    get_run_logger().info("%d completions of job %s are in %s", len(completions), job_id, out)
    return {"request_id": request_id, "count": len(completions), "path": str(target)}


def _is_written(result: Mapping[str, Any]) -> bool:
    """Whether the completions are still where they were written."""
    return Path(result["path"]).is_file()


def _write_durably(path: Path, data: bytes) -> None:
    """On return the file survives a power failure: the task's result, stored next, says that it is there."""
    from cortex_training.publication import durable

    durable.replace_whole(str(path), data)
    durable.sync_folder(str(path.parent))


forward_backward, aforward_backward = task_pair("forward_backward", retries=2, noted=always)(_forward_backward)
step, astep = task_pair("step", retries=0, noted=always)(_step)
weight_sync, aweight_sync = task_pair("weight_sync", retries=2, noted=always)(_weight_sync)
generate, agenerate = task_pair("generate", retries=2, noted=_is_written)(_generate)
submit_weight_sync, asubmit_weight_sync = task_pair("submit_weight_sync", retries=2, cached=False)(_submit_weight_sync)
submit_generate, asubmit_generate = task_pair("submit_generate", retries=2, cached=False)(_submit_generate)
