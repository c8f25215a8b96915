"""From a query, or a function, to training data: rows are read on the worker and never pass through an XCom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseHook, BaseOperator
from airflow.sdk.bases.decorator import determine_kwargs
from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.operators.base import require_text, with_fields
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from airflow.sdk import Context

MANIFEST_NAME = "manifest.json"


class CortexTrainingBuildDatasetOperator(BaseOperator):
    """Build a packed, hashed dataset from the rows of a query, or of a function. Calls no training service.

    A row has ``prompt`` and ``completion``, or ``messages``, or ``text``; other columns are ignored. A missing or
    empty table and a row without text fail the task, for good, before any job exists. The same rows, tokenizer and
    arguments give the same bytes on every worker, so a retry changes nothing. A cursor that has its result as Arrow
    batches, as Snowflake's has where pyarrow is installed, is read batch by batch.

    Args:
        out: folder for shards and ``manifest.json``, shared with whoever trains.
        tokenizer: folder with ``tokenizer.json``.
        max_seq_len: longest packed sequence, tokens.
        sql: the SELECT.
        sql_conn_id: connection of any type whose hook is a DB-API hook, e.g. a Snowflake connection.
        parameters: bind parameters of the query.
        hook_params: arguments of the hook, e.g. ``{"warehouse": "TRAIN_WH"}``.
        rows: instead of a query: a function that returns or yields rows, called on the worker with `op_args`,
            `op_kwargs` and whatever of the task's context it has parameters for.
        seed: of the packing order.
        overlong: what becomes of a row longer than `max_seq_len`: ``error``, ``truncate`` or ``skip``.

    An `AssetAlias` among the `outlets` gets an event about `assets.dataset(manifest)`, with the dataset's content hash.

    Returns (XCom): ``manifest`` (path), ``content_sha256``, ``rows``, ``sequences``, ``tokens``, ``loss_tokens``.
    """

    template_fields: Sequence[str] = (
        "sql",
        "sql_conn_id",
        "out",
        "tokenizer",
        "max_seq_len",
        "parameters",
        "seed",
        "overlong",
        "op_args",
        "op_kwargs",
    )
    template_ext = (".sql",)
    template_fields_renderers: ClassVar[dict[str, str]] = {"sql": "sql", "op_args": "py", "op_kwargs": "py"}
    shallow_copy_attrs: Sequence[str] = ("rows",)
    ui_color = "#fdf3d8"

    def __init__(
        self,
        *,
        out: str,
        tokenizer: str,
        max_seq_len: int,
        sql: str | None = None,
        sql_conn_id: str | None = None,
        parameters: Mapping[str, Any] | Sequence[Any] | None = None,
        hook_params: Mapping[str, Any] | None = None,
        rows: Callable[..., Any] | None = None,
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        overlong: str = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.out = out
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.sql = sql
        self.sql_conn_id = sql_conn_id
        self.parameters = parameters
        self.hook_params = hook_params
        self.rows = rows
        self.op_args = op_args or ()
        self.op_kwargs = op_kwargs or {}
        self.seed = seed
        self.overlong = overlong
        self._built: dict[str, Any] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        from cortex_training.datasets import build_dataset

        with clear_failures():
            out = require_text(self, "out", self.out)
            if bool(self.sql) == (self.rows is not None):
                raise ConfigurationError(f"task {self.task_id}: give either sql or rows", field="sql")
            with self._source(context) as (rows, source):
                manifest = build_dataset(
                    rows,
                    out,
                    tokenizer=require_text(self, "tokenizer", self.tokenizer),
                    max_seq_len=int(self.max_seq_len),
                    seed=int(self.seed),
                    overlong=self.overlong,  # type: ignore[arg-type]
                    source=source,
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

        if not self.sql:
            return of_dataset(None, "", "", self._built)
        return of_dataset(self._hook(), str(self.sql_conn_id), self.sql, self._built)

    @contextlib.contextmanager
    def _source(self, context: Context) -> Iterator[tuple[Any, str]]:
        """The rows, and what to call them."""
        if self.rows is not None:
            name = f"function {self.rows.__module__}.{getattr(self.rows, '__qualname__', 'rows')}"
            yield self._rows_of_function(self.rows, name, context), name
            return
        with contextlib.closing(self._connect()) as connection, contextlib.closing(connection.cursor()) as cursor:
            self._query(cursor)
            yield _in_batches(cursor), f"{self.sql_conn_id}: {_one_line(self.sql, 200)}"

    def _rows_of_function(self, function: Callable[..., Any], name: str, context: Context) -> Any:
        arguments = {**context, **self.op_kwargs}
        rows = function(*self.op_args, **determine_kwargs(function, self.op_args, arguments))
        if isinstance(rows, (str, bytes, Mapping)) or not hasattr(rows, "__iter__"):
            raise ConfigurationError(
                f"task {self.task_id}: {name} gave a {type(rows).__name__}; it must return or yield rows, each with "
                "prompt and completion, or messages, or text",
                field="rows",
            )
        return rows

    def _hook(self) -> Any:
        conn_id = require_text(self, "sql_conn_id", self.sql_conn_id)
        return BaseHook.get_hook(conn_id, hook_params=dict(self.hook_params) if self.hook_params else None)

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
                    f"The query: {_one_line(self.sql, 300)}"
                ) from error
            raise


def _in_batches(cursor: Any) -> Any:
    """The cursor's Arrow batches, where it has them: rows one by one are an order of magnitude slower to read."""
    batches = getattr(cursor, "fetch_arrow_batches", None)
    if batches is None:
        return cursor
    try:
        return batches()
    except Exception as error:
        # The result came as JSON, or pyarrow is missing. Anything else is about the data.
        if not _named(error, "NotSupportedError", "ProgrammingError"):
            raise
        return cursor


def _one_line(sql: str | None, length: int) -> str:
    return " ".join((sql or "").split())[:length]


def _named(error: Exception, *names: str) -> bool:
    # Drivers share no exception classes, only their names.
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _is_about_the_query(error: Exception) -> bool:
    return _named(error, "ProgrammingError")
