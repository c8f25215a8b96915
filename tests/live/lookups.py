"""A secrets backend that holds no secrets and writes down, per process, which connections were asked for."""

from __future__ import annotations

import os
from typing import Any

from airflow.secrets import BaseSecretsBackend

LOOKUPS_VARIABLE = "CONNECTION_LOOKUPS"


class CountedLookups(BaseSecretsBackend):
    """Appends ``<process id> <connection id>`` to the file that `LOOKUPS_VARIABLE` names."""

    def get_conn_value(self, conn_id: str, team_name: str | None = None) -> str | None:
        with open(os.environ[LOOKUPS_VARIABLE], "a") as file:
            file.write(f"{os.getpid()} {conn_id}\n")
        return None

    def get_variable(self, key: str, team_name: str | None = None) -> str | None:
        return None

    def get_config(self, key: str) -> Any:
        return None
