"""Datasets from a query through a DB-API hook; a database of the standard library stands in for the warehouse."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.operators import datasets
from airflow_cortex_training.operators.datasets import CortexTrainingBuildDatasetOperator
from cortex_training.datasets import Dataset
from cortex_training.local.models import model_folder


class ProgrammingError(Exception):
    """What Snowflake's driver raises for a table that is not there."""


class Hook:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.open = 0

    def get_conn(self) -> _Connection:
        self.open += 1
        return _Connection(self)


class _Connection:
    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.connection = sqlite3.connect(hook.path)

    def cursor(self) -> _Cursor:
        return _Cursor(self.connection.cursor())

    def close(self) -> None:
        self.hook.open -= 1
        self.connection.close()


class _Cursor:
    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self.cursor = cursor

    def execute(self, sql: str, parameters: object = ()) -> None:
        try:
            self.cursor.execute(sql, parameters)  # type: ignore[arg-type]
        except sqlite3.OperationalError as error:
            raise ProgrammingError(f"002003 (42S02): {error}") from error

    @property
    def description(self):
        return self.cursor.description

    def fetchmany(self, size: int):
        return self.cursor.fetchmany(size)

    def close(self) -> None:
        self.cursor.close()


@pytest.fixture
def warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hook:
    hook = Hook(tmp_path / "warehouse.db")
    with sqlite3.connect(hook.path) as connection:
        connection.execute("create table examples (PROMPT text, COMPLETION text, KIND text)")
        connection.execute("create table blank_examples (PROMPT text, COMPLETION text)")
        connection.executemany(
            "insert into examples values (?, ?, ?)",
            [(f"What comes after {n}?", f"{n + 1} does.", "even" if n % 2 else "odd") for n in range(40)],
        )
    monkeypatch.setattr(datasets.BaseHook, "get_hook", lambda conn_id, hook_params=None: hook)
    return hook


def build(out: Path, sql: str, **arguments: object) -> CortexTrainingBuildDatasetOperator:
    return CortexTrainingBuildDatasetOperator(
        task_id="build",
        sql=sql,
        sql_conn_id="warehouse",
        out=str(out),
        tokenizer=str(model_folder("tiny")),
        max_seq_len=64,
        **arguments,
    )


def test_rows_become_a_dataset(task_run, warehouse: Hook, tmp_path: Path) -> None:
    sql = "select PROMPT, COMPLETION from examples where KIND = :kind order by PROMPT"
    result = task_run("build").execute(build(tmp_path / "d", sql, parameters={"kind": "even"}))
    assert result["rows"] == 20
    assert Dataset.open(result["manifest"]).manifest.content_sha256 == result["content_sha256"]
    again = task_run("build").execute(build(tmp_path / "e", sql, parameters={"kind": "even"}))
    assert again["content_sha256"] == result["content_sha256"]
    assert warehouse.open == 0


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("select * from missing", r"query was refused through connection 'warehouse'.*no such table: missing"),
        ("select * from blank_examples", "no rows"),
        ("select KIND from examples", "KIND"),
        ("select PROMPT, null as COMPLETION from examples", "row 1"),
    ],
)
def test_unusable_rows_fail_for_good(task_run, warehouse: Hook, tmp_path: Path, sql: str, said: str) -> None:
    with pytest.raises(AirflowFailException, match=f"(?is){said}"):
        task_run("build").execute(build(tmp_path / "d", sql))
    assert warehouse.open == 0


def test_a_missing_tokenizer_is_named(task_run, warehouse: Hook, tmp_path: Path) -> None:
    operator = build(tmp_path / "d", "select * from examples")
    operator.tokenizer = str(tmp_path / "no-tokenizer")
    with pytest.raises(AirflowFailException, match="no-tokenizer"):
        task_run("build").execute(operator)


class TestFunctions:
    """A function instead of a query: its rows go straight into the dataset."""

    def build(self, out: Path, rows: object, **arguments: object) -> CortexTrainingBuildDatasetOperator:
        return CortexTrainingBuildDatasetOperator(
            task_id="build",
            rows=rows,
            out=str(out),
            tokenizer=str(model_folder("tiny")),
            max_seq_len=64,
            **arguments,
        )

    def test_rows_of_a_generator_with_arguments_and_context(self, task_run, tmp_path: Path) -> None:
        def numbers(first: int, *, count: int, dag_run=None):
            for n in range(first, first + count):
                yield {"prompt": f"What comes after {n} in {dag_run.run_id}?", "completion": f"{n + 1} does."}

        run = task_run("build")
        built = run.execute(self.build(tmp_path / "d", numbers, op_args=[3], op_kwargs={"count": 7}))
        assert built["rows"] == 7
        manifest = Dataset.open(built["manifest"]).manifest
        assert "numbers" in str(manifest.source)

    @pytest.mark.parametrize("given", [None, "rows", {"prompt": "a", "completion": "b"}, 7])
    def test_what_is_no_rows_is_named(self, task_run, tmp_path: Path, given: object) -> None:
        with pytest.raises(AirflowFailException, match="must return or yield rows"):
            task_run("build").execute(self.build(tmp_path / "d", lambda: given))

    def test_either_a_query_or_a_function(self, task_run, tmp_path: Path) -> None:
        for operator in (self.build(tmp_path / "d", None), self.build(tmp_path / "d", list, sql="select 1")):
            with pytest.raises(AirflowFailException, match="either sql or rows"):
                task_run("build").execute(operator)

    def test_the_decorator_makes_the_same_dataset(self, task_run, tmp_path: Path) -> None:
        import datetime

        from airflow.sdk import DAG, task

        def rows(count: int) -> list[dict[str, str]]:
            return [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(count)]

        common = {"tokenizer": str(model_folder("tiny")), "max_seq_len": 64}
        with DAG("d", schedule=None, start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)) as dag:
            # As DAGs spell it: Airflow finds the decorator through what the provider says of itself.
            made = task.cortex_training_dataset(out=str(tmp_path / "a"), **common)(rows)(5)
        operator = dag.get_task("rows")
        assert operator.multiple_outputs
        assert made["manifest"].key == "manifest"
        decorated = task_run("rows").execute(operator)
        plain = task_run("build").execute(self.build(tmp_path / "b", rows, op_args=[5]))
        assert decorated["content_sha256"] == plain["content_sha256"]


def test_arrow_batches_are_read_where_a_cursor_has_them(task_run, warehouse: Hook, tmp_path: Path, monkeypatch) -> None:
    import pyarrow

    sql = "select PROMPT, COMPLETION from examples order by PROMPT"
    by_row = task_run("build").execute(build(tmp_path / "rows", sql))
    used: list[str] = []

    def batches(cursor: _Cursor):
        used.append("arrow")
        rows = cursor.cursor.fetchall()
        names = [column[0] for column in cursor.description]
        for start in range(0, len(rows), 16):
            part = rows[start : start + 16]
            yield pyarrow.table({name: [row[i] for row in part] for i, name in enumerate(names)})

    monkeypatch.setattr(_Cursor, "fetch_arrow_batches", batches, raising=False)
    by_batch = task_run("build").execute(build(tmp_path / "batches", sql))
    assert used == ["arrow"]
    assert by_batch["content_sha256"] == by_row["content_sha256"]

    class NotSupportedError(Exception):
        """The result came as JSON."""

    def refuses(cursor: _Cursor):
        raise NotSupportedError

    monkeypatch.setattr(_Cursor, "fetch_arrow_batches", refuses)
    assert task_run("build").execute(build(tmp_path / "json", sql))["content_sha256"] == by_row["content_sha256"]
