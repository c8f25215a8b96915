from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from demo.rows import ExampleRow, load_rows, standard_library_rows, write_jsonl
from demo.snowflake_server import SnowflakeServer

LIBRARY = {
    "shop/__init__.py": '''
raise RuntimeError("a source file was imported")

def buy(what, *, price=1):
    """Buy a thing
    for money. Returns the change.

    :param what: not part of the summary
    """

def _private():
    """Nobody asks about this one."""

def silent():
    pass

if True:
    async def wait(timeout: float = 1.0):
        """Wait until the shop opens."""
else:
    async def wait():
        """Never seen, being the second of its name."""

class Basket(list):
    """A list of things to buy."""

    def total(self):
        """Add up all the prices."""

        def inner():
            """Local functions are nobody's business."""

    def __len__(self):
        """Return the number of things."""
''',
    "shop/_internal.py": 'def hidden():\n    """Hidden with its module."""\n',
    "shop/usage.py": 'def shout():\n    """shout(text) -> str"""\ndef short():\n    """Too short."""\n',
    "test/test_shop.py": 'def helper():\n    """Tests are left out here."""\n',
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, source in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


@lru_cache(maxsize=1)
def real_rows() -> list[ExampleRow]:
    return standard_library_rows()


def test_public_documented_definitions_become_rows_without_being_imported(library: Path) -> None:
    rows = {row.qualified_name: row for row in standard_library_rows(library)}
    assert list(rows) == ["shop.Basket", "shop.Basket.total", "shop.buy", "shop.wait"]
    assert rows["shop.buy"].prompt == "def buy(what, *, price=1)\nWhat does shop.buy do?\n"
    assert rows["shop.buy"].completion == "Buy a thing for money. Returns the change."
    assert rows["shop.Basket"].prompt == "class Basket(list)\nWhat is shop.Basket?\n"
    assert rows["shop.wait"].prompt.startswith("async def wait(timeout: float=1.0)\n")
    assert rows["shop.wait"].completion == "Wait until the shop opens."
    assert {row.module for row in rows.values()} == {"shop"}


def test_a_held_out_answer_appears_nowhere_else(tmp_path: Path) -> None:
    alike = ["value", "Value", "value.", "VALUE!"]
    (tmp_path / "many.py").write_text(
        "".join(f'def f{n}():\n    """Return the present {alike[n % 4]}"""\n' for n in range(400))
    )
    rows = standard_library_rows(tmp_path)
    assert [row.split for row in rows] == ["heldout"]  # one of the held-out rows; all others give its answer away


def test_the_standard_library_has_enough_rows_of_both_kinds() -> None:
    rows = real_rows()
    splits = Counter(row.split for row in rows)
    assert splits["train"] >= 2000
    assert 64 <= splits["heldout"] <= 160
    assert len({row.qualified_name for row in rows}) == len(rows)
    assert [row.qualified_name for row in rows] == sorted(row.qualified_name for row in rows)
    trained_on = {" ".join(row.completion.lower().split()).rstrip(".") for row in rows if row.split == "train"}
    held_out = [" ".join(row.completion.lower().split()).rstrip(".") for row in rows if row.split == "heldout"]
    assert not trained_on.intersection(held_out)
    assert len(set(held_out)) == len(held_out)
    assert all(len(row.completion) <= 200 and row.prompt.endswith("?\n") for row in rows)


def test_the_same_library_gives_the_same_rows() -> None:
    assert standard_library_rows() == real_rows()


def test_rows_reach_the_table_through_the_connector_unchanged(snowflake: SnowflakeServer) -> None:
    awkward = ExampleRow(
        "a.b", 'it\'s "q"\\n\nWhat?\n', "100 % of $$ünï☂$$ \\' %s and $HOME -- or /* $THIS */", "a", "train"
    )
    rows = [*real_rows()[:700], *(row for row in real_rows()[700:] if "$" in row.completion), awkward]
    with snowflake.connect() as connection:
        assert load_rows(connection, rows, "LOADED") == len(rows)
        assert load_rows(connection, rows, "LOADED") == len(rows)  # anew, not on top
        found = (
            connection.cursor()
            .execute("select QUALIFIED_NAME, PROMPT, COMPLETION, MODULE, SPLIT from LOADED")
            .fetchall()
        )
    assert len(found) == len(rows)
    assert {ExampleRow(*values) for values in found} == set(rows)


def test_jsonl_holds_one_row_a_line(tmp_path: Path) -> None:
    rows = real_rows()[:5]
    assert write_jsonl(rows, tmp_path / "rows.jsonl") == 5
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [ExampleRow(**json.loads(line)) for line in lines] == rows
