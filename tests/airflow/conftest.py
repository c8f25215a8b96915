"""Airflow without its processes: settings of its own, so that no test reads or writes a real AIRFLOW_HOME.

The variables must be set before the first import of airflow, which is why they stand here and not in a fixture.
"""

from __future__ import annotations

import json
import os
import tempfile

_HOME = tempfile.TemporaryDirectory(prefix="airflow-home-")
os.environ["AIRFLOW_HOME"] = _HOME.name
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ["AIRFLOW__CORE__UNIT_TEST_MODE"] = "False"

import pytest  # noqa: E402

PAT = "pat-0123456789-very-secret"


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch):
    """Defines a connection the way users do in deployments: `connection("ct", host=..., database=...)`."""

    def define(
        conn_id: str = "ct", *, host: str = "https://acme.example", password: str = PAT, **fields: object
    ) -> str:
        schema = fields.pop("schema", "PUBLIC")
        extra = {"database": "TRAINING", **fields}
        document = {
            "conn_type": "cortex_training",
            "host": host,
            "schema": schema,
            "password": password,
            "extra": {name: value for name, value in extra.items() if value is not None},
        }
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(document))
        return conn_id

    return define
