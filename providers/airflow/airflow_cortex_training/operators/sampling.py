"""What a job's sampling side does: take over the trained weights, and generate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.object_storage import check_writable_place, read_bytes, write_bytes
from airflow_cortex_training.operators.request_leg import CortexTrainingRequestOperator
from cortex_training.config import JobType, canonical_job_type
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import DAG, Context

    from cortex_training.client import CortexTrainingClient


class CortexTrainingWeightSyncOperator(CortexTrainingRequestOperator):
    """Copy the weights of a job's training sub-job to its sampling sub-jobs.

    Args:
        source_sub_job_id: default the job's training sub-job.
        target_sub_job_ids: default all its sampling sub-jobs.
        weight_format: default ``lora`` when the training sub-job has a ``peft_config``, else the service's.

    Returns (XCom): ``job_id``.
    """

    template_fields = (
        *CortexTrainingRequestOperator.template_fields,
        "source_sub_job_id",
        "target_sub_job_ids",
        "weight_format",
    )
    operation = "weight-sync"

    def __init__(
        self,
        *,
        source_sub_job_id: str | None = None,
        target_sub_job_ids: Sequence[str] | None = None,
        weight_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source_sub_job_id = source_sub_job_id
        self.target_sub_job_ids = target_sub_job_ids
        self.weight_format = weight_format

    def intent(self, client: CortexTrainingClient, record: Any) -> dict[str, Any]:
        sub_jobs = client.get_job(self.job_id).get("sub_jobs") or []
        training = [s for s in sub_jobs if canonical_job_type(s.get("job_type")) == JobType.TRAINING]
        sampling = [s for s in sub_jobs if canonical_job_type(s.get("job_type")) == JobType.SAMPLING]
        source = self.source_sub_job_id or next((s["sub_job_id"] for s in training), None)
        targets = list(self.target_sub_job_ids or [s["sub_job_id"] for s in sampling])
        if not source or not targets:
            raise ConfigurationError.of(
                f"task {self.task_id}: job_id",
                self.job_id,
                "a weight sync needs a training and a sampling sub-job; create the job with both",
            )
        lora = any((s.get("training_config") or {}).get("peft_config") for s in training)
        return {"source": source, "targets": targets, "format": self.weight_format or ("lora" if lora else None)}

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str:
        return client.weight_sync(
            self.job_id, intent["source"], list(intent["targets"]), weight_format=intent.get("format")
        )

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        return {"job_id": self.job_id}


class CortexTrainingGenerateOperator(CortexTrainingRequestOperator):
    """Generate from a job's sampling sub-job and write the completions to a file or to object storage.

    Args:
        prompts: texts, or lists of token ids. A text without ``{{``, ``{%`` or ``{#`` is sent as it stands, a template
            keeps its newline at the end, and ``{% raw %}`` protects braces. They are stored with the rendered fields of
            the task: give prompts that nobody may read through `prompts_path`.
        prompts_path: JSON lines; each line is a text, a list of token ids, or an object with ``prompt``.
        output_path: JSON lines to write, one object per prompt: ``prompt``, ``text``, ``token_ids``, ``finish_reason``
            as the service gives them. It appears under its name when it is whole. Both are paths, or what Airflow's
            ``ObjectStoragePath`` opens, e.g. ``s3://aws_default@bucket/samples.jsonl``.
        xcom_max_bytes: results of at most so many bytes of JSON lines go into the XCom as well, as ``completions``.
            The default keeps completions out of Airflow's database whatever their size.
        sampling_params: one object for all prompts or a list with one for each.
        routing_key, strict: as the service has them.

    A retry waits for the same request; a cleared task generates again. A killed one cancels its request, and where
    Airflow tries it again all the same, it is sent again.

    Returns (XCom): ``job_id``, ``output_path``, ``count``, ``bytes``, ``sha256`` of the file, and ``completions`` when
    `xcom_max_bytes` allows it.
    """

    template_fields = (
        *CortexTrainingRequestOperator.template_fields,
        "prompts",
        "prompts_path",
        "output_path",
        "sampling_params",
        "routing_key",
    )
    operation = "generate"
    cancels_on_kill = True

    def __init__(
        self,
        *,
        output_path: str,
        prompts: Sequence[str | Sequence[int]] | None = None,
        prompts_path: str | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool | None = None,
        xcom_max_bytes: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.xcom_max_bytes = xcom_max_bytes
        self.output_path = output_path
        self.prompts = prompts
        self.prompts_path = prompts_path
        self.sampling_params = sampling_params
        self.routing_key = routing_key
        self.strict = strict
        self._prompts: list[Any] = []

    def get_template_env(self, dag: DAG | None = None) -> jinja2.Environment:
        # A prompt's newline at the end is a token like any other; Jinja drops it unless told not to.
        return super().get_template_env(dag).overlay(keep_trailing_newline=True)

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """As every operator's, except that prompts which are no templates stay as they are: native rendering would
        make a number of ``"42"`` and take the quotes off ``"'yes'"``."""
        if content is not self.prompts or not isinstance(content, (list, tuple)):
            return super().render_template(content, context, jinja_env, seen_oids)
        return [
            super(CortexTrainingGenerateOperator, self).render_template(one, context, jinja_env, seen_oids)
            if _may_be_template(one)
            else one
            for one in content
        ]

    def check(self) -> None:
        if (self.prompts is None) == (not self.prompts_path):
            raise ConfigurationError(f"task {self.task_id}: give either prompts or prompts_path", field="prompts")
        if isinstance(self.prompts, str):
            raise ConfigurationError.of(
                f"task {self.task_id}: prompts",
                self.prompts[:80],
                "give a list; a template makes one only with render_template_as_native_obj=True on the DAG",
            )
        if not self.wait_for_completion:
            raise ConfigurationError(
                f"task {self.task_id}: wait_for_completion=False would leave the completions to nobody",
                field="wait_for_completion",
            )
        check_writable_place(f"task {self.task_id}: output_path", str(self.output_path))
        self._prompts = self._read_prompts()
        if not self._prompts:
            raise ConfigurationError.of(f"task {self.task_id}: prompts", [], "give at least one prompt")

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str:
        return client.generate(
            self.job_id, self._prompts, self.sampling_params, routing_key=self.routing_key, strict=self.strict
        )

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> dict[str, Any]:
        lines = self._lines(list(result.get("results") or []))
        data = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()
        write_bytes(f"task {self.task_id}: output_path", str(self.output_path), data)
        told = {
            "job_id": self.job_id,
            "output_path": str(self.output_path),
            "count": len(lines),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        return {**told, "completions": lines} if len(data) <= int(self.xcom_max_bytes) else told

    def _lines(self, completions: Sequence[Any]) -> list[dict[str, Any]]:
        prompts = self._prompts or self._read_prompts()
        lines = []
        for index, completion in enumerate(completions):
            prompt = prompts[index] if index < len(prompts) else None
            fields = completion if isinstance(completion, Mapping) else {"text": completion}
            lines.append({"prompt": prompt, **_plain(fields)})
        return lines

    def _read_prompts(self) -> list[Any]:
        if not self.prompts_path:
            return list(self.prompts or [])
        field = f"task {self.task_id}: prompts_path"
        prompts = []
        try:
            # Not splitlines: a line separator inside a JSON string is a character like any other.
            for line in read_bytes(field, str(self.prompts_path)).decode().split("\n"):
                if line.strip():
                    value = json.loads(line)
                    prompts.append(value["prompt"] if isinstance(value, dict) else value)
        except (ValueError, KeyError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError.of(field, self.prompts_path, repr(error)) from error
        return prompts


def _may_be_template(prompt: Any) -> bool:
    return not isinstance(prompt, str) or any(sign in prompt for sign in ("{{", "{%", "{#"))


def _plain(value: Any) -> Any:
    """Arrays as lists: only the client that submitted a request turns them into lists by itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
