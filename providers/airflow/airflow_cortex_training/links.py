"""Extra links of tasks: to the job, to the progress of a run, to a checkpoint. There while a task is deferred, too.

Airflow asks a link for its URL at the end of *every* leg of a task, in the worker; what the operator noted until then
is stored. A leg that noted nothing must not wipe what the leg before it did, so the stored one is told again. A
training run learns of its job between two legs, or in the middle of a long one: it stores the link itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context
    from airflow.sdk.types import TaskInstanceKey

_SNOWFLAKE = ".snowflakecomputing.com"

_log = logging.getLogger(__name__)


class Endpoint(Protocol):
    """Where a job lives: a client or checked settings of a connection."""

    @property
    def base_url(self) -> str: ...
    @property
    def database(self) -> str: ...
    @property
    def schema(self) -> str: ...
    @property
    def endpoint(self) -> str: ...


class CortexTrainingJobLink(BaseOperatorLink):
    """The job: its account's console, or the job itself where no console stands before the service."""

    name = "Cortex Training job"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        return _noted(self, operator, ti_key)


class CortexTrainingRunLink(BaseOperatorLink):
    """The log of the task, where the progress of a training run is told as it happens."""

    name = "Run progress"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        return _noted(self, operator, ti_key)


class CortexTrainingCheckpointLink(BaseOperatorLink):
    """Where the files of a checkpoint are, or what the task tells of it."""

    name = "Checkpoint"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        return _noted(self, operator, ti_key)


def note(operator: Any, link: type[BaseOperatorLink], url: str) -> None:
    """Remember the URL of one of `operator`'s links until this leg ends."""
    operator.__dict__.setdefault("_noted_links", {})[link.__name__] = url


class JobLinkOfRun:
    """Stores the link to a run's job as soon as the run has one, and again when another job takes its place.

    Called in the loop that hears of the run's progress; `ti` is the task instance, None where there is none.
    """

    def __init__(self, where: Endpoint, ti: Any) -> None:
        self._where = where
        self._ti = ti
        self._job_id: str | None = None
        self._storing: asyncio.Future[None] | None = None

    def show(self, job_id: str | None) -> None:
        if job_id is None or job_id == self._job_id or self._ti is None:
            return
        self._job_id = job_id
        # In a thread: Airflow's answer may take its time, and neither the run nor a thousand waits shall stand still.
        self._storing = asyncio.ensure_future(asyncio.to_thread(self._store, job_url(self._where, job_id)))

    def _store(self, url: str) -> None:
        from airflow.sdk.bases.xcom import BaseXCom

        ti = self._ti
        try:
            # Not through the deployment's XCom backend: links are read from the database, as Airflow stores its own.
            BaseXCom.set(
                CortexTrainingJobLink().xcom_key,
                url,
                dag_id=ti.dag_id,
                task_id=ti.task_id,
                run_id=ti.run_id,
                map_index=ti.map_index,
            )
        except Exception as error:
            _log.warning("the link to the job could not be stored, training goes on: %s", error)


def job_url(where: Endpoint, job_id: str) -> str:
    """A page about a job: Snowsight for a Snowflake account, the service's own JSON for any other host."""
    host = urlsplit(where.base_url).hostname or ""
    if host.endswith(_SNOWFLAKE):
        return _console_url(host.removesuffix(_SNOWFLAKE))
    path = "/".join(quote(part, safe="") for part in (where.database, "schemas", where.schema, where.endpoint, job_id))
    return f"{where.base_url}/api/v2/databases/{path}"


def run_url(context: Context) -> str:
    """The page of a task instance in this Airflow, whose log tells the progress."""
    ti = context["ti"]
    base = conf.get("api", "base_url", fallback="").rstrip("/")
    mapped = f"/mapped/{ti.map_index}" if ti.map_index is not None and ti.map_index >= 0 else ""
    run = quote(ti.run_id, safe="")
    return f"{base}/dags/{quote(ti.dag_id, safe='')}/runs/{run}/tasks/{quote(ti.task_id, safe='')}{mapped}"


def location_url(location: str, context: Context) -> str:
    """A page about a place: the bucket's in the console of AWS; for any other place the XComs of the task, which name
    it. Airflow shows no link that is neither http nor https, and no browser would open a path from its pages."""
    if location.startswith("s3://"):
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        return f"https://s3.console.aws.amazon.com/s3/buckets/{bucket}?prefix={quote(prefix.rstrip('/'))}/"
    return location if location.startswith(("http://", "https://")) else f"{run_url(context)}/xcom"


def _console_url(account: str) -> str:
    """Snowsight of an account: ``org-name`` spells organisation and name, ``locator.region`` a locator."""
    locator, dot, region = account.partition(".")
    if dot:
        return f"https://app.snowflake.com/{region}/{locator}"
    organisation, dash, name = account.partition("-")
    return f"https://app.snowflake.com/{organisation}/{name}" if dash else "https://app.snowflake.com/"


def _noted(link: BaseOperatorLink, operator: Any, ti: Any) -> str:
    url = operator.__dict__.get("_noted_links", {}).get(type(link).__name__)
    if url is None and hasattr(ti, "xcom_pull"):
        # Of this instance: without an index a mapped task is given the links of all its instances.
        url = ti.xcom_pull(task_ids=ti.task_id, key=link.xcom_key, map_indexes=ti.map_index)
    return str(url or "")
