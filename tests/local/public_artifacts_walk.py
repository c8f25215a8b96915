"""Runs in a Python with the public client and a Snowflake connector: what a job left, by a programmatic access token.

Arguments: host:port of a service with TLS, the token, a job's id, a folder for downloads. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import snowflake.connector

from cortex_training.client import CortexTrainingClient

address, token, job_id, folder = sys.argv[1:]
host, _, port = address.partition(":")
connect = snowflake.connector.connect


def connect_to_port(**arguments: Any) -> Any:
    """The public client knows neither a port nor a certificate; an account needs none."""
    assert arguments["host"] == address
    own = {"host": host, "port": int(port), "extra_root_store_path": os.environ["REQUESTS_CA_BUNDLE"]}
    return connect(**{**arguments, **own})


snowflake.connector.connect = connect_to_port
client = CortexTrainingClient.from_pat(address, token, database="TESTS", schema="PUBLIC")
seen = {
    "logs": client.fetch_execution_logs(job_id),
    "stdout": client.download_stdout_logs(job_id, folder),
    "metrics": client.download_metrics(job_id, folder),
}
print(json.dumps(seen))
