"""SQL for the Snowflake connector: fakesnow, which runs Snowflake's dialect on DuckDB, inside this process.

Databases live in memory and end with the service. DuckDB may touch no file outside the folder of the stages and no
network address, so SQL reaches nothing else of this machine.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import snowflake.connector.errors
from fakesnow.expr import normalise_ident
from fakesnow.fakes import FakeSnowflakeConnection
from fakesnow.instance import FakeSnow
from fakesnow.transforms import stage
from fakesnow.variables import Variables

SqlError = (snowflake.connector.errors.ProgrammingError, snowflake.connector.errors.OperationalError)
"""What a statement raises that is wrong, or that fakesnow does not know."""

ACCOUNT = ROLE = WAREHOUSE = "LOCAL"
_FUNCTIONS = {
    "current_account": ACCOUNT,
    "current_account_name": ACCOUNT,
    "current_organization_name": ACCOUNT,
    "current_region": "LOCAL",
    "current_role": ROLE,
    "current_warehouse": WAREHOUSE,
}
"""Context functions that fakesnow does not have, and what they say here."""
warnings.filterwarnings("ignore", message="Arrow output on a DB-API result", category=UserWarning, module="fakesnow")
_QUOTED = re.compile(r"('(?:[^'\\]|\\.|'')*'|--[^\n]*|/\*.*?\*/)", re.DOTALL)


@dataclass(frozen=True)
class SqlResult:
    """Columns as (name, type code of the connector), and rows of Python values."""

    columns: list[tuple[str, int]]
    rows: list[tuple[Any, ...]]


class SqlEngine:
    """Databases shared by all sessions of this process. Methods block; call them in threads."""

    def __init__(self, stages: Path) -> None:
        stages = stages.resolve()
        stages.mkdir(parents=True, exist_ok=True)
        keep_variables_out_of_text()
        stage.LOCAL_BUCKET_PATH = str(stages)
        self._lock = threading.Lock()
        self._snow = FakeSnow()
        # In this order: once outside access is off, DuckDB lets nobody widen it again.
        self._snow.duck_conn.execute(f"SET allowed_directories = ['{_quoted(str(stages) + os.sep)}']")
        self._snow.duck_conn.execute("SET enable_external_access = false")

    def connect(
        self, database: str | None, schema: str | None, user: str, *, autocommit: bool = True
    ) -> FakeSnowflakeConnection:
        """A session's connection; database and schema are created if need be."""
        with self._lock:
            connection = self._snow.connect(
                normalise_ident(database) if database else None,
                normalise_ident(schema) if schema else None,
                autocommit=autocommit,
            )
        for name, value in {**_FUNCTIONS, "current_user": user.upper()}.items():
            connection._duck_conn.execute(f"CREATE OR REPLACE TEMP MACRO {name}() AS '{_quoted(value)}'")
        return connection

    def run(self, statement: str, database: str | None, schema: str | None, user: str) -> SqlResult:
        """One statement in a session of its own. Raises one of `SqlError`."""
        connection = self.connect(database, schema, user)
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            columns = [(column.name, int(column.type_code)) for column in cursor.description]
            return SqlResult(columns, [tuple(row) for row in cursor.fetchall()])
        finally:
            connection.close()


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def keep_variables_out_of_text() -> None:
    """fakesnow takes ``$HOME`` for a session variable even inside a string; Snowflake does not, and rows hold such
    text."""
    expand = Variables.inline_variables
    if getattr(expand, "outside_text_only", False):
        return

    def expand_outside_text(self: Variables, sql: str) -> str:
        # Splitting by one group puts literals and comments at the odd places.
        parts = _QUOTED.split(sql)
        return "".join(part if place % 2 else expand(self, part) for place, part in enumerate(parts))

    expand_outside_text.outside_text_only = True  # type: ignore[attr-defined]
    Variables.inline_variables = expand_outside_text  # type: ignore[method-assign]
