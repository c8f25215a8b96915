"""From a query to training data: rows are read through any DB-API hook and never pass through an XCom."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook, BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.operators.base import require_text, with_fields
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from airflow.sdk import Context

MANIFEST_NAME = "manifest.json"


class CortexTrainingBuildDatasetOperator(BaseOperator):
    """Run a query and build a packed, hashed dataset from its rows. Calls no training service.

    A row has ``prompt`` and ``completion``, or ``messages``, or ``text``; other columns are ignored. A missing or
    empty table and a row without text fail the task, for good, before any job exists. The same rows, tokenizer and
    arguments give the same bytes on every worker, so a retry changes nothing.

    Args:
        sql: the SELECT.
        sql_conn_id: connection of any type whose hook is a DB-API hook, e.g. a Snowflake connection.
        out: folder for shards and ``manifest.json``, shared with whoever trains.
        tokenizer: folder with ``tokenizer.json``.
        max_seq_len: longest packed sequence, tokens.
        parameters: bind parameters of the query.
        seed: of the packing order.
        overlong: what becomes of a row longer than `max_seq_len`: ``error``, ``truncate`` or ``skip``.
        hook_params: arguments of the hook, e.g. ``{"warehouse": "TRAIN_WH"}``.

    An `AssetAlias` among the `outlets` gets an event about `assets.dataset(manifest)`, with the dataset's content hash.

    Returns (XCom): ``manifest`` (path), ``content_sha256``, ``rows``, ``sequences``, ``tokens``, ``loss_tokens``.
    """

    template_fields = ("sql", "sql_conn_id", "out", "tokenizer", "max_seq_len", "parameters", "seed", "overlong")
    template_ext = (".sql",)
    template_fields_renderers = {"sql": "sql"}  # noqa: RUF012
    ui_color = "#fdf3d8"

    def __init__(
        self,
        *,
        sql: str,
        sql_conn_id: str,
        out: str,
        tokenizer: str,
        max_seq_len: int,
        parameters: Mapping[str, Any] | Sequence[Any] | None = None,
        seed: int = 0,
        overlong: str = "error",
        hook_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.sql = sql
        self.sql_conn_id = sql_conn_id
        self.out = out
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.parameters = parameters
        self.seed = seed
        self.overlong = overlong
        self.hook_params = hook_params
        self._built: dict[str, Any] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        from cortex_training.datasets import build_dataset

        with clear_failures():
            out = require_text(self, "out", self.out)
            with contextlib.closing(self._connect()) as connection, contextlib.closing(connection.cursor()) as cursor:
                self._query(cursor)
                manifest = build_dataset(
                    cursor,
                    out,
                    tokenizer=require_text(self, "tokenizer", self.tokenizer),
                    max_seq_len=int(self.max_seq_len),
                    seed=int(self.seed),
                    overlong=self.overlong,  # type: ignore[arg-type]
                    source=f"{self.sql_conn_id}: {' '.join(self.sql.split())[:200]}",
                    progress=lambda rows, tokens: self.log.info("%d rows, %d tokens", rows, tokens),
                )
        self.log.info(
            "dataset %s: %d rows in %d sequences, %d tokens of which %d count for the loss",
            manifest.content_sha256[:12],
            manifest.rows,
            manifest.sequences,
            manifest.tokens,
            manifest.loss_tokens,
        )
        self._built = built = {
            "manifest": f"{out.rstrip('/')}/{MANIFEST_NAME}",
            "content_sha256": manifest.content_sha256,
            "rows": manifest.rows,
            "sequences": manifest.sequences,
            "tokens": manifest.tokens,
            "loss_tokens": manifest.loss_tokens,
        }
        if self.outlets:
            from airflow_cortex_training import assets

            assets.announce(self.outlets, context, assets.dataset(str(built["manifest"])), built)
        return built

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        from airflow_cortex_training.lineage import of_dataset

        return of_dataset(self._hook(), self.sql_conn_id, self.sql, self._built)

    def _hook(self) -> Any:
        return BaseHook.get_hook(self.sql_conn_id, hook_params=dict(self.hook_params) if self.hook_params else None)

    def _connect(self) -> Any:
        connect = getattr(self._hook(), "get_conn", None)
        if connect is None:
            raise ConfigurationError.of(
                f"task {self.task_id}: sql_conn_id", self.sql_conn_id, "its hook gives no DB-API connection"
            )
        return connect()

    def _query(self, cursor: Any) -> None:
        try:
            cursor.execute(self.sql, self.parameters) if self.parameters else cursor.execute(self.sql)
        except Exception as error:
            # Drivers share no exception class; a DB-API error that names its SQL state is about the query, not the
            # line.
            if _is_about_the_query(error):
                raise AirflowFailException(
                    f"task {self.task_id}: the query was refused through connection {self.sql_conn_id!r}: {error} "
                    f"The query: {' '.join(self.sql.split())[:300]}"
                ) from error
            raise


def _is_about_the_query(error: Exception) -> bool:
    return any(kind.__name__ == "ProgrammingError" for kind in type(error).__mro__)
