"""What a generate call asks for, checked before anything is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cortex_training.local.refusals import Refusal, bad_field

MAX_PROMPTS = 4096
_DEFAULT_MAX_TOKENS = 16
KNOWN_PARAMS = {
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
    "logprobs", "n", "dss_sample_id", "dss_stop_token_sequences",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued; the names are the service's own."""

    max_tokens: int = _DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the sample; they are not part of its text."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end the sample (`dss_stop_token_sequences`); they are part of its tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sample_id: str | None = None
    """The caller's name for the sample (`dss_sample_id`), by which router replay would find it."""


@dataclass(frozen=True)
class Prompt:
    """Text, or token ids when `token_ids` is not None."""

    text: str
    token_ids: tuple[int, ...] | None
    params: SamplingParams


def read_generation_request(value: object) -> list[Prompt]:
    """Read `prompts`, `sampling_params`, `routing_key` and `strict`. Raises Refusal (400) naming what is wrong."""
    if not isinstance(value, dict):
        raise bad_field("body", type(value).__name__, "must be an object with prompts")
    prompts = value.get("prompts")
    if not isinstance(prompts, list | tuple) or not 0 < len(prompts) <= MAX_PROMPTS:
        count = len(prompts) if isinstance(prompts, list | tuple) else prompts
        raise bad_field("prompts", count, f"must be a list of 1 to {MAX_PROMPTS} texts or lists of token ids")
    if all(isinstance(prompt, int) and not isinstance(prompt, bool) for prompt in prompts):
        raise bad_field(
            "prompts", list(prompts[:8]), "must be a list of prompts; one prompt of token ids is [[1, 2, 3]]"
        )
    params = _aligned("sampling_params", value.get("sampling_params"), len(prompts))
    for routing_key in _aligned("routing_key", value.get("routing_key"), len(prompts)):
        if routing_key is not None and not isinstance(routing_key, str):
            raise bad_field("routing_key", routing_key, "must be a text or null")
    if value.get("strict") is not None and not isinstance(value["strict"], bool):
        raise bad_field("strict", value["strict"], "must be true or false")
    return [
        _read_prompt(f"prompts.{index}", prompt, _read_params(f"sampling_params.{index}", params[index]))
        for index, prompt in enumerate(prompts)
    ]


def _aligned(name: str, value: object, count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise Refusal(400, f"{name}: {len(value)} values for {count} prompts; give one for all, or one each")
    return list(value)


def _read_prompt(where: str, prompt: object, params: SamplingParams) -> Prompt:
    if isinstance(prompt, str):
        if not prompt:
            raise bad_field(where, prompt, "must not be empty")
        return Prompt(prompt, None, params)
    if hasattr(prompt, "tolist") and hasattr(prompt, "dtype"):
        prompt = prompt.tolist()
    if not isinstance(prompt, list | tuple) or not prompt:
        raise bad_field(where, prompt, "must be a text or a list of token ids, and not empty")
    for position, token in enumerate(prompt):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise bad_field(f"{where}.{position}", token, "must be a token id")
    return Prompt("", tuple(prompt), params)


def _read_params(where: str, value: object) -> SamplingParams:
    if value is None:
        return SamplingParams()
    if not isinstance(value, dict):
        raise bad_field(where, value, "must be an object or null")
    unknown = sorted(set(value) - KNOWN_PARAMS, key=str)
    if unknown:
        raise Refusal(400, f"{where}: unknown parameter {unknown[0]!r}; there are {', '.join(sorted(KNOWN_PARAMS))}")
    if value.get("n") not in (None, 1):
        raise bad_field(f"{where}.n", value["n"], "must be 1; repeat the prompt for more samples")
    stop = value.get("stop")
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise bad_field(f"{where}.stop", stop, "must be a text or a list of texts, none empty")
    stop_ids: Any = value.get("stop_token_ids")
    if hasattr(stop_ids, "tolist"):
        stop_ids = stop_ids.tolist()
    stop_ids = [] if stop_ids is None else stop_ids
    if not isinstance(stop_ids, list | tuple) or not all(
        isinstance(one, int) and not isinstance(one, bool) for one in stop_ids
    ):
        raise bad_field(f"{where}.stop_token_ids", stop_ids, "must be a list of token ids")
    sample_id = value.get("dss_sample_id")
    if sample_id is not None and not isinstance(sample_id, str):
        raise bad_field(f"{where}.dss_sample_id", sample_id, "must be a text or null")
    seed = value.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise bad_field(f"{where}.seed", seed, "must be a whole number or null")
    return SamplingParams(
        max_tokens=_integer(f"{where}.max_tokens", value.get("max_tokens"), _DEFAULT_MAX_TOKENS, 1),
        min_tokens=_integer(f"{where}.min_tokens", value.get("min_tokens"), 0, 0),
        temperature=_number(f"{where}.temperature", value.get("temperature"), 1.0, 0.0, 100.0),
        top_p=_number(f"{where}.top_p", value.get("top_p"), 1.0, 1e-9, 1.0),
        top_k=max(0, _integer(f"{where}.top_k", value.get("top_k"), 0, -1)),
        seed=seed,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(value.get("ignore_eos", False)),
        stop_sequences=_token_sequences(f"{where}.dss_stop_token_sequences", value.get("dss_stop_token_sequences")),
        sample_id=sample_id,
    )


def _token_sequences(where: str, value: object) -> tuple[tuple[int, ...], ...]:
    sequences = [] if value is None else value
    if not isinstance(sequences, list | tuple):
        raise bad_field(where, sequences, "must be a list of lists of token ids")
    for sequence in sequences:
        whole = isinstance(sequence, list | tuple) and sequence
        if not whole or not all(isinstance(one, int) and not isinstance(one, bool) for one in sequence):
            raise bad_field(where, sequence, "must be lists of token ids, none empty")
    return tuple(tuple(sequence) for sequence in sequences)


def _integer(name: str, value: object, default: int, least: int) -> int:
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise bad_field(name, value, f"must be a whole number of at least {least}")
    return value


def _number(name: str, value: object, default: float, least: float, most: float) -> float:
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise bad_field(name, value, f"must be a number from {least:g} to {most:g}")
    return float(value)
