"""``LIST`` and ``GET`` of an experiment run's files, as the connector asks for them in SQL and fetches them by link."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cortex_training.local.artifacts import RunArtifacts, RunFile
from cortex_training.local.refusals import Refusal

_LITERAL = r"'(?:[^'\\]|\\.|'')*'|[^\s';]+"
_STATEMENT = re.compile(
    rf"\s*(?P<verb>LIST|LS|GET)\s+(?P<source>{_LITERAL})(?:\s+(?P<target>{_LITERAL}))?(?:\s+PARALLEL\s*=\s*\d+)?\s*;?\s*",
    re.IGNORECASE | re.DOTALL,
)
_LOCATION = re.compile(r"snow://experiment/(?P<experiment>[^/]+)/versions/(?P<run>[^/]+)/(?P<path>.*)", re.DOTALL)
_ESCAPED = re.compile(r"''|\\(.)", re.DOTALL)
_LINK_S = 900.0


@dataclass(frozen=True)
class FileStatement:
    """A statement about ``snow://experiment/…``; `target` is the caller's folder for a GET."""

    experiment: str
    run: str
    path: str
    target: str | None


def read_statement(sql: str) -> FileStatement | None:
    """None for anything else, which is SQL. Raises Refusal (400) for a GET without a folder."""
    match = _STATEMENT.fullmatch(sql)
    location = _LOCATION.fullmatch(_text(match["source"])) if match else None
    if match is None or location is None:
        return None
    target = _text(match["target"]).removeprefix("file://") if match["target"] else None
    if (match["verb"].upper() == "GET") != (target is not None):
        raise Refusal(400, f"{match['verb'].upper()} of an experiment run: LIST takes a path, GET a path and a folder")
    return FileStatement(location["experiment"], location["run"], location["path"], target)


class SnowflakeFiles:
    """Answers file statements. `jobs_of_run` finds the jobs whose files an experiment run holds; None: no such run."""

    def __init__(self, artifacts: RunArtifacts, jobs_of_run: Callable[[str, str], list[str] | None]) -> None:
        self._artifacts = artifacts
        self._jobs_of_run = jobs_of_run
        self._key = secrets.token_bytes(32)

    def answer(self, statement: FileStatement, base_url: str) -> dict[str, Any]:
        """The `data` of a query response. Raises Refusal (404) for a run that does not exist or a file it has not."""
        found = self._find(statement)
        if statement.target is None:
            return _listing(statement.run, [file for _, file in found])
        wanted = [(job, file) for job, file in found if statement.path in (file.path, "") or statement.path[-1] == "/"]
        if not wanted:
            raise Refusal(404, f"the run {statement.run!r} has no file {statement.path!r}")
        return {
            "command": "DOWNLOAD",
            "src_locations": [file.path for _, file in wanted],
            "localLocation": statement.target,
            # Of the places a connector can fetch from, the one where a link alone is enough.
            "stageInfo": {"locationType": "GCS", "location": "runs/", "path": "", "region": "local", "creds": {}},
            "presignedUrls": [f"{base_url}/stage-files/{self._link(job, file.path)}" for job, file in wanted],
            "encryptionMaterial": [],
            "parallel": 4,
            "queryId": str(uuid.uuid4()),
        }

    def open(self, expires: str, signature: str, job_id: str, name: str) -> Path:
        """The file behind a link. Raises Refusal: 400 for one that has expired or was never made, which makes the
        connector ask for another, 404 for a file that is gone.
        """
        good = hmac.compare_digest(signature, self._signature(expires, job_id, name))
        if not good or not expires.isdigit() or time.time() >= int(expires):
            raise Refusal(400, "this link has expired or never existed; ask for the file again")
        return self._artifacts.open(job_id, name)

    def _find(self, statement: FileStatement) -> list[tuple[str, RunFile]]:
        jobs = self._jobs_of_run(statement.experiment, statement.run)
        if jobs is None:
            raise Refusal(404, f"Experiment run {statement.experiment}/{statement.run} does not exist")
        return [
            (job_id, file)
            for job_id in jobs
            for file in self._artifacts.files(job_id)
            if file.path.startswith(statement.path)
        ]

    def _link(self, job_id: str, name: str) -> str:
        expires = str(int(time.time() + _LINK_S))
        return quote(f"{expires}/{self._signature(expires, job_id, name)}/{job_id}/{name}")

    def _signature(self, expires: str, job_id: str, name: str) -> str:
        # "/" is in no job id, so that two different links never have the same text.
        return hmac.new(self._key, f"{expires}/{job_id}/{name}".encode(), hashlib.sha256).hexdigest()


def stage_headers(content: bytes) -> dict[str, str]:
    """What a connector wants to know of a file besides its bytes."""
    return {"x-goog-meta-sfc-digest": base64.b64encode(hashlib.sha256(content).digest()).decode()}


def _text(literal: str) -> str:
    if not literal.startswith("'"):
        return literal
    return _ESCAPED.sub(lambda escaped: escaped[1] or "'", literal[1:-1])


def _listing(run: str, files: list[RunFile]) -> dict[str, Any]:
    rows = [
        [f"/versions/{run}/{file.path}", str(file.size), file.md5, formatdate(file.modified, usegmt=True)]
        for file in files
    ]
    columns = [("name", "text"), ("size", "fixed"), ("md5", "text"), ("last_modified", "text")]
    return {
        "parameters": [],
        "rowtype": [_column(name, kind) for name, kind in columns],
        "rowset": rows,
        "total": len(rows),
        "returned": len(rows),
        "queryId": str(uuid.uuid4()),
        "queryResultFormat": "json",
        "statementTypeId": 4096,
    }


def _column(name: str, kind: str) -> dict[str, Any]:
    number = kind == "fixed"
    return {
        "name": name,
        "type": kind,
        "nullable": True,
        "length": None if number else 16777216,
        "byteLength": None if number else 16777216,
        "precision": 38 if number else None,
        "scale": 0 if number else None,
        "database": "",
        "schema": "",
        "table": "",
        "collation": None,
    }
