from __future__ import annotations

import json
import sqlite3
from typing import Any

import pyarrow as pa
import pytest

from cortex_training.datasets.rows import Conversation, PlainText, PromptCompletion, Row, read_rows
from cortex_training.errors import ConfigurationError

PAIR = {"PROMPT": "q", "COMPLETION": "a", "MODULE": "json"}
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def the_error(rows: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        list(read_rows(rows))
    return str(caught.value)


def test_mappings_are_numbered_from_one_and_upper_case_names_are_folded() -> None:
    assert list(read_rows([PAIR, {"Text": "t"}])) == [
        Row(1, PromptCompletion("q", "a")),
        Row(2, PlainText("t")),
    ]


def test_any_dbapi_cursor_is_read_with_its_column_names() -> None:
    cursor = sqlite3.connect(":memory:").execute("select 'q' as PROMPT, 'a' as COMPLETION, 7 as ID")
    assert list(read_rows(cursor)) == [Row(1, PromptCompletion("q", "a"))]


def test_a_cursor_is_read_in_blocks_and_not_at_once() -> None:
    class Cursor:
        description = (("TEXT", None),)
        fetched = 0

        def fetchmany(self, size: int) -> list[tuple[str]]:
            self.fetched += 1
            return [("row",)] * size if self.fetched <= 3 else []

    cursor = Cursor()
    rows = read_rows(cursor)
    next(rows)
    assert cursor.fetched == 1
    assert sum(1 for _ in rows) == 2999


def test_a_cursor_of_mappings_is_read_as_mappings() -> None:
    connection = sqlite3.connect(":memory:")
    connection.row_factory = lambda cursor, values: dict(zip([c[0] for c in cursor.description], values, strict=True))
    assert list(read_rows(connection.execute("select 't' as TEXT"))) == [Row(1, PlainText("t"))]


def test_a_cursor_that_executed_nothing_is_refused() -> None:
    assert "execute a SELECT" in the_error(sqlite3.connect(":memory:").cursor())


@pytest.mark.parametrize(
    "source",
    [
        pa.table({"PROMPT": ["q", "r"], "COMPLETION": ["a", "b"]}),
        pa.table({"PROMPT": ["q", "r"], "COMPLETION": ["a", "b"]}).to_reader(1),
        pa.record_batch({"PROMPT": ["q", "r"], "COMPLETION": ["a", "b"]}),
        [pa.table({"PROMPT": ["q"], "COMPLETION": ["a"]}), pa.record_batch({"PROMPT": ["r"], "COMPLETION": ["b"]})],
    ],
    ids=["table", "reader", "batch", "iterable"],
)
def test_arrow_data_is_read_whatever_it_comes_in(source: Any) -> None:
    assert list(read_rows(source)) == [Row(1, PromptCompletion("q", "a")), Row(2, PromptCompletion("r", "b"))]


def test_messages_come_as_a_list_or_as_the_json_text_of_a_variant_column() -> None:
    expected = Conversation(tuple(MESSAGES))
    assert [row.content for row in read_rows([{"messages": MESSAGES}, {"MESSAGES": json.dumps(MESSAGES)}])] == [
        expected,
        expected,
    ]


def test_null_fields_of_an_arrow_struct_are_not_passed_to_the_template() -> None:
    table = pa.table({"messages": [[{**MESSAGES[0], "name": "Ann"}, MESSAGES[1]]]})
    (row,) = read_rows(table)
    assert row.content == Conversation(({**MESSAGES[0], "name": "Ann"}, MESSAGES[1]))


def test_a_row_without_text_names_its_number_and_its_columns() -> None:
    message = the_error([PAIR, {"QUESTION": "q", "ANSWER": "a"}])
    assert "row 2" in message
    assert "QUESTION, ANSWER" in message
    assert "select question as prompt" in message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q", "completion": None}, ["row 1", "no completion"]),
        ({"completion": "a"}, ["row 1", "no prompt"]),
        ({"prompt": "q", "completion": 5}, ["row 1", "completion", "int", "::varchar"]),
        ({"prompt": "q", "completion": "  "}, ["row 1", "completion is empty"]),
        ({"text": b"raw"}, ["row 1", "text", "bytes"]),
        ({"text": "t", "prompt": "q", "completion": "a"}, ["row 1", "text and in prompt/completion"]),
        ({"text": "t", "TEXT": "u"}, ["row 1", "two columns called text"]),
        ({"messages": "hello"}, ["row 1", "not JSON"]),
        ({"messages": []}, ["row 1", "not a list of messages"]),
        ({"messages": {"role": "user"}}, ["row 1", "not a list of messages"]),
        ({"messages": ["hello"]}, ["row 1", "messages[0]", "str"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["row 1", "messages[0].content", "list"]),
        ({"messages": [{"content": "q"}]}, ["row 1", "messages[0].role", "null"]),
    ],
)
def test_bad_values_name_the_row_the_column_and_what_is_wrong(row: dict[str, Any], words: list[str]) -> None:
    message = the_error([row])
    assert all(word in message for word in words), message


def test_no_error_shows_a_row_s_text() -> None:
    for row in ({"prompt": "the customer's secret", "completion": 5}, {"messages": "the customer's secret"}):
        assert "customer" not in the_error([row])


@pytest.mark.parametrize("source", ["select 1", {"prompt": "q"}, 5, None])
def test_things_that_are_not_rows_are_refused(source: Any) -> None:
    assert "cannot read rows from" in the_error(source)


def test_tuples_without_names_are_refused_with_the_fix() -> None:
    message = the_error([("q", "a")])
    assert "item 1" in message
    assert "pass the cursor itself" in message
