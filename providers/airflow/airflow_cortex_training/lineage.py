"""What tasks of this provider tell OpenLineage: which tables became which dataset, run and model.

At the service a job stands for the weights that it trains: batches go into it, checkpoints come out of it.

Airflow's OpenLineage listener asks a finished operator for `get_openlineage_facets_on_complete`; the operators answer
with one of the functions here. Names are those of the storage (``file`` and a path, ``s3://bucket`` and a key), so that
what other producers say of the same files meets it. Without the OpenLineage provider nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.assets import publications, storage_of

if TYPE_CHECKING:
    from airflow.providers.common.compat.openlineage.facet import Dataset
    from airflow.providers.openlineage.extractors import OperatorLineage

    from airflow_cortex_training.connection import ConnectionSettings

SOURCE = "cortex-training"


def of_dataset(hook: Any, conn_id: str, sql: str, built: Mapping[str, Any] | None) -> OperatorLineage[Any, Any] | None:
    """Tables of the query -> the dataset. `built` is the operator's result, None when it made none.

    Without `sql` the rows came from a function, of whose inputs nothing is known.
    """
    if built is None or (lineage := _lineage()) is None:
        return None
    tables = _tables(hook, conn_id, sql) if sql else None
    said = lineage(outputs=[dataset_version(str(built["manifest"]), str(built["content_sha256"]), rows=built["rows"])])
    return tables.merge(said) if tables is not None else said


def of_training(plan: Mapping[str, Any], result: Mapping[str, Any] | None, where: ConnectionSettings) -> Any:
    """The dataset -> checkpoints of the run, and the weights of its job."""
    if result is None or (lineage := _lineage()) is None:
        return None
    return lineage(
        inputs=[_files(str(plan["dataset"]))],
        outputs=[_published(str(result["root"]), result.get("entry")), _weights(where, str(result["job_id"]))],
        run_facets=_made_by(where, str(result["job_id"])),
    )


def of_forward_backward(dataset: str, job_id: str, where: ConnectionSettings) -> OperatorLineage[Any, Any] | None:
    """A dataset -> the weights of a job."""
    if (lineage := _lineage()) is None:
        return None
    made_by = _made_by(where, job_id)
    return lineage(inputs=[_files(dataset)], outputs=[_weights(where, job_id)], run_facets=made_by)


def of_save(job_id: str, checkpoint_id: str, where: ConnectionSettings) -> OperatorLineage[Any, Any] | None:
    """The weights of a job -> a checkpoint of the service."""
    if (lineage := _lineage()) is None:
        return None
    saved = _checkpoint(where, job_id, checkpoint_id)
    return lineage(inputs=[_weights(where, job_id)], outputs=[saved], run_facets=_made_by(where, job_id))


def of_load(
    source_job_id: str, checkpoint_id: str, job_id: str, where: ConnectionSettings
) -> OperatorLineage[Any, Any] | None:
    """A checkpoint of the service -> the weights of a job."""
    if (lineage := _lineage()) is None:
        return None
    loaded = _checkpoint(where, source_job_id, checkpoint_id)
    return lineage(inputs=[loaded], outputs=[_weights(where, job_id)], run_facets=_made_by(where, job_id))


def of_export(
    job_id: str, checkpoint_id: str, result: Mapping[str, Any] | None, where: ConnectionSettings
) -> OperatorLineage[Any, Any] | None:
    """A checkpoint of the service -> a folder of files."""
    if result is None or (lineage := _lineage()) is None:
        return None
    return lineage(
        inputs=[_checkpoint(where, job_id, checkpoint_id)],
        outputs=[
            dataset_version(str(result["path"]), checkpoint_id, files=int(result["files"]), size=int(result["bytes"]))
        ],
        run_facets=_made_by(where, job_id),
    )


def of_publication(root: str, result: Mapping[str, Any] | None) -> OperatorLineage[Any, Any] | None:
    """A folder of files -> the log it was published in."""
    if result is None or (lineage := _lineage()) is None:
        return None
    return lineage(inputs=[_files(str(result["location"]))], outputs=[_published(root, result["entry"])])


def dataset_version(
    path: str, version: str, *, rows: int | None = None, files: int | None = None, size: int | None = None
) -> Any:
    """Files at `path` as they are now: their version, and how many rows, files and bytes were written."""
    from airflow.providers.common.compat.openlineage.facet import OutputDataset, OutputStatisticsOutputDatasetFacet
    from openlineage.client.facet_v2 import dataset_version_dataset

    namespace, name = _stored(path)
    written = OutputStatisticsOutputDatasetFacet(rowCount=rows, fileCount=files, size=size)
    return OutputDataset(
        namespace=namespace,
        name=name,
        facets={"version": dataset_version_dataset.DatasetVersionDatasetFacet(version)},
        outputFacets={"outputStatistics": written},
    )


def _lineage() -> Any:
    """OpenLineage's class for what an operator says, or None where its provider is not installed."""
    try:
        from airflow.providers.openlineage.extractors import OperatorLineage
    except ImportError:
        return None
    return OperatorLineage


def _tables(hook: Any, conn_id: str, sql: str) -> OperatorLineage[Any, Any] | None:
    from airflow.providers.common.compat.openlineage.utils.sql import get_openlineage_facets_with_sql

    # Of the text of the query: columns would cost a query on information_schema for every dataset.
    return get_openlineage_facets_with_sql(hook=hook, sql=sql, conn_id=conn_id, database=None, use_connection=False)


def _published(root: str, entry: object) -> Any:
    from airflow.providers.common.compat.openlineage.facet import OutputDataset
    from openlineage.client.facet_v2 import dataset_version_dataset

    namespace, name = storage_of(publications(root).uri)
    facets: Any = {"version": dataset_version_dataset.DatasetVersionDatasetFacet(str(entry))} if entry else {}
    return OutputDataset(namespace=namespace, name=name, facets=facets)


def _made_by(where: ConnectionSettings, job_id: str) -> dict[str, Any]:
    from airflow.providers.common.compat.openlineage.facet import ExternalQueryRunFacet

    return {"externalQuery": ExternalQueryRunFacet(externalQueryId=job_id, source=_service(where))}


def _weights(where: ConnectionSettings, job_id: str) -> Dataset:
    return _dataset(_service(where), job_id)


def _checkpoint(where: ConnectionSettings, job_id: str, checkpoint_id: str) -> Dataset:
    return _dataset(_service(where), f"{job_id}/{checkpoint_id}")


def _service(where: ConnectionSettings) -> str:
    host = where.base_url.partition("://")[2]
    return f"{SOURCE}://{host}/{where.database}/{where.schema}/{where.endpoint}"


def _files(path: str) -> Dataset:
    return _dataset(*_stored(path))


def _stored(path: str) -> tuple[str, str]:
    if path.startswith("s3://"):
        bucket, _, key = path.removeprefix("s3://").partition("/")
        return f"s3://{bucket}", key or "/"
    return "file", path


def _dataset(namespace: str, name: str) -> Dataset:
    from airflow.providers.common.compat.openlineage.facet import Dataset

    return Dataset(namespace=namespace, name=name)
