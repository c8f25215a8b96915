"""Files of experiment runs on disk, and the certificate, by themselves."""

from __future__ import annotations

import gzip
import json
import re
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cortex_training.local import artifacts as artifacts_module
from cortex_training.local.artifacts import RunArtifacts
from cortex_training.local.refusals import Refusal
from cortex_training.local.sub_job_log import SubJobLog
from cortex_training.local.tls import tls_files
from tests.conftest import ServiceFactory
from tests.local.api import Caller, training
from tests.local.connector import connect

JOB, SUB_JOB = "job-1", "job-1:training:0"


def entry(message: str) -> dict[str, Any]:
    return {"ts": "2026-01-01T00:00:00.000Z", "level": "INFO", "logger": "l", "message": message}


def console(artifacts: RunArtifacts) -> str:
    chunks = [file.path for file in artifacts.files(JOB) if file.path.startswith("_stdout/")]
    return "".join(gzip.decompress(artifacts.open(JOB, path).read_bytes()).decode() for path in sorted(chunks))


def test_lines_are_in_the_execution_log_at_once_and_on_the_console_when_sealed(tmp_path: Path) -> None:
    artifacts = RunArtifacts(tmp_path, seal_s=3600.0)
    log = SubJobLog(lambda entry: artifacts.log(JOB, SUB_JOB, entry))
    log.add("one", loss=0.5)
    log.add("two", level="ERROR")
    [file] = artifacts.files(JOB)
    assert file.path == f"_logs/{SUB_JOB}/execution.jsonl"
    lines = [json.loads(line) for line in artifacts.open(JOB, file.path).read_text().splitlines()]
    assert [line["message"] for line in lines] == ["one", "two"]
    assert lines == log.page(None, None)["entries"]
    artifacts.seal_due()
    assert len(artifacts.files(JOB)) == 1
    artifacts.seal(JOB)
    artifacts.seal(JOB)
    [_, sealed] = artifacts.files(JOB)
    assert re.fullmatch(rf"_stdout/{SUB_JOB}/console\.\d{{8}}-\d{{6}}\.\d{{8}}\.gz", sealed.path)
    assert [line.split(" ", 1)[1] for line in console(artifacts).splitlines()] == ["INFO    one", "ERROR   two"]


def test_chunks_are_in_order_whatever_the_clock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        moment = datetime(2026, 5, 5, 12, 0, 0, tzinfo=UTC)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return cls.moment

    monkeypatch.setattr(artifacts_module, "datetime", Clock)
    artifacts = RunArtifacts(tmp_path, seal_s=3600.0)
    for number, minutes in enumerate([0, 0, 5, -60, 1]):
        Clock.moment += timedelta(minutes=minutes)
        if number == 3:
            artifacts = RunArtifacts(tmp_path, seal_s=3600.0)  # the service was started again meanwhile
        artifacts.log(JOB, SUB_JOB, entry(str(number)))
        artifacts.seal()
    assert re.findall(r"INFO    (\d)", console(artifacts)) == ["0", "1", "2", "3", "4"]


def test_much_output_is_sealed_without_waiting(tmp_path: Path) -> None:
    artifacts = RunArtifacts(tmp_path, seal_s=3600.0)
    artifacts.log(JOB, SUB_JOB, entry("x" * 2_000_000))
    assert len(console(artifacts)) > 2_000_000
    waiting = RunArtifacts(tmp_path / "other", seal_s=0.0)
    waiting.metrics(JOB, SUB_JOB, [{"kind": "gpu"}])
    waiting.seal_due()
    assert [file.path.split("/")[0] for file in waiting.files(JOB)] == ["_metrics"]


def test_what_is_half_written_is_no_file_of_the_run(tmp_path: Path) -> None:
    artifacts = RunArtifacts(tmp_path, seal_s=3600.0)
    artifacts.log(JOB, SUB_JOB, entry("x"))
    artifacts.seal()
    folder = tmp_path / "runs" / JOB / "_stdout" / SUB_JOB
    (folder / ".console.20260101-000000.00000001.gz").write_bytes(b"half")
    assert len(artifacts.files(JOB)) == 2
    for name in (f"_stdout/{SUB_JOB}/.console.20260101-000000.00000001.gz", "../runs", "/etc/hostname", "", "_stdout"):
        with pytest.raises(Refusal):
            artifacts.open(JOB, name)


def test_files_of_a_job_outlive_a_killed_service(start_local_service: ServiceFactory) -> None:
    first = start_local_service(snowflake=True, gpus=1)
    # It waits for GPUs: what is asked here is whether files are found again, and loading a model would take long.
    job_id = Caller(first.url).create(training(config={"n_gpus": 2})).json()["job_id"]
    RunArtifacts(first.data_dir, seal_s=3600.0).log(job_id, f"{job_id}:training:0", entry("written before"))
    first.kill()
    second = start_local_service(snowflake=True)
    run = Caller(second.url).call("GET", f"/{job_id}/experiment-run").json()
    with connect(second) as connection:
        location = f"snow://experiment/{run['experiment_name']}/versions/{run['experiment_run_name']}/_logs/"
        rows = connection.cursor().execute(f"LIST '{location}'").fetchall()
    assert [row[0].rsplit("/", 1)[1] for row in rows] == ["execution.jsonl"]


def test_a_certificate_is_kept_until_it_is_no_good(tmp_path: Path) -> None:
    first = tls_files(tmp_path, "127.0.0.1")
    made = first.certificate.read_bytes()
    assert tls_files(tmp_path, "127.0.0.1").certificate.read_bytes() == made
    other = tls_files(tmp_path, "192.0.2.7").certificate.read_bytes()
    assert other != made
    first.key.write_text("not a key")
    again = tls_files(tmp_path, "192.0.2.7")
    assert again.certificate.read_bytes() != other
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(again.certificate, again.key)
    trusting = ssl.create_default_context(cafile=again.ca_bundle)
    assert len(trusting.get_ca_certs()) > 50  # the usual ones too


def test_a_service_without_the_flag_loads_neither_fakesnow_nor_duckdb(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from cortex_training.local.app import build_app
from cortex_training.local.service import Service
from cortex_training.local.settings import ServiceSettings
build_app(Service(ServiceSettings(Path({str(tmp_path)!r}))))
print([name for name in ("fakesnow", "duckdb", "snowflake.connector", "cryptography") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
