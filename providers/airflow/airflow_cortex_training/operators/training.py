"""The two calls of which training consists, each as one task: forward-backward and optimizer step.

A pipeline that trains for more than a handful of steps is better served by `operators.train`: one task, no scheduler
between two steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.object_storage import read_bytes
from airflow_cortex_training.operators.request_leg import CortexTrainingRequestOperator
from cortex_training.errors import ConfigurationError, OutcomeUnknown

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cortex_training.durable import DurableRecord
    from cortex_training.client import CortexTrainingClient


class CortexTrainingForwardBackwardOperator(CortexTrainingRequestOperator):
    """One forward-backward: gradients are added on the job, weights stay as they are.

    Give exactly one of:

    Args:
        frame_path: file that holds a DSSST1 frame: a path, or what Airflow's ``ObjectStoragePath`` opens.
        payload: readable JSON that `cortex_training.payloads` turns into a frame.
        dataset: path of a dataset's ``manifest.json``, with `step` (from 1), `micro_batch` (from 0),
            `micro_batch_size` (sequences), `micro_batches_per_step` and `seed`: the batch that a training run would
            send there.

    A retry sends the same bytes under the same group id, which the service runs at most once. A cleared task runs
    again.

    Returns (XCom): ``job_id``, ``loss``, and up to 16 of the numbers among the service's ``metrics``.
    """

    template_fields = (
        *CortexTrainingRequestOperator.template_fields,
        "frame_path",
        "payload",
        "dataset",
        "step",
        "micro_batch",
        "micro_batch_size",
        "micro_batches_per_step",
        "seed",
    )
    operation = "forward-backward"

    def __init__(
        self,
        *,
        frame_path: str | None = None,
        payload: Mapping[str, Any] | None = None,
        dataset: str | None = None,
        step: int = 1,
        micro_batch: int = 0,
        micro_batch_size: int = 1,
        micro_batches_per_step: int = 1,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.frame_path = frame_path
        self.payload = payload
        self.dataset = dataset
        self.step = step
        self.micro_batch = micro_batch
        self.micro_batch_size = micro_batch_size
        self.micro_batches_per_step = micro_batches_per_step
        self.seed = seed
        self._frame = b""
        self._done = False

    def check(self) -> None:
        given = [name for name in ("frame_path", "payload", "dataset") if getattr(self, name)]
        if len(given) != 1:
            raise ConfigurationError.of(
                f"task {self.task_id}: frame_path, payload, dataset", given, "give exactly one of the three"
            )
        self._frame = self._make_frame()

    def intent(self, client: CortexTrainingClient, record: DurableRecord) -> dict[str, Any]:
        sha256 = hashlib.sha256(self._frame).hexdigest()
        earlier = record.current or {}
        if earlier.get("job_id") == self.job_id and earlier.get("group_id") and earlier.get("ended") != "failed":
            if earlier.get("frame_sha256") != sha256:
                raise AirflowFailException(
                    f"task {self.task_id}: an earlier try may have sent another frame (sha256 "
                    f"{earlier.get('frame_sha256')}) than this one would ({sha256}): its input was changed in between. "
                    "Clear the task to send the new one; the gradients of the old one may already be on the job."
                )
            return {"group_id": earlier["group_id"], "frame_sha256": sha256}
        return {"group_id": str(uuid4()), "frame_sha256": sha256}

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str:
        return client.forward_backward(self.job_id, self._frame, chunk_group_id=intent["group_id"])

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        self._done = True
        numbers = {k: v for k, v in (result.get("metrics") or {}).items() if isinstance(v, (int, float))}
        return {
            "job_id": self.job_id,
            "loss": _number(result.get("avg_loss")),
            "metrics": dict(list(numbers.items())[:16]),
        }

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        from airflow_cortex_training.lineage import of_forward_backward

        if not self.dataset or not self._done:
            return None
        return of_forward_backward(str(self.dataset), self.job_id, self.hook.settings())

    def _make_frame(self) -> bytes:
        if self.frame_path:
            return read_bytes(f"task {self.task_id}: frame_path", str(self.frame_path))
        if self.payload:
            from cortex_training.payloads import build_forward_backward_payload

            return build_forward_backward_payload(dict(self.payload))
        from cortex_training.datasets import Dataset

        batches = Dataset.open(str(self.dataset)).batches(
            int(self.micro_batch_size), int(self.micro_batches_per_step), int(self.seed)
        )
        return batches.frame(int(self.step), int(self.micro_batch))


class CortexTrainingStepOperator(CortexTrainingRequestOperator):
    """One optimizer step with the gradients that are on the job. It is never sent twice.

    Args:
        learning_rate: None leaves the rate to the job's optimizer.
        expected_global_step: what the job's step counter must be afterwards; the task fails when it is not. With it,
            a step that the service confirmed as failed may be sent again by a retry.

    When the answer to the POST was lost, the task fails and no retry repeats it: a doubled step silently changes the
    training. A cleared task refuses too, as long as the job is the one it stepped before.

    Returns (XCom): ``job_id``, ``global_steps``, ``last_lr``.
    """

    template_fields = (*CortexTrainingRequestOperator.template_fields, "learning_rate", "expected_global_step")
    operation = "step"

    def __init__(
        self, *, learning_rate: float | None = None, expected_global_step: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.learning_rate = learning_rate
        self.expected_global_step = expected_global_step

    def check(self) -> None:
        if not self.wait_for_completion and self.expected_global_step is not None:
            raise ConfigurationError(
                f"task {self.task_id}: expected_global_step is compared with the step's result, and "
                "wait_for_completion=False does not wait for it: leave one of them out",
                field="wait_for_completion",
            )
        # Here, before the intent is written: a retry that finds one takes the step for sent.
        for name, kind in (("learning_rate", float), ("expected_global_step", int)):
            value = getattr(self, name)
            try:
                _ = None if value is None else kind(value)
            except (TypeError, ValueError):
                raise ConfigurationError.of(f"task {self.task_id}: {name}", value, "give a number") from None

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str:
        rate = None if self.learning_rate is None else float(self.learning_rate)
        try:
            return client.step(self.job_id, rate)
        except OutcomeUnknown as error:
            raise AirflowFailException(str(error)) from error

    def settle_intent(self, intent: Mapping[str, Any]) -> None:
        raise AirflowFailException(
            f"task {self.task_id}: an earlier try was about to send a step to job {self.job_id} and did not live to "
            "write down the answer, so the step may have been executed. It is not sent again. Save a checkpoint and "
            "compare its global_steps, or go on from the last checkpoint in a new job."
        )

    def settle_failure(self, intent: Mapping[str, Any]) -> None:
        if self.expected_global_step is None:
            raise AirflowFailException(
                f"task {self.task_id}: step request {intent.get('request_id')} of job {self.job_id} failed. Without "
                "expected_global_step a retry could not tell whether a second one counts double, so none is sent."
            )

    def settle_clear(self, client: CortexTrainingClient, superseded: Mapping[str, Any]) -> None:
        if superseded.get("ended") == "refused":
            return
        raise AirflowFailException(
            f"task {self.task_id} was cleared after it stepped job {self.job_id} (request "
            f"{superseded.get('request_id') or 'unknown'}). Clearing takes no optimizer step back, and a second one "
            "would train further than the DAG says. To start over, clear the task that created the job as well."
        )

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        steps = result.get("global_steps")
        if self.expected_global_step is not None and steps != int(self.expected_global_step):
            raise AirflowFailException(
                f"task {self.task_id}: job {self.job_id} is at global step {steps!r} after this step, "
                f"{self.expected_global_step} was expected: somebody else stepped it too, or a step is missing. Cancel "
                "the job and go on from its last published checkpoint."
            )
        rate = result.get("last_lr")
        return {
            "job_id": self.job_id,
            "global_steps": steps,
            "last_lr": _number(rate[0] if isinstance(rate, list) and rate else rate),
        }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
