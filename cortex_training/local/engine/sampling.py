"""A sampling sub-job: its own copy of the weights, and text sampled from them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cortex_training.local.engine.batch import read_batch
from cortex_training.local.engine.checkpoint_files import read_weights
from cortex_training.local.engine.language_model import LanguageModel, Weights, load_language_model
from cortex_training.local.engine.randomness import RandomStream
from cortex_training.local.engine.scoring import score
from cortex_training.local.generation_request import Prompt, SamplingParams
from cortex_training.local.job_spec import SubJobSpec
from cortex_training.local.requests import CancelledWhileRunning
from cortex_training.local.tuning import LoraSettings

_TOKENS_AT_ONCE = 16 * 1024
"""Positions, prompts and samples together, that one batch keeps keys and values for."""


@dataclass
class Sample:
    """One continuation, as it grows."""

    index: int
    """Its prompt's place in the call."""
    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    """Most tokens to add: `max_tokens`, or what the window leaves."""
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def result(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.prompt_ids),
        }


class SamplingEngine:
    """Used by one thread."""

    def __init__(self, spec: SubJobSpec, folder: Path) -> None:
        self._spec = spec
        self._model: LanguageModel = load_language_model(
            folder, dtype=spec.dtype, lora=spec.lora, random=RandomStream(spec.seed), window=spec.max_seq_len
        )
        self._model.module.eval()
        self._tokenizer = self._model.tokenizer()
        self._ends = _end_tokens(self._model.module, self._tokenizer)
        self._calls = 0
        takes = inspect.signature(type(self._plain()).forward).parameters
        # transformers renamed the argument.
        self._cache_name = "cache" if "cache" in takes else "past_key_values"

    @property
    def lora(self) -> LoraSettings | None:
        return self._model.lora

    def set_full_weights(self, weights: Weights) -> None:
        self._model.set_full_weights(weights)

    def set_adapter_weights(self, weights: Weights) -> None:
        self._model.set_adapter_weights(weights)

    def load(self, folder: Path) -> None:
        """Take a weights-only checkpoint's weights. Raises ValueError for another shape, or for an adapter alone."""
        weights, lora = read_weights(folder)
        if lora is not None:
            raise ValueError("the checkpoint holds an adapter alone; sampling starts from a weights-only checkpoint")
        self._model.set_full_weights(weights)

    def forward(self, frame: object) -> dict[str, Any]:
        """Measure a batch, as a log_probability sub-job does."""
        return score(
            self._model, read_batch(frame, vocabulary=self._model.vocabulary, max_seq_len=self._spec.max_seq_len)
        )

    def generate(self, prompts: Sequence[Prompt], stopped: Callable[[], bool]) -> list[dict[str, Any]]:
        """Continue each prompt; `stopped` is asked before every token.

        Raises ValueError when a prompt leaves no room in the window, naming its index; CancelledWhileRunning when told
        to stop.
        """
        results: dict[int, dict[str, Any]] = {}

        def refuse(_: int, problem: str) -> None:
            raise ValueError(problem)

        self.sample(prompts, stopped, results.__setitem__, refuse)
        return [results[index] for index in range(len(prompts))]

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Prompt],
        stopped: Callable[[], bool],
        finished: Callable[[int, dict[str, Any]], None],
        refused: Callable[[int, str], None],
    ) -> None:
        """Continue each prompt and hand over each result as soon as it is there, with the prompt's index.

        A prompt that leaves no room in the window is `refused`, the others go on. Raises CancelledWhileRunning.
        """
        self._calls += 1
        samples = []
        for index, prompt in enumerate(prompts):
            try:
                samples.append(self._begin(index, prompt))
            except ValueError as error:
                refused(index, str(error))
        for batch in _batches(samples):
            self._continue(batch, stopped, finished)

    @staticmethod
    def as_tensors(result: dict[str, Any]) -> dict[str, Any]:
        """A result as a DSSST1 frame carries it best: ids int64 [tokens], log-probabilities float32 [tokens]."""
        return {
            **result,
            "token_ids": torch.tensor(result["token_ids"], dtype=torch.int64),
            "logprobs": torch.tensor(result["logprobs"], dtype=torch.float32),
        }

    def _begin(self, index: int, prompt: Prompt) -> Sample:
        ids = list(prompt.token_ids) if prompt.token_ids is not None else list(self._tokenizer.encode(prompt.text))
        window, vocabulary = self._spec.max_seq_len, self._model.vocabulary
        if len(ids) >= window:
            raise ValueError(f"prompts[{index}]: {len(ids)} tokens leave no room in the window of {window}")
        if not ids or max(ids) >= vocabulary:
            raise ValueError(
                f"prompts[{index}]: token {max(ids, default=None)} is outside the vocabulary of {vocabulary}"
            )
        # Without a seed of its own a sample follows from the job's seed and its place in the job, so that a run
        # repeats.
        seed = prompt.params.seed
        origin = f"{self._spec.seed}/{self._calls}/{index}" if seed is None else f"{seed}"
        digest = hashlib.sha256(origin.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return Sample(index, ids, prompt.params, min(prompt.params.max_tokens, window - len(ids)), generator)

    def _continue(
        self, samples: list[Sample], stopped: Callable[[], bool], finished: Callable[[int, dict[str, Any]], None]
    ) -> None:
        """Sample a batch to its end: prompts padded on the left, then one column of tokens at a time."""
        longest = max(len(sample.prompt_ids) for sample in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.long)
        mask = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, sample in enumerate(samples):
            ids[row, longest - len(sample.prompt_ids) :] = torch.tensor(sample.prompt_ids)
            mask[row, longest - len(sample.prompt_ids) :] = 1
        device = self._model.device
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        cache: Any = None
        running = list(samples)
        while running:
            if stopped():
                raise CancelledWhileRunning
            output = self._model.module(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
            cache = getattr(output, self._cache_name)
            # Drawing is done on the CPU, so that a seed means the same with a GPU and without one.
            logits = output.logits[:, -1].float().cpu()
            for row, sample in enumerate(running):
                self._extend(sample, logits[row])
                if sample.finish_reason is not None:
                    finished(sample.index, sample.result())
            kept = [row for row, sample in enumerate(running) if sample.finish_reason is None]
            if len(kept) < len(running):
                running = [running[row] for row in kept]
                if not running:
                    return
                chosen = torch.tensor(kept, device=device)
                cache.batch_select_indices(chosen)
                mask, positions = mask[chosen], positions[chosen]
            ids = torch.tensor([[sample.token_ids[-1]] for sample in running], device=device)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions[:, -1:] + 1

    def _extend(self, sample: Sample, logits: torch.Tensor) -> None:
        """Add one token. Its log-probability is the model's own, before temperature, top_p and top_k."""
        params = sample.params
        logprobs = torch.log_softmax(logits, dim=-1)
        if len(sample.token_ids) < params.min_tokens:
            logits = logits.clone()
            logits[[*self._ends, *(one for one in params.stop_token_ids if one < logits.shape[-1])]] = float("-inf")
        token = _draw(logits, params, sample.generator)
        sample.token_ids.append(token)
        sample.logprobs.append(float(logprobs[token]))
        if token in params.stop_token_ids or (token in self._ends and not params.ignore_eos):
            sample.finish_reason = "stop"
            sample.text = self._text(sample.token_ids[:-1])
            return
        for sequence in params.stop_sequences:
            if tuple(sample.token_ids[-len(sequence) :]) == sequence:
                sample.finish_reason, sample.text = "stop", self._text(sample.token_ids[: -len(sequence)])
                return
        if params.stop:
            text = self._text(sample.token_ids)
            cut = min((text.find(stop) for stop in params.stop if stop in text), default=None)
            if cut is not None:
                sample.finish_reason, sample.text = "stop", text[:cut]
                return
        if len(sample.token_ids) >= sample.limit:
            sample.finish_reason, sample.text = "length", self._text(sample.token_ids)

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _plain(self) -> Any:
        return self._model.module if self._model.lora is None else self._model.module.get_base_model()


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / params.temperature, dim=-1)
    if params.top_k and params.top_k < probabilities.numel():
        least = probabilities.topk(params.top_k).values[-1]
        probabilities = torch.where(probabilities < least, 0.0, probabilities)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        # The likeliest token always stays: what comes before it has probability 0.
        dropped = ordered.cumsum(dim=0) - ordered >= params.top_p * ordered.sum()
        probabilities = probabilities.index_fill(0, order[dropped], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _batches(samples: list[Sample]) -> list[list[Sample]]:
    """Neighbours together, as many as the cache has room for."""
    batches: list[list[Sample]] = [[]]
    longest = 0
    for sample in samples:
        longest = max(longest, len(sample.prompt_ids) + sample.limit)
        if batches[-1] and longest * (len(batches[-1]) + 1) > _TOKENS_AT_ONCE:
            batches.append([])
            longest = len(sample.prompt_ids) + sample.limit
        batches[-1].append(sample)
    return batches


def _end_tokens(module: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text, as the model's generation settings and the tokenizer name them."""
    named = getattr(module.generation_config, "eos_token_id", None)
    ends = set(named) if isinstance(named, list) else {named}
    ends.add(tokenizer.eos_token_id)
    return {int(token) for token in ends if token is not None}
