"""generate and generate-stream: the calls that a sampling sub-job answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from cortex_training.local.chunks import Chunk
from cortex_training.local.generation_request import Prompt, read_generation_request
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.operations import Operations, Outcome, aside, decoded
from cortex_training.local.refusals import Refusal
from cortex_training.local.requests import Delivery, Execution, deliver

_WHOLE = 1 << 62
"""A chunk size that no event's result reaches: events are delivered whole."""


class Generation:
    """Both calls take a DSSST1 frame, whole or in chunks, or the same object as JSON."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def generate(self, job: Job, body: bytes) -> dict[str, Any]:
        return await self._submit(job, body, stream=False)

    async def generate_stream(self, job: Job, body: bytes) -> dict[str, Any]:
        """The results come as events, each when it is there, in polls that take them away."""
        return await self._submit(job, body, stream=True)

    async def _submit(self, job: Job, body: bytes, *, stream: bool) -> dict[str, Any]:
        job.require_running("generate")
        candidates = [sub_job for sub_job in job.sub_jobs if sub_job.spec.kind == "sampling"]
        if not candidates:
            raise Refusal(400, f"job {job.job_id} has no sampling sub-job")
        if _is_json_object(body):
            value = await aside(len(body), lambda: _decode_json(body))
            return self._start(job, candidates, value, Delivery(), None, stream)[1]

        async def start(frame: bytes, delivery: Delivery, chunk: Chunk | None) -> tuple[Execution, dict[str, Any]]:
            value, sha256 = await decoded(frame, chunk, self._operations.settings.framework)
            return self._start(job, candidates, value, delivery, sha256, stream)

        return await self._operations.submit_framed(job, candidates[0], body, start)

    def _start(
        self, job: Job, candidates: Sequence[SubJob], value: Any, delivery: Delivery, sha256: str | None, stream: bool
    ) -> tuple[Execution, dict[str, Any]]:
        prompts = read_generation_request(value)
        job.require_running("generate")
        sub_job = _routed(candidates, value.get("routing_key"))
        sub_job.sample_ids.update(prompt.params.sample_id for prompt in prompts if prompt.params.sample_id)
        operation = "generate-stream" if stream else "generate"
        execution = Execution(
            operation, job.job_id, sub_job.sub_job_id, delivery, frame_sha256=sha256, streaming=stream
        )
        work = _streaming(job, sub_job, execution, prompts) if stream else _whole(job, sub_job, execution, prompts)
        reply = self._operations.submit(job, sub_job, execution, work)
        return execution, {**reply, "count": len(prompts)} if stream else reply


def _whole(job: Job, sub_job: SubJob, execution: Execution, prompts: Sequence[Prompt]) -> Any:
    engine = sub_job.engine

    def work() -> Outcome:
        results = engine.generate(prompts, execution.stop.is_set)
        if execution.delivery.framed:
            results = [engine.as_tensors(result) for result in results]
        return Outcome({"job_id": job.job_id, "results": results}, {"prompts": len(prompts)})

    return work


def _streaming(job: Job, sub_job: SubJob, execution: Execution, prompts: Sequence[Prompt]) -> Any:
    engine, loop = sub_job.engine, asyncio.get_running_loop()
    framed = Delivery(framed=execution.delivery.framed)
    # The result itself is small: what was sampled is in the events.
    execution.delivery = Delivery()

    def tell(event: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(execution.events.append, event)

    def work() -> Outcome:
        failed = 0

        def finished(index: int, result: dict[str, Any]) -> None:
            carried = engine.as_tensors(result) if framed.framed else result
            tell({"type": "result", "index": index, "result": deliver(carried, framed, chunk_bytes=_WHOLE)[0]})

        def refused(index: int, problem: str) -> None:
            nonlocal failed
            failed += 1
            tell({"type": "error", "index": index, "error": problem})

        engine.sample(prompts, execution.stop.is_set, finished, refused)
        counts = {"completed": len(prompts) - failed, "failed": failed}
        tell({"type": "done", **counts})
        return Outcome({"job_id": job.job_id, **counts}, {"prompts": len(prompts)})

    return work


def _routed(candidates: Sequence[SubJob], routing_key: object) -> SubJob:
    """The sub-job that a routing key always reaches. A call whose prompts have different keys stays together."""
    if not isinstance(routing_key, str):
        return candidates[0]
    digest = hashlib.sha256(routing_key.encode(errors="surrogatepass")).digest()
    return candidates[int.from_bytes(digest[:8], "big") % len(candidates)]


def _is_json_object(body: bytes) -> bool:
    """Tell JSON from a frame, whose first eight bytes are a length and whose header begins after them."""
    return body[:64].lstrip()[:1] == b"{" and body[8:9] != b"{"


def _decode_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
