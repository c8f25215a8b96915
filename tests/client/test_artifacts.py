"""Logs, console output and metrics from an experiment run's stage."""

from __future__ import annotations

import gzip
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from cortex_training import artifacts
from cortex_training.errors import ConfigurationError, ProtocolError

RUN = {"experiment_name": "DB.S.EXP'1", "experiment_run_name": "RUN"}
BASE = "snow://experiment/DB.S.EXP'1/versions/RUN/"


class FakeStageConnection:
    """Answers LIST and GET as Snowflake does, from files in memory; a real stage needs an account."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.statements: list[str] = []
        self.listed_prefix = "/versions/RUN/"
        self.broken: set[str] = set()
        self.closed = False

    def cursor(self) -> FakeStageConnection:
        return self

    def execute(self, statement: str) -> None:
        self.statements.append(statement)
        texts = [text.replace("''", "'") for text in re.findall(r"'((?:[^']|'')*)'", statement)]
        assert texts[0].startswith(BASE), statement
        path = texts[0].removeprefix(BASE)
        self._rows: list[Any] = []
        if statement.startswith("LIST "):
            self._rows = [(f"{self.listed_prefix}{name}", 1) for name in self.files if name.startswith(path)]
            return
        if path in self.broken:
            raise RuntimeError("stage is down")
        folder = Path(unquote(urlsplit(texts[1]).path))
        (folder / path.rpartition("/")[2]).write_bytes(self.files[path])

    def fetchall(self) -> list[Any]:
        return self._rows

    def close(self) -> None:
        self.closed = True


def stage_of(files: dict[str, bytes]) -> tuple[artifacts.ConnectorStage, FakeStageConnection]:
    connection = FakeStageConnection(files)
    return artifacts.ConnectorStage(connection, RUN), connection


def chunk(text: str) -> bytes:
    return gzip.compress(text.encode())


CHUNKS = {
    "_stdout/j:training:0/console.20260101-000002.b.gz": chunk("two\n"),
    "_stdout/j:training:0/console.20260101-000001.a.gz": chunk("one\n"),
    "_stdout/j:training:0/notes.txt": b"no chunk",
    "_stdout/k:training:0/console.20260101-000001.a.gz": chunk("another job\n"),
    "checkpoints/_stdout/j:sampling:0/console.20260101-000001.a.gz": chunk("sampler\n"),
}


def test_execution_logs_of_the_jobs_own_sub_jobs_are_fetched_from_both_places() -> None:
    stage, connection = stage_of(
        {
            "_logs/j:training:0/execution.jsonl": b"{}\n",
            "_logs/j:training:0/deep/er.log": b"\xff ok",
            "_logs/k:training:0/execution.jsonl": b"other job",
            "_logs/jj:training:0/x": b"other job",
            "checkpoints/_logs/j/driver.log": b"driver",
        }
    )
    connection.broken.add("_logs/j:training:0/execution.jsonl")
    logs = artifacts.fetch_execution_logs(stage, "j")
    assert [(log["sub_job_id"], log["filename"], log["content"]) for log in logs] == [
        ("j:training:0", "deep/er.log", "\ufffd ok"),
        ("j:training:0", "execution.jsonl", ""),
        ("j", "driver.log", "driver"),
    ]
    assert logs[1]["error"] == "RuntimeError: stage is down"
    assert logs[0]["artifact_uri"] == f"{BASE}_logs/j:training:0/deep/er.log"
    assert connection.statements[0] == "LIST 'snow://experiment/DB.S.EXP''1/versions/RUN/_logs/'"


def test_chunks_are_put_together_in_the_order_of_their_times(tmp_path: Path) -> None:
    stage, _ = stage_of(CHUNKS)
    results = artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    assert [result["sub_job_id"] for result in results] == ["j:sampling:0", "j:training:0"]
    assert (tmp_path / "j:training:0" / "stdout.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "j:sampling:0" / "stdout.log").read_text() == "sampler\n"
    assert results[1]["chunk_count"] == 2
    assert results[1]["saved_path"] == str(tmp_path / "j:training:0" / "stdout.log")
    assert results[1]["first_artifact_uri"].endswith("console.20260101-000001.a.gz")
    assert not (tmp_path / "k:training:0").exists()
    assert (tmp_path / "j:training:0" / "stdout.log").stat().st_mode & 0o777 == 0o600


def test_metrics_are_put_together_the_same_way(tmp_path: Path) -> None:
    stage, _ = stage_of({"_metrics/j:training:0/gpu.20260101-000001.a.gz": chunk('{"kind": "gpu"}\n')})
    artifacts.download_chunked(stage, artifacts.METRICS, "j", tmp_path)
    assert (tmp_path / "j:training:0" / "gpu.jsonl").read_text() == '{"kind": "gpu"}\n'


def test_no_chunks_give_no_files(tmp_path: Path) -> None:
    stage, _ = stage_of({})
    assert artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"not gzip", chunk("x" * 5000)[:20]], ids=["no gzip", "cut off"])
def test_a_damaged_chunk_keeps_the_old_files_and_leaves_nothing_behind(tmp_path: Path, damage: bytes) -> None:
    stage, connection = stage_of(dict(CHUNKS))
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    connection.files["_stdout/j:training:0/console.20260101-000003.c.gz"] = damage
    connection.files["checkpoints/_stdout/j:sampling:0/console.20260101-000002.b.gz"] = chunk("more\n")
    with pytest.raises(ProtocolError, match="20260101-000003"):
        artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    assert (tmp_path / "j:training:0" / "stdout.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "j:sampling:0" / "stdout.log").read_text() == "sampler\n"
    assert not list(tmp_path.rglob("*.tmp"))


def test_chunks_in_two_places_are_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    stage, connection = stage_of(
        {f"{place}_stdout/j:training:0/console.20260101-000001.a.gz": chunk("x") for place in ("", "checkpoints/")}
    )
    with pytest.raises(ProtocolError, match="two places"):
        artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    assert not [statement for statement in connection.statements if statement.startswith("GET")]


def test_resume_fetches_only_what_is_new(tmp_path: Path) -> None:
    stage, connection = stage_of(dict(CHUNKS))
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    connection.files["_stdout/j:training:0/console.20260101-000003.c.gz"] = chunk("three\n")
    connection.statements.clear()
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path, resume=True)
    assert (tmp_path / "j:training:0" / "stdout.log").read_text() == "one\ntwo\nthree\n"
    fetched = [statement for statement in connection.statements if statement.startswith("GET")]
    assert len(fetched) == 1
    assert "000003" in fetched[0]


def test_resume_cuts_what_a_crash_left_beyond_the_manifest(tmp_path: Path) -> None:
    stage, _ = stage_of(CHUNKS)
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    log = tmp_path / "j:training:0" / "stdout.log"
    log.write_text(log.read_text() + "half a li")
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path, resume=True)
    assert log.read_text() == "one\ntwo\n"


@pytest.mark.parametrize("manifest", ["{broken", "[]", '{"version": 9, "names": [], "bytes": 1}', '{"version": 1}'])
def test_resume_starts_over_when_its_manifest_says_nothing(tmp_path: Path, manifest: str) -> None:
    stage, _ = stage_of(CHUNKS)
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    (tmp_path / "j:training:0" / ".stdout.log.manifest.json").write_text(manifest)
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path, resume=True)
    assert (tmp_path / "j:training:0" / "stdout.log").read_text() == "one\ntwo\n"


def test_resume_starts_over_when_a_late_chunk_belongs_in_the_middle(tmp_path: Path) -> None:
    stage, connection = stage_of(dict(CHUNKS))
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    connection.files["_stdout/j:training:0/console.20260101-000000.z.gz"] = chunk("zero\n")
    artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path, resume=True)
    assert (tmp_path / "j:training:0" / "stdout.log").read_text() == "zero\none\ntwo\n"


@pytest.mark.parametrize(
    "name", ["_stdout/../../etc/passwd", "_stdout//x", "_stdout/j:t:0/a\\b", "/etc/passwd", "other/x"]
)
def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    stage, connection = stage_of({"_stdout/x": b""})
    connection.execute = lambda statement: setattr(connection, "_rows", [(f"/versions/RUN/{name}", 1)])  # type: ignore[method-assign]
    with pytest.raises((ConfigurationError, ProtocolError)):
        artifacts.download_chunked(stage, artifacts.STDOUT, "j", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_run_are_refused() -> None:
    stage, connection = stage_of({"_logs/j/x": b""})
    connection.listed_prefix = "/versions/OTHER/"
    with pytest.raises(ProtocolError, match="not in the run"):
        artifacts.fetch_execution_logs(stage, "j")


@pytest.mark.parametrize("run", [{}, {"experiment_name": "E"}, {"experiment_name": "", "experiment_run_name": "R"}])
def test_a_run_without_names_is_an_error(run: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="experiment"):
        artifacts.ConnectorStage(FakeStageConnection({}), run)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeStageConnection], list[dict[str, Any]]]:
    """Put a fake `snowflake.connector` in place that opens the given connection; returns how it was called."""

    def install(connection: FakeStageConnection) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def connect(**arguments: Any) -> FakeStageConnection:
            calls.append(arguments)
            return connection

        package, module = types.ModuleType("snowflake"), types.ModuleType("snowflake.connector")
        module.connect = connect  # type: ignore[attr-defined]
        package.connector = module  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "snowflake", package)
        monkeypatch.setitem(sys.modules, "snowflake.connector", module)
        return calls

    return install


def test_a_client_with_a_token_opens_the_stage_as_its_user(
    clients: Any, weather: Any, scripted: Any, connector: Any, tmp_path: Path
) -> None:
    connection = FakeStageConnection(CHUNKS)
    calls = connector(connection)

    def respond(seen: Any) -> Any:
        if seen.target == "/api/v2/statements":
            assert json.loads(seen.body)["statement"] == "SELECT CURRENT_USER(), CURRENT_ROLE()"
            return scripted.Reply(body={"data": [["ANN", "TRAINER"]]})
        return scripted.Reply(body=RUN)

    weather.script = respond
    client = clients.from_pat(weather.url)
    results = client.download_stdout_logs("j", tmp_path)
    assert len(results) == 2
    assert client.fetch_execution_logs("j") == []
    assert client.download_metrics("j", tmp_path) == []
    assert connection.closed
    assert calls[0] == {
        "host": "127.0.0.1",
        "port": urlsplit(weather.url).port,
        "protocol": "http",
        "account": "127.0.0.1",
        "user": "ANN",
        "role": "TRAINER",
        "authenticator": "PROGRAMMATIC_ACCESS_TOKEN",
        "token": "secret-token-value",
        "database": "DB",
        "schema": "PUBLIC",
    }


def test_a_client_without_a_snowflake_credential_says_what_is_needed(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body=RUN))
    with pytest.raises(ConfigurationError, match="NoAuth"):
        clients(weather.url).fetch_execution_logs("j")
