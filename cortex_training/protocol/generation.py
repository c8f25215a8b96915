"""Generate: prompts checked before anything is sent, then one frame (or, for a stream, one JSON body)."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from cortex_training import wire
from cortex_training.answers import Accepted
from cortex_training.config import JobType, canonical_job_type
from cortex_training.errors import ConfigurationError, CortexTrainingError, NotFoundError
from cortex_training.protocol import calls
from cortex_training.protocol.calls import Permit
from cortex_training.protocol.chunks import MAX_REQUEST_BYTES, ChunkedCall, send_chunks
from cortex_training.protocol.context import Context
from cortex_training.protocol.exchange import exchange_json, required_text
from cortex_training.protocol.jobs import get_job
from cortex_training.protocol.messages import Flow, Kind, computed

_log = logging.getLogger("cortex_training")

RESPONSE_OPTIONS = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
_WINDOW_LOOKUP_S = 10.0
_BYTES_PER_TOKEN = 8

Prompts = Sequence[str | Sequence[int]]


def generate(
    context: Context,
    job_id: str,
    prompts: Prompts,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    routing_key: str | Sequence[str | None] | None = None,
    strict: bool | None = None,
    *,
    permit: Permit = None,
) -> Flow[str]:
    body = yield from _checked_body(context, job_id, prompts, sampling_params, routing_key, strict)
    if context.policy.token_prompts == "tensor":
        body["prompts"] = [prompt if isinstance(prompt, str) else _packed(prompt) for prompt in body["prompts"]]
    frame = yield from computed(lambda: _frame(body), _size(body["prompts"]))
    path = f"{calls.job_path(job_id)}/generate"
    if len(frame) > MAX_REQUEST_BYTES:
        # Only a forward-backward's group id makes the service run a group once; here the last chunk starts a new run.
        group = str(uuid.uuid4())
        call = ChunkedCall(path, "generate", job_id, memoryview(frame), group, Kind.AT_MOST_ONCE, permit)
        return (yield from send_chunks(context, call))
    request = calls.post_frame(context, path, "generate", frame, Kind.AT_MOST_ONCE, job_id=job_id, permit=permit)
    reply = yield from exchange_json(context, request)
    request_id = required_text(request, reply, "request_id")
    context.remember_request(job_id, request_id, "generate")
    return request_id


def generate_stream(
    context: Context,
    job_id: str,
    prompts: Prompts,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    routing_key: str | Sequence[str | None] | None = None,
    strict: bool | None = None,
    *,
    permit: Permit = None,
) -> Flow[Accepted]:
    body = yield from _checked_body(context, job_id, prompts, sampling_params, routing_key, strict)
    data = yield from computed(lambda: calls.json_bytes("generate_stream", body), _size(body["prompts"]))
    if len(data) > MAX_REQUEST_BYTES:
        raise ConfigurationError(
            f"prompts: the request has {len(data)} bytes and a stream is never cut into chunks (limit "
            f"{MAX_REQUEST_BYTES}); send fewer prompts, or use generate",
            field="prompts",
        )
    path = f"{calls.job_path(job_id)}/generate-stream"
    request = calls.post_frame(context, path, "generate-stream", data, Kind.AT_MOST_ONCE, job_id=job_id, permit=permit)
    reply = yield from exchange_json(context, request)
    context.remember_request(job_id, required_text(request, reply, "request_id"), "generate-stream")
    return cast(Accepted, reply)


def _size(prompts: Sequence[Any]) -> int:
    return sum(len(prompt) if isinstance(prompt, str) else _BYTES_PER_TOKEN * len(prompt) for prompt in prompts)


def _frame(body: dict[str, Any]) -> bytes:
    try:
        return wire.dumps(body, metadata=RESPONSE_OPTIONS)
    except wire.WireError as error:
        raise ConfigurationError(
            f"generate: the request cannot be written as a frame: {error}. Token prompts take a tenth of the room with "
            "token_prompts='tensor'."
        ) from None


def _packed(tokens: Sequence[int]) -> Any:
    import numpy as np

    return np.asarray(tokens, dtype=np.int32 if max(tokens) < 2**31 else np.int64)


def _checked_body(
    context: Context, job_id: str, prompts: object, sampling_params: object, routing_key: object, strict: object
) -> Flow[dict[str, Any]]:
    checked = checked_prompts(prompts)
    body: dict[str, Any] = {"prompts": checked}
    if sampling_params is not None:
        body["sampling_params"] = _aligned("sampling_params", sampling_params, Mapping, "object", len(checked))
    if routing_key is not None:
        body["routing_key"] = _aligned("routing_key", routing_key, str, "string", len(checked))
    if strict is not None:
        if not isinstance(strict, bool):
            raise ConfigurationError.of("strict", strict, "must be True, False or left out")
        body["strict"] = strict
    if any(not isinstance(prompt, str) for prompt in checked):
        yield from _check_window(context, job_id, checked)
    return body


def checked_prompts(prompts: object) -> list[str | list[int]]:
    """`prompts` as strings and lists of token ids. Raises `ConfigurationError` naming the prompt and the fix."""
    if isinstance(prompts, str):
        raise ConfigurationError.of("prompts", prompts, "must be a list of prompts; a single one is [prompt]")
    if isinstance(prompts, bytes | Mapping) or not hasattr(prompts, "__iter__") or not hasattr(prompts, "__len__"):
        raise ConfigurationError.of("prompts", prompts, "must be a list of strings and lists of token ids")
    listed = list(prompts)
    if not listed:
        raise ConfigurationError.of("prompts", [], "must hold at least one prompt")
    if all(_is_token(entry) for entry in listed):
        raise ConfigurationError.of(
            "prompts", prompts, "must be a list of prompts; one tokenized prompt is [[1, 2, 3]]"
        )
    return [
        prompt if isinstance(prompt, str) else _token_ids(f"prompts[{i}]", prompt) for i, prompt in enumerate(listed)
    ]


def _is_token(value: object) -> bool:
    return isinstance(value, int) or type(value).__name__ in ("int64", "int32", "uint32", "uint64")


def _token_ids(field: str, prompt: object) -> list[int]:
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(tokens, bytes | Mapping) or not isinstance(tokens, Sequence):
        raise ConfigurationError.of(field, prompt, "must be a string or a list of token ids")
    if not tokens:
        raise ConfigurationError.of(field, prompt, "must hold at least one token id")
    ids = [token.item() if type(token).__module__ == "numpy" else token for token in tokens]
    for position, token in enumerate(ids):
        if type(token) is not int or token < 0:
            raise ConfigurationError.of(f"{field}[{position}]", token, "must be an integer token id")
    return ids


def _aligned(field: str, value: object, element: type, noun: str, count: int) -> Any:
    """`value` for all prompts, or a list that says something for each of them."""
    if isinstance(value, element):
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise ConfigurationError.of(field, value, f"must be one {noun}, or a list with one {noun} or None per prompt")
    if len(value) != count:
        raise ConfigurationError.of(field, value, f"has {len(value)} entries for {count} prompts")
    for index, entry in enumerate(value):
        if entry is not None and not isinstance(entry, element):
            raise ConfigurationError.of(f"{field}[{index}]", entry, f"must be a {noun} or None")
    return list(value)


def _check_window(context: Context, job_id: str, prompts: list[str | list[int]]) -> Flow[None]:
    window = yield from _window(context, job_id)
    if window is None:
        return
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and len(prompt) >= window:
            raise ConfigurationError(
                f"prompts[{index}]: {len(prompt)} tokens leave no room for an answer in the window of {window} "
                f"(max_seq_len); at most {window - 1} fit",
                field=f"prompts[{index}]",
            )


def _window(context: Context, job_id: str) -> Flow[int | None]:
    """`max_seq_len` of the job's sampling sub-jobs, asked once per job; None when it cannot be known."""
    known = context.windows.get(job_id)
    if known is not None:
        return known[0]
    try:
        job = yield from get_job(context, job_id, deadline=context.clock() + _WINDOW_LOOKUP_S)
    except NotFoundError:
        raise
    except CortexTrainingError as error:
        # The check is a courtesy; the service decides. Not knowing the window is no reason to refuse.
        _log.warning("prompt lengths of job %s are not checked before sending: %s", job_id, error)
        return None
    window = sampling_window(job)
    context.windows.put(job_id, (window,))
    return window


def sampling_window(job: Mapping[str, Any]) -> int | None:
    """The smallest `max_seq_len` among a job's sampling sub-jobs; log-probability sub-jobs have a window of their
    own.
    """
    sizes: list[int] = []
    sub_jobs = job.get("sub_jobs")
    for sub_job in sub_jobs if isinstance(sub_jobs, list) else []:
        if not isinstance(sub_job, Mapping) or canonical_job_type(sub_job.get("job_type")) != JobType.SAMPLING:
            continue
        config = sub_job.get("inference_config")
        size = config.get("max_seq_len") if isinstance(config, Mapping) else None
        if isinstance(size, str) and size.strip().isdigit():
            size = int(size)
        if isinstance(size, int | float) and not isinstance(size, bool) and math.isfinite(size) and size > 0:
            sizes.append(int(size))
    return min(sizes, default=None)
