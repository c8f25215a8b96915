"""Where a text is found in what an Airflow keeps: its files, and every table of its metadata database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sqlalchemy

from demo.airflow_cluster import AirflowCluster


def in_files(folder: Path, text: str) -> list[str]:
    """Files below an AIRFLOW_HOME, logs and an SQLite database included, that hold `text`."""
    wanted = {text.encode(), json.dumps(text)[1:-1].encode()}
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and any(form in content for content in [path.read_bytes()] for form in wanted)
    ]


def in_database(airflow: AirflowCluster, text: str) -> list[str]:
    """Tables that hold `text` in any column: arguments of triggers, events, XComs, connections, states."""
    engine = sqlalchemy.create_engine(airflow.database_url)
    wanted = {text, json.dumps(text)[1:-1]}
    found = []
    with engine.connect() as connection:
        for table in sqlalchemy.inspect(engine).get_table_names():
            for row in connection.execute(sqlalchemy.text(f'SELECT * FROM "{table}"')):
                if any(form in _text(value) for value in row for form in wanted):
                    found.append(table)
                    break
    engine.dispose()
    return found


def _text(value: Any) -> str:
    return bytes(value).decode(errors="replace") if isinstance(value, (bytes, memoryview)) else str(value)
