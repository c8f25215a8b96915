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
