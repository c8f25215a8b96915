"""Names of experiments that say which DAG's run made a job, so that a sweep finds what a night left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import Context

_RUN_KINDS = ("scheduled", "manual", "backfill", "asset_triggered")


def default_experiment_name(context: Context) -> str:
    """``<dag id>_<run id>`` in the characters an experiment's name can hold."""
    return _nameable(f"{context['dag_run'].dag_id}_{context['dag_run'].run_id}")[:120]


def experiment_prefixes(dag_id: str) -> list[str]:
    """How default experiment names of a DAG's runs begin. The DAG's id alone may begin another DAG's id as well."""
    return [_nameable(f"{dag_id}_{kind}__")[:120] for kind in _RUN_KINDS]


def _nameable(raw: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in raw)
