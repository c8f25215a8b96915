"""Where rows come from, and which of their columns are text to train on.

Three kinds of sources read alike: an iterable of mappings, a DB-API cursor that has executed a query, and Arrow
tables or record batches. Rows are pulled one block at a time, so a source of any length takes the memory of one
block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortex_training.errors import ConfigurationError

_BLOCK_ROWS = 1000
_TEXT_COLUMNS = ("prompt", "completion", "messages", "text")


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and the answer to learn; the model is trained on the answer only."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Chat messages, each with `role` and `content`; the model is trained on the assistant's."""

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class PlainText:
    """Text to learn from its first token to its last."""

    text: str


Content = PromptCompletion | Conversation | PlainText


@dataclass(frozen=True)
class Row:
    """One training example; `number` counts from 1 in the order of the source."""

    number: int
    content: Content


def read_rows(rows: Any) -> Iterator[Row]:
    """Read every row of `rows`: mappings, a DB-API cursor, or Arrow tables and record batches (one of them or an
    iterable).

    Column names are folded to lower case, because Snowflake answers ``PROMPT`` to ``select prompt``. A row is a
    prompt with its completion, or `messages` (a list, or its JSON text, which is how a VARIANT column arrives), or
    `text`. Columns of other names are ignored, and so is a text column that is null.

    Raises ConfigurationError for a source that cannot be read as rows and for a row without text, with two forms of
    text, or with a value of the wrong type; the message names the row's number and its columns.
    """
    for number, columns in enumerate(_mappings(rows), start=1):
        yield Row(number, _content(number, columns))


def _mappings(rows: Any) -> Iterator[Mapping[Any, Any]]:
    if hasattr(rows, "fetchmany") and hasattr(rows, "description"):
        yield from _cursor_mappings(rows)
    elif _is_arrow(rows):
        yield from _arrow_mappings(rows)
    elif isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise ConfigurationError(
            f"rows: cannot read rows from {type(rows).__name__}; pass an iterable of mappings, a DB-API cursor that "
            "has executed a query, or Arrow tables or record batches"
        )
    else:
        for position, item in enumerate(rows, start=1):
            if isinstance(item, Mapping):
                yield item
            elif _is_arrow(item):
                yield from _arrow_mappings(item)
            else:
                raise ConfigurationError(
                    f"rows: item {position} is {_described(item)}, not a mapping of column names to values; pass the "
                    "cursor itself instead of its tuples, or dict(zip(names, values)) for each row"
                )


def _cursor_mappings(cursor: Any) -> Iterator[Mapping[Any, Any]]:
    if cursor.description is None:
        raise ConfigurationError(
            "rows: the cursor has no result to read (its description is None); execute a SELECT on it first"
        )
    names = [column[0] for column in cursor.description]
    while block := cursor.fetchmany(_BLOCK_ROWS):
        for values in block:
            yield values if isinstance(values, Mapping) else dict(zip(names, values, strict=True))


def _is_arrow(value: Any) -> bool:
    return hasattr(value, "schema") and (hasattr(value, "to_pylist") or hasattr(value, "read_next_batch"))


def _arrow_mappings(value: Any) -> Iterator[Mapping[Any, Any]]:
    if hasattr(value, "read_next_batch"):
        for batch in value:
            yield from _arrow_mappings(batch)
        return
    for start in range(0, value.num_rows, _BLOCK_ROWS):
        yield from value.slice(start, _BLOCK_ROWS).to_pylist()


def _content(number: int, columns: Mapping[Any, Any]) -> Content:
    found = _text_columns(number, columns)
    forms: list[str] = [name for name in ("messages", "text") if name in found]
    if "prompt" in found or "completion" in found:
        forms.append("prompt/completion")
    if len(forms) > 1:
        raise ConfigurationError(
            f"rows: row {number} has text in {' and in '.join(forms)}; select the columns of one form only, because "
            "they would be trained on differently"
        )
    if not forms:
        names = ", ".join(str(name) for name in columns) or "none"
        raise ConfigurationError(
            f"rows: row {number} has no text: its columns are {names}, and none of prompt and completion, messages, or "
            "text has a value; rename a column in the query (select question as prompt, answer as completion) or leave "
            "out empty rows"
        )
    if "messages" in found:
        return Conversation(_messages(number, found["messages"]))
    if "text" in found:
        return PlainText(_text(number, "text", found["text"]))
    for name, partner in (("prompt", "completion"), ("completion", "prompt")):
        if name not in found:
            raise ConfigurationError(
                f"rows: row {number} has a {partner} but no {name}; give each row both, or use the column text for "
                "rows without a prompt"
            )
    return PromptCompletion(_text(number, "prompt", found["prompt"]), _text(number, "completion", found["completion"]))


def _text_columns(number: int, columns: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in columns.items():
        folded = str(name).lower()
        if folded not in _TEXT_COLUMNS or value is None:
            continue
        if folded in found:
            raise ConfigurationError(
                f"rows: row {number} has two columns called {folded} when case is ignored; rename one of them in the "
                "query"
            )
        found[folded] = value
    return found


def _text(number: int, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(
            f"rows: row {number}: {name} is {_described(value)}, not text; cast it in the query ({name}::varchar)"
        )
    if not value.strip():
        raise ConfigurationError(f"rows: row {number}: {name} is empty; leave such rows out in the query")
    return value


def _messages(number: int, value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigurationError(
                f"rows: row {number}: messages is text but not JSON ({error}); "
                'store a JSON list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
                '"..."}]'
            ) from None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise ConfigurationError(
            f"rows: row {number}: messages is {_described(value)}, not a list of messages; "
            'pass [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise ConfigurationError(
                f"rows: row {number}: messages[{index}] is {_described(message)}, not an object with role and content"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ConfigurationError(
                    f"rows: row {number}: messages[{index}].{key} is {_described(message.get(key))}, not text; each "
                    "message needs role and content as text"
                )
    # An Arrow list of structs gives every message every field; a template would take a null field for a present one.
    return tuple({key: item for key, item in message.items() if item is not None} for message in value)


def _described(value: Any) -> str:
    """The type of `value` for an error message; not the value itself, which may be a customer's text."""
    return "null" if value is None else f"of type {type(value).__name__}"
