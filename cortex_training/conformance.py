"""What a service does where nobody outside knows: one small paid job that asks each open question.

The answers have the names of the local service's switches (`cortex-training serve --assume QUESTION=ANSWER`), so a
deployment's behaviour, once asked, can be rehearsed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from cortex_training import identity, wire
from cortex_training.client import CortexTrainingClient
from cortex_training.config import SubJobConfig
from cortex_training.errors import (
    ApiError,
    ChunkGroupConflictError,
    ConfigurationError,
    CortexTrainingError,
    NotFoundError,
    RequestFailed,
)
from cortex_training.protocol.results import checkpoint_id
from cortex_training.states import is_terminal_job

_ROWS, _TOKENS = 2, 32

_QUEUED = 10
"""Requests that are sent in a row to see in which order they are run."""


@dataclass(frozen=True)
class Answer:
    """`answer` is "unclear" when the service's behaviour fits none of the known ones; `evidence` says what was seen."""

    question: str
    answer: str
    evidence: str


@dataclass
class Interview:
    """One job and what it has answered so far.

    `model_name` and `n_gpus` say what the job trains and costs; it is cancelled at the end. Every question is asked in
    the order of `ask`, since some need the state that others leave behind.
    """

    client: CortexTrainingClient
    model_name: str
    n_gpus: int = 1
    wait_s: float = 3600.0
    job_id: str = field(default="", init=False)
    _checkpoint: str = field(default="", init=False)
    _last_request: str = field(default="", init=False)

    def ask(self) -> Iterator[Answer]:
        """The answers as they come. Raises what the service raises when the job itself cannot be made to run."""
        try:
            yield from self._job_ids()
            self.client.wait_for_job(self.job_id, timeout_s=self.wait_s)
            for question in (
                self._chunk_groups,
                self._accumulation,
                self._saves,
                self._global_steps,
                self._load_gradients,
                self._request_order,
                self._unknown_requests,
            ):
                yield from _guarded(question)
        finally:
            self._cancel()
        yield from _guarded(self._ended_job_polls)

    def _cancel(self) -> None:
        if self.job_id:
            with contextlib.suppress(ApiError):
                self.client.cancel_job(self.job_id)

    def _sub_job(self, seed: int) -> SubJobConfig:
        return SubJobConfig.training_job(
            self.model_name,
            {"name": "AdamW", "lr": 1e-5},
            max_seq_len=64,
            train_batch_size=_ROWS * self.n_gpus,
            n_gpus=self.n_gpus,
            seed=seed,
        )

    def _job_ids(self) -> Iterator[Answer]:
        asked = identity.new_job_id()
        self.job_id = self.client.create_job([self._sub_job(1)], job_id=asked)
        if self.job_id != asked:
            yield Answer("job-ids", "ignored", f"asked for {asked}, got {self.job_id}")
            return
        try:
            second = self.client.create_job([self._sub_job(2)], job_id=asked)
        except ConfigurationError:
            yield Answer("job-ids", "honoured", "the id was kept, and a second job under it was answered 409")
        except ApiError as error:
            yield Answer("job-ids", "unclear", f"the id was kept, and a second job under it was refused: {error}")
        else:
            if second != asked:
                self.client.cancel_job(second)
            yield Answer("job-ids", "unclear", f"the id was kept once, and a second job got {second}")

    def _chunk_groups(self) -> Iterator[Answer]:
        group = identity.group_id(self.job_id, 0, 1, 0)
        first = self._poll(self.client.forward_backward(self.job_id, self._frame(1), chunk_group_id=group))
        again = self._poll(self.client.forward_backward(self.job_id, self._frame(1), chunk_group_id=group))
        same = first.get("avg_loss") == again.get("avg_loss")
        yield Answer(
            "chunk-group-replay",
            "same-result" if same else "unclear",
            f"losses {first.get('avg_loss')} and {again.get('avg_loss')}",
        )
        try:
            self.client.forward_backward(self.job_id, self._frame(2), chunk_group_id=group)
        except ChunkGroupConflictError as error:
            yield Answer("chunk-group-conflict", "refused", error.code)
        else:
            yield Answer("chunk-group-conflict", "unclear", "another frame under a used id was accepted")

    def _accumulation(self) -> Iterator[Answer]:
        try:
            self._poll(self.client.forward_backward(self.job_id, self._frame(3)))
        except (ApiError, RequestFailed) as error:
            yield Answer("accumulation", "refuse", str(error))
        else:
            yield Answer("accumulation", "add", "a second forward-backward before the step was accepted")

    def _saves(self) -> Iterator[Answer]:
        self._step()
        saved = self._poll(self.client.save(self.job_id, checkpoint_type="resumable"))
        listed = [entry.get("checkpoint_id") for entry in self.client.list_checkpoints(self.job_id)]
        found = checkpoint_id(saved)
        self._checkpoint = str(found or listed[-1])
        yield Answer(
            "save-result",
            "full" if saved.get("checkpoint_id") else "stage_path" if found else "unclear",
            f"keys {sorted(saved)}",
        )
        kinds = {"uuid": r"cp_[0-9a-f-]{32,}", "global_step": r"global_step\d+"}
        kind = next((name for name, form in kinds.items() if re.fullmatch(form, self._checkpoint)), "unclear")
        listed_too = "listed" if self._checkpoint in listed else "not listed"
        yield Answer("checkpoint-ids", kind, f"{self._checkpoint}, {listed_too}")

    def _global_steps(self) -> Iterator[Answer]:
        self._train()
        self._step()
        self._poll(self.client.load(self.job_id, self._checkpoint))
        self._train()
        steps = self._step()
        # Saved after step 1, trained to step 2, loaded again, and one more step made.
        answer = {2: "restored", 3: "continues", 1: "zero"}.get(steps, "unclear")
        yield Answer("global-steps", answer, f"global_steps {steps} after loading what was saved at step 1")

    def _load_gradients(self) -> Iterator[Answer]:
        self._train()
        self._poll(self.client.load(self.job_id, self._checkpoint))
        try:
            result = self._poll(self.client.step(self.job_id))
        except (ApiError, RequestFailed) as error:
            yield Answer("load-gradients", "clear", f"a step after the load had nothing to apply: {error}")
            return
        metrics = result.get("metrics")
        norm = metrics.get("grad_norm") if isinstance(metrics, dict) else None
        if not isinstance(norm, int | float):
            yield Answer("load-gradients", "unclear", "the step's result does not tell the gradient's norm")
            return
        yield Answer("load-gradients", "keep" if norm > 0 else "clear", f"gradient norm {norm} after the load")

    def _request_order(self) -> Iterator[Answer]:
        sent = [self.client.forward_backward(self.job_id, self._frame(5 + n)) for n in range(_QUEUED)]
        ended = []
        for request_id in sent:
            # One that fails, because gradients do not add up here, was run in its turn too.
            with contextlib.suppress(RequestFailed):
                self._poll(request_id)
            ended.append(str(self.client.get_request_status(self.job_id, request_id).get("updated_at")))
        try:
            moments = [datetime.fromisoformat(moment) for moment in ended]
        except ValueError:
            yield Answer("request-order", "unclear", f"the status of a request does not tell when it ended: {ended[0]}")
            return
        in_order = moments == sorted(moments)
        answer = "shuffled" if not in_order else "arrival" if moments[0] < moments[-1] else "unclear"
        yield Answer("request-order", answer, f"{_QUEUED} requests that were sent in a row ended at {', '.join(ended)}")

    def _unknown_requests(self) -> Iterator[Answer]:
        try:
            status = self.client.get_request_status(self.job_id, identity.new_job_id())
        except NotFoundError:
            yield Answer("unknown-request", "404", "an id that was never given out is answered 404")
        except ApiError as error:
            yield Answer("unknown-request", "unclear", str(error))
        else:
            yield Answer("unknown-request", "unclear", f"answered {status}")

    def _ended_job_polls(self) -> Iterator[Answer]:
        self._wait_for_end()
        try:
            status = self.client.get_request_status(self.job_id, self._last_request)
        except ApiError as error:
            yield Answer("ended-job-polls", "refused", str(error))
        else:
            yield Answer("ended-job-polls", "served", f"status {status.get('status')}")

    def _wait_for_end(self) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError):
            while not is_terminal_job(self.client.get_job(self.job_id).get("status")):
                self.client.wait_for_job(self.job_id, timeout_s=60)

    def _poll(self, request_id: str) -> dict[str, Any]:
        self._last_request = request_id
        return dict(self.client.poll_request(self.job_id, request_id, timeout_s=self.wait_s))

    def _train(self) -> None:
        self._poll(self.client.forward_backward(self.job_id, self._frame(4)))

    def _step(self) -> int:
        steps = self._poll(self.client.step(self.job_id)).get("global_steps")
        return int(steps) if isinstance(steps, int | float) else -1

    def _frame(self, seed: int) -> bytes:
        """A batch of shape `[rows, tokens]` of ids that every vocabulary has."""
        rows = _ROWS * self.n_gpus
        ids = np.random.default_rng(seed).integers(10, 200, (rows, _TOKENS)).astype(np.int64)
        mask = np.ones((rows, _TOKENS), dtype=np.float32)
        mask[:, -1] = 0.0
        positions = np.tile(np.arange(_TOKENS, dtype=np.int64), (rows, 1))
        arguments = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
        batch = {
            "args": (),
            "kwargs": {**arguments, "use_cache": False},
            "context": {"input_ids": ids, "loss_mask": mask},
            "processing": {"loss_fn": "causal_cross_entropy", "post": [], "config": {}},
        }
        return wire.dumps(batch, {"response_options": {"format": "dssst1", "delivery": "chunked"}})


def _guarded(question: Callable[[], Iterator[Answer]]) -> Iterator[Answer]:
    """One question's answers; a service that fails at one of them still answers the others."""
    try:
        yield from question()
    except CortexTrainingError as error:
        yield Answer(question.__name__.strip("_").replace("_", "-"), "unclear", f"{type(error).__name__}: {error}")
