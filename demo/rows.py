"""Rows that every machine with Python has: what the standard library says its functions, classes and methods do.

The source files are parsed, never imported. A row's prompt is a definition and a question about it; its completion is
the first sentences of the docstring.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from demo.recipes import TABLE

_HELD_OUT_IN_10000 = 210
_SIGNATURE_CHARACTERS = 120
_COMPLETION_CHARACTERS = 200
_INSERT_ROWS = 500
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "__pycache__", "ensurepip"}
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")

Split = Literal["train", "heldout"]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class ExampleRow:
    """One row of TRAINING_EXAMPLES; `split` says whether it may be trained on."""

    qualified_name: str
    prompt: str
    completion: str
    module: str
    split: Split


def standard_library_rows(library: Path | None = None) -> list[ExampleRow]:
    """The rows of the standard library in `library` (default: the running Python's), ordered by qualified name.

    A row is held out by a hash of its name, so the split is the same on every machine. A held-out answer is neither
    twice among the held-out rows nor anywhere among the others, whatever its case and punctuation; otherwise the
    evaluation would ask for what was learned by heart.
    """
    folder = library or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, ExampleRow] = {}
    for path in _sources(folder):
        module = _module_name(path.relative_to(folder))
        for name, definition in _documented(ast.parse(path.read_bytes())):
            row = _row(module, name, definition)
            if row is not None:
                found.setdefault(row.qualified_name, row)
    return _without_leaks([found[name] for name in sorted(found)])


def load_rows(connection: Any, rows: Sequence[ExampleRow] | None = None, table: str = TABLE) -> int:
    """Create `table` anew over a connection of the Snowflake connector and insert `rows`; returns how many there are.

    Values are bound in the connector's default style, which sends each block as one statement; binding on the server
    would send row after row to the compatible one.
    """
    rows = standard_library_rows() if rows is None else rows
    with connection.cursor() as cursor:
        cursor.execute(
            f"create or replace table {table} (QUALIFIED_NAME varchar, PROMPT varchar, COMPLETION varchar, MODULE "
            "varchar, SPLIT varchar)"
        )
        for start in range(0, len(rows), _INSERT_ROWS):
            cursor.executemany(
                f"insert into {table} (QUALIFIED_NAME, PROMPT, COMPLETION, MODULE, SPLIT) values (%s, %s, %s, %s, %s)",
                [
                    (row.qualified_name, row.prompt, row.completion, row.module, row.split)
                    for row in rows[start : start + _INSERT_ROWS]
                ],
            )
        (count,) = cursor.execute(f"select count(*) from {table}").fetchone()
    if count != len(rows):
        raise RuntimeError(f"{table} holds {count} rows after {len(rows)} were inserted")
    return int(count)


def write_jsonl(rows: Sequence[ExampleRow], path: Path) -> int:
    """Write rows as one JSON object a line, which is what the held-out evaluation reads."""
    path.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(folder).parts):
            yield path


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _documented(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Public definitions with a docstring in a module or class; also those that a condition or try statement chooses
    among."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.If, ast.Try)):
            yield from _documented(node, prefix)
        elif isinstance(node, Definition) and not node.name.startswith("_"):
            name = prefix + node.name
            if ast.get_docstring(node):
                yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, name + ".")


def _row(module: str, name: str, definition: Definition) -> ExampleRow | None:
    if any(part.startswith("_") and not part.startswith("__") for part in module.split(".")):
        return None
    completion = _summary(ast.get_docstring(definition) or "")
    if completion is None:
        return None
    qualified_name = f"{module}.{name}"
    return ExampleRow(
        qualified_name=qualified_name,
        prompt=f"{_signature(definition)}\nWhat {_question(definition, qualified_name)}?\n",
        completion=completion,
        module=module,
        split=_split(qualified_name),
    )


def _signature(definition: Definition) -> str:
    if isinstance(definition, ast.ClassDef):
        arguments, keyword = ", ".join(ast.unparse(base) for base in definition.bases), "class"
    else:
        arguments = ast.unparse(definition.args)
        keyword = "async def" if isinstance(definition, ast.AsyncFunctionDef) else "def"
    if len(arguments) > _SIGNATURE_CHARACTERS:
        arguments = arguments[:_SIGNATURE_CHARACTERS].rpartition(",")[0] + ", ..."
    return f"{keyword} {definition.name}({arguments})"


def _question(definition: Definition, qualified_name: str) -> str:
    return f"is {qualified_name}" if isinstance(definition, ast.ClassDef) else f"does {qualified_name} do"


def _summary(docstring: str) -> str | None:
    """The first sentences of the first paragraph, up to 200 characters; None when they are no prose or do not fit."""
    paragraph = re.split(r"\n\s*\n", inspect.cleandoc(docstring), maxsplit=1)[0]
    summary = ""
    for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
        longer = f"{summary} {sentence}".strip()
        if len(longer) > _COMPLETION_CHARACTERS:
            break
        summary = longer
    is_prose = len(summary.split()) >= 3 and summary[0].isalpha() and "->" not in summary and ">>>" not in summary
    return summary if is_prose else None


def _split(qualified_name: str) -> Split:
    bucket = int.from_bytes(hashlib.sha256(qualified_name.encode()).digest()[:8], "big") % 10000
    return "heldout" if bucket < _HELD_OUT_IN_10000 else "train"


def _without_leaks(rows: list[ExampleRow]) -> list[ExampleRow]:
    held_out: dict[str, str] = {}
    for row in rows:
        if row.split == "heldout":
            held_out.setdefault(_answer_key(row), row.qualified_name)
    return [row for row in rows if held_out.get(_answer_key(row), row.qualified_name) == row.qualified_name]


def _answer_key(row: ExampleRow) -> str:
    return " ".join(re.findall(r"\w+", row.completion.lower()))
