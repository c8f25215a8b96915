"""Upkeep of a deployment: logs where people keep them, and no GPUs for jobs that nobody owns."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.experiment_names import experiment_prefixes
from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.links import CortexTrainingJobLink, job_url, note
from airflow_cortex_training.object_storage import ObjectFolder, is_url, local_path
from airflow_cortex_training.operators.base import CortexTrainingOperator, require_text, with_fields
from airflow_cortex_training.operators.jobs import cancel_job
from cortex_training.errors import ConfigurationError, CortexTrainingError
from cortex_training.paths import safe_relative

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.client import CortexTrainingClient

LOGS = ("service", "execution", "stdout", "metrics")
_UNFINISHED = ["queued", "running"]


class CortexTrainingDownloadLogsOperator(CortexTrainingOperator):
    """Copy a job's logs to a folder or to object storage, also of a job that ended: use ``trigger_rule="all_done"``.

    ``service`` is what the service tells of each sub-job, through its own API, to ``<sub-job>/service.jsonl``.
    ``execution``, ``stdout`` and ``metrics`` are the files of the job's experiment run, as
    ``<sub-job>/<name>``, ``<sub-job>/stdout.log`` and ``<sub-job>/gpu.jsonl``; they need a Snowflake login, and the
    Snowflake connector or boto3. A kind that can't be fetched does not keep the others; the task fails only when there
    is none at all.

    Args:
        job_id: the job.
        path: a folder, or what Airflow's ``ObjectStoragePath`` opens. Files go to ``<path>/<job id>/``, so a retry
            replaces what it wrote.
        logs: which kinds, of ``service``, ``execution``, ``stdout``, ``metrics``.

    Returns (XCom): ``path``, ``files``, ``bytes``, and ``missing``: the kinds that could not be fetched.
    """

    template_fields = (*CortexTrainingOperator.template_fields, "job_id", "path", "logs")
    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(self, *, job_id: str, path: str, logs: Sequence[str] = ("service",), **kwargs: Any) -> None:
        super().__init__(**with_fields(kwargs))
        self.job_id = job_id
        self.path = path
        self.logs = logs

    def execute(self, context: Context) -> dict[str, Any]:
        with clear_failures(names=lambda: {"job": str(self.job_id)}):
            job_id = require_text(self, "job_id", self.job_id)
            kinds = self._kinds()
            place = _Folder(f"task {self.task_id}: path", require_text(self, "path", self.path))
            with self.hook.get_conn() as client, place.staged(safe_relative(job_id)) as folder:
                note(self, CortexTrainingJobLink, job_url(client, job_id))
                missing = self._fetch(client, job_id, kinds, folder)
                found = [path for path in folder.rglob("*") if path.is_file()]
                told = {"files": len(found), "bytes": sum(path.stat().st_size for path in found)}
        return {"path": place.locate(safe_relative(job_id)), **told, "missing": sorted(missing)}

    def _kinds(self) -> list[str]:
        kinds = [self.logs] if isinstance(self.logs, str) else list(self.logs)
        if not kinds or not set(kinds) <= set(LOGS):
            raise ConfigurationError.of(f"task {self.task_id}: logs", kinds, f"name some of {', '.join(LOGS)}")
        return kinds

    def _fetch(self, client: CortexTrainingClient, job_id: str, kinds: list[str], folder: Path) -> dict[str, str]:
        """Fetch into `folder`; the kinds that could not be, and why. Raises when none could."""
        ways = {
            "service": lambda: _service_logs(client, job_id, folder),
            "execution": lambda: _execution_logs(client, job_id, folder),
            "stdout": lambda: client.download_stdout_logs(job_id, folder),
            "metrics": lambda: client.download_metrics(job_id, folder),
        }
        missing: dict[str, str] = {}
        for kind in kinds:
            try:
                ways[kind]()
            except CortexTrainingError as error:
                if len(missing) + 1 == len(kinds):
                    raise
                missing[kind] = str(error)
                self.log.warning("no %s logs of job %s: %s", kind, job_id, error)
        return missing


class CortexTrainingSweepJobsOperator(CortexTrainingOperator):
    """Cancel jobs of this deployment that no run owns: leftovers of a night on which nobody could cancel them.

    A job is nobody's when it is alive, was created at least `older_than_s` ago, belongs to no unfinished training run
    in `run_roots`, and its DAG has no run under way. What it costs to be wrong is a training run, so whose jobs are
    meant must be said: with `dag_ids`, `experiments` or `user`.

    Args:
        dag_ids: DAGs whose jobs are looked for, by the experiment names that `CortexTrainingCreateJobOperator` and
            `CortexTrainingTrainOperator` give by default. A DAG with a queued or running run is left alone. Runs whose
            ids somebody made up are not recognised.
        experiments: beginnings of experiment names, for jobs with a name of their own.
        user: only jobs that this user submitted.
        run_roots: roots of training runs; jobs of unfinished ones are owned. A root that is not there fails the task:
            its run may well have jobs.
        credentials: for roots in a bucket: a list ``kind:location,…``, as the training plan has it.
        older_than_s: seconds, at least; a day by default. Longer than your longest run.
        cancel: without it they are only told.

    Returns (XCom): ``found`` and ``cancelled``: ids.
    """

    template_fields = (
        *CortexTrainingOperator.template_fields,
        "dag_ids",
        "experiments",
        "user",
        "run_roots",
        "credentials",
        "older_than_s",
        "cancel",
    )
    ui_color = "#f4e3e3"

    def __init__(
        self,
        *,
        dag_ids: Sequence[str] = (),
        experiments: Sequence[str] = (),
        user: str | None = None,
        run_roots: Sequence[str] = (),
        credentials: str | None = None,
        older_than_s: float | timedelta = 86_400.0,
        cancel: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.dag_ids = dag_ids
        self.experiments = experiments
        self.user = user
        self.run_roots = run_roots
        self.credentials = credentials
        self.older_than_s = older_than_s.total_seconds() if isinstance(older_than_s, timedelta) else older_than_s
        self.cancel = cancel

    def execute(self, context: Context) -> dict[str, Any]:
        from cortex_training.training.sweep import SweepRule, owned_jobs

        with clear_failures():
            prefixes = self._prefixes()
            if not prefixes and (self.dag_ids or not self.user):
                return {"found": [], "cancelled": []}
            rule = SweepRule(
                older_than_s=float(self.older_than_s),
                user=self.user or None,
                experiments=prefixes,
                owned=owned_jobs(_listed(self.run_roots), self.credentials),
            )
            with self.hook.get_conn() as client:
                found = [str(job["job_id"]) for job in rule.jobs(client)]
                if not self.cancel:
                    self.log.info("would cancel %s", ", ".join(found) or "nothing")
                    return {"found": found, "cancelled": []}
                cancelled = [job_id for job_id in found if self._cancelled(client, job_id)]
        self.log.info("cancelled %s", ", ".join(cancelled) or "nothing")
        return {"found": found, "cancelled": cancelled}

    def _prefixes(self) -> tuple[str, ...]:
        """Beginnings of experiment names. Empty when every DAG has a run under way, or only a user was given."""
        dag_ids, experiments = _listed(self.dag_ids), _listed(self.experiments)
        if not dag_ids and not experiments and not self.user:
            raise ConfigurationError(
                f"task {self.task_id}: say whose jobs are swept: give dag_ids, experiments or user", field="dag_ids"
            )
        if float(self.older_than_s) <= 0:
            raise ConfigurationError.of(
                f"task {self.task_id}: older_than_s", self.older_than_s, "a job that was just created is somebody's"
            )
        idle = [dag_id for dag_id in dag_ids if not self._is_under_way(dag_id)]
        return (*(prefix for dag_id in idle for prefix in experiment_prefixes(dag_id)), *experiments)

    def _is_under_way(self, dag_id: str) -> bool:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        runs = RuntimeTaskInstance.get_dr_count(dag_id=dag_id, states=_UNFINISHED)
        # The DAG that sweeps is under way itself; its own run is not one of those that own a job.
        others = runs - 1 if dag_id == self.dag_id else runs
        if others > 0:
            self.log.info("DAG %s has %d runs under way; its jobs are left alone", dag_id, others)
        return others > 0

    def _cancelled(self, client: CortexTrainingClient, job_id: str) -> bool:
        try:
            return cancel_job(client, job_id)
        except CortexTrainingError as error:
            self.log.warning("could not cancel job %s: %s", job_id, error)
            return False


class _Folder:
    """A folder, filled in place, or object storage, filled when all is there."""

    def __init__(self, field: str, place: str) -> None:
        self._objects = ObjectFolder(field, place) if is_url(place) else None
        self._path = Path(local_path(place))
        if self._objects is None and not self._path.is_dir():
            raise ConfigurationError.of(field, place, "is not an existing folder; create it or mount its file system")

    def locate(self, name: str) -> str:
        return self._objects.locate(name) if self._objects else str(self._path / name)

    @contextlib.contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        if self._objects is not None:
            with self._objects.staged(name) as folder:
                yield Path(folder)
            return
        target = self._path / name
        target.mkdir(exist_ok=True)
        yield target


def _service_logs(client: CortexTrainingClient, job_id: str, folder: Path) -> None:
    for sub_job in client.get_job(job_id).get("sub_jobs") or []:
        sub_job_id = str(sub_job["sub_job_id"])
        target = folder / _folder_of(sub_job_id)
        target.mkdir(parents=True, exist_ok=True)
        with open(target / "service.jsonl", "w", encoding="utf-8") as file:
            for entry in client.stream_logs(job_id, follow=False, sub_job_id=sub_job_id):
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _execution_logs(client: CortexTrainingClient, job_id: str, folder: Path) -> None:
    for log in client.fetch_execution_logs(job_id):
        content = log.get("content")
        if content is None:
            raise CortexTrainingError(f"{log.get('filename')} of {log.get('sub_job_id')}: {log.get('error')}")
        target = folder / _folder_of(str(log["sub_job_id"])) / safe_relative(str(log["filename"]))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")


def _folder_of(sub_job_id: str) -> str:
    from cortex_training.artifacts import folder_name

    return folder_name(sub_job_id)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    """A templated field may come as one text."""
    return [value] if isinstance(value, str) else [str(one) for one in value or ()]
