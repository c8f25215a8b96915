"""The real Snowflake connector and both clients against a service with TLS, a token, and an answer for SQL."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from cryptography import x509
from snowflake.connector.errors import DatabaseError, Error, ProgrammingError

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient
from cortex_training.auth import SnowflakeProfileError
from cortex_training.cli import main
from cortex_training.errors import AuthError, ConfigurationError, TransportError
from tests.conftest import RunningService, start_service
from tests.local.api import Caller, RunningJob, masked_frame, sampling, token_batch, training
from tests.local.connector import connect, trusted, write_profile

TOKEN = "s3cret-token"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("snowflake_service")
    # Each chunk is a statement of every download: on a busy machine, chunks that are sealed faster than they are
    # fetched would be without end.
    service = start_service(folder, snowflake=True, tls=True, token=TOKEN, sample_seconds=0.5, seal_seconds=4)
    with trusted(service):
        yield service
    service.stop()


@pytest.fixture(scope="module")
def home(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with connections.toml, which the connector is told of."""
    folder = write_profile(tmp_path_factory.mktemp("home"), service, password=TOKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNOWFLAKE_HOME", str(folder))
        # Read when the connector was imported, which may be long ago.
        patch.setattr("snowflake.connector.config_manager.CONFIG_MANAGER.file_path", folder / "config.toml")
        patch.setattr("snowflake.connector.config_manager.CONFIG_MANAGER._slices", _slices(folder))
        patch.setattr("snowflake.connector.config_manager.CONFIG_MANAGER.conf_file_cache", None)
        yield folder


def _slices(folder: Path) -> Any:
    from snowflake.connector.config_manager import CONFIG_MANAGER

    return [one._replace(path=folder / "connections.toml") for one in CONFIG_MANAGER._slices]


@pytest.fixture(scope="module")
def cursor(service: RunningService) -> Iterator[Any]:
    with connect(service, password=TOKEN) as connection:
        yield connection.cursor()


@pytest.fixture(scope="module")
def job(service: RunningService) -> Iterator[RunningJob]:
    """A job on three GPUs that took two steps, whose first chunks are sealed, and which still runs."""
    caller = Caller(service.url)
    caller.session.headers["authorization"] = f"Bearer {TOKEN}"
    caller.session.verify = service.ready["ca_bundle"]
    job = caller.running(training(config={"n_gpus": 2}), sampling(), experiment_name="it's one")
    for _ in range(2):
        job.forward_backward(masked_frame(token_batch()))
        job.step()
    sealed = service.data_dir / "runs" / job.job_id
    deadline = time.monotonic() + 300
    while len(list(sealed.glob("_*/*/*.gz"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return job


# --- SQL


def test_plain_sql_works_with_the_real_connector(cursor: Any) -> None:
    cursor.execute("create or replace table NUMBERS (N number, TEXT varchar)")
    cursor.execute("insert into NUMBERS values (1, 'one'), (2, '$HOME ''and'' more')")
    assert cursor.execute("select N, TEXT from NUMBERS order by N").fetchall() == [(1, "one"), (2, "$HOME 'and' more")]
    cursor.executemany("insert into NUMBERS values (%s, %s)", [(n, f"number {n}") for n in range(3, 503)])
    table = cursor.execute("select * from NUMBERS").fetch_arrow_all()
    assert (table.num_rows, table.column_names) == (502, ["N", "TEXT"])
    assert cursor.execute("select current_user(), current_role(), current_account()").fetchone() == (
        "ANN",
        "LOCAL",
        "LOCAL",
    )
    with pytest.raises(ProgrammingError, match="ABSENT"):
        cursor.execute("select * from ABSENT")


def test_a_file_is_put_on_a_stage_and_copied_into_a_table(cursor: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("7,seven\n8,eight\n")
    cursor.execute("create or replace table ROWS_OF_FILE (N number, TEXT varchar)")
    cursor.execute("create or replace stage HERE")
    assert cursor.execute(f"put file://{tmp_path}/rows.csv @HERE").fetchall()[0][6] == "UPLOADED"
    cursor.execute("copy into ROWS_OF_FILE from @HERE file_format = (type = csv)")
    assert cursor.execute("select * from ROWS_OF_FILE order by N").fetchall() == [(7, "seven"), (8, "eight")]


@pytest.mark.parametrize(
    "statement",
    [
        "select * from read_text('{secret}')",
        "select * from read_csv('{secret}')",
        "select * from read_text('http://127.0.0.1:1/x')",
        "copy into STOLEN from 'file://{folder}/'",
        "copy into 'file://{folder}/written/' from (select 1)",
        "set enable_external_access = true",
        "install httpfs",
    ],
)
def test_sql_reaches_nothing_but_its_own_databases(cursor: Any, statement: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("abcdefg\n")
    cursor.execute("create or replace table STOLEN (N varchar)")
    rows: list[Any] = []
    with contextlib.suppress(Error):
        # Of these, SET alone is known here: as a variable of the session, not as an option of DuckDB.
        rows = cursor.execute(statement.format(secret=secret, folder=tmp_path)).fetchall()
    assert "abcdefg" not in str(rows)
    assert cursor.execute("select count(*) from STOLEN").fetchone() == (0,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.csv"]
    with pytest.raises(Error):
        cursor.execute(f"select * from read_text('{secret}')").fetchall()


def test_the_sql_api_runs_one_statement(service: RunningService) -> None:
    def run(**body: Any) -> requests.Response:
        headers = {"authorization": f"Bearer {TOKEN}"}
        return requests.post(f"{service.base_url}/api/v2/statements", json=body, headers=headers, timeout=60)

    reply = run(statement="select 1 as N, null, true, 'x'", database="ELSEWHERE", schema="PUBLIC")
    assert reply.json()["data"] == [["1", None, "true", "x"]]
    assert reply.json()["resultSetMetaData"]["rowType"][0] == {"name": "N", "type": "FIXED"}
    assert run(statement="create database if not exists MADE").status_code == 200
    assert run(statement="create schema if not exists MADE.HERE").status_code == 200
    refused = run(statement="select * from ABSENT", database="MADE", schema="HERE")
    assert (refused.status_code, refused.json()["code"]) == (422, "002003")
    assert run(statement=7).status_code == 422
    assert requests.post(f"{service.base_url}/api/v2/statements", json={}, timeout=60).status_code == 401


# --- Who is let in


def test_a_wrong_password_or_token_opens_no_session(service: RunningService) -> None:
    with pytest.raises(DatabaseError, match="Incorrect username or password"):
        connect(service, password="wrong")
    with pytest.raises(DatabaseError, match="token is invalid"):
        connect(service, password=None, authenticator="PROGRAMMATIC_ACCESS_TOKEN", token="wrong")
    with connect(service, password=None, authenticator="PROGRAMMATIC_ACCESS_TOKEN", token=TOKEN) as connection:
        assert connection.cursor().execute("select 1").fetchone() == (1,)


def test_the_token_of_a_session_opens_the_rest_api_until_it_is_logged_out(service: RunningService) -> None:
    def status(token: str) -> tuple[int, Any]:
        reply = requests.get(
            f"{service.url}/capacity", headers={"authorization": f'Snowflake Token="{token}"'}, timeout=60
        )
        return reply.status_code, reply.json().get("code")

    with connect(service, password=TOKEN) as connection:
        token, master = connection.rest.token, connection.rest.master_token
        assert status(token) == (200, None)
        assert status(master) == (401, "390111")
    assert status(token) == (401, "390111")
    assert status(TOKEN) == (200, None)
    assert status("") == (401, "390111")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/fs_bucket/TESTS/PUBLIC/HERE/x.csv", 403),
        ("PUT", "/fs_bucket/TESTS/PUBLIC/HERE/x.csv?signature=" + 64 * "0", 403),
        ("GET", "/stage-files/99999999999/" + 64 * "0" + "/job/_logs/x", 400),
        ("GET", "/stage-files/soon/" + 64 * "0" + "/job/_logs/x", 400),
        ("POST", "/queries/v1/query-request", 401),
        ("POST", "/session/heartbeat", 401),
        ("GET", "/monitoring/queries/x", 401),
    ],
)
def test_addresses_of_the_connector_give_nothing_to_others(
    service: RunningService, method: str, path: str, status: int
) -> None:
    assert requests.request(method, service.base_url + path, data=b"x", timeout=60).status_code == status


def test_a_login_takes_json_only_and_of_a_bounded_size(service: RunningService) -> None:
    url = f"{service.base_url}/session/v1/login-request"
    assert requests.post(url, data="{}", headers={"content-type": "text/plain"}, timeout=60).status_code == 415
    json_type = {"content-type": "application/json"}
    assert requests.post(url, data="[]", headers=json_type, timeout=60).status_code == 400
    assert requests.post(url, data="{", headers=json_type, timeout=60).status_code == 400
    bomb = gzip.compress(b" " * (80 * 1024 * 1024))
    compressed = {**json_type, "content-encoding": "gzip"}
    assert requests.post(url, data=bomb, headers=compressed, timeout=60).status_code == 413
    assert requests.post(url, data=b"no gzip", headers=compressed, timeout=60).status_code == 400


# --- Artifacts of a job


def check_logs(logs: list[Any], job: RunningJob) -> None:
    assert [log["sub_job_id"] for log in logs] == [f"{job.job_id}:sampling:0", f"{job.job_id}:training:0"]
    events = [json.loads(line) for line in logs[1]["content"].splitlines()]
    assert [event.get("event") for event in events] == [None, "forward-backward", "step", "forward-backward", "step"]
    assert [event.get("global_steps") for event in events] == [None, 0, 1, 1, 2]
    assert logs[1]["artifact_uri"].startswith("snow://experiment/TESTS.PUBLIC.IT'S ONE/versions/RUN_")


def check_downloads(stdout: list[Any], metrics: list[Any], job: RunningJob) -> None:
    names = [f"{job.job_id}:sampling:0", f"{job.job_id}:training:0"]
    assert [one["sub_job_id"] for one in stdout] == [one["sub_job_id"] for one in metrics] == names
    lines = Path(stdout[1]["saved_path"]).read_text().splitlines()
    assert [" step done loss " in line for line in lines] == [False, False, True, False, True]
    records = [json.loads(line) for line in Path(metrics[1]["saved_path"]).read_text().splitlines()]
    assert {record["global_gpu_index"] for record in records} == {0, 1}
    assert {record["record_version"] for record in records} == {2}
    assert all(0 <= record["gpu_util_pct"] <= 100 for record in records)
    assert max(record["gpu_util_pct"] for record in records) > 0
    assert all(record["fb_used_bytes"] > 100_000_000 for record in records)
    sampled = [json.loads(line) for line in Path(metrics[0]["saved_path"]).read_text().splitlines()]
    assert {record["global_gpu_index"] for record in sampled} == {2}


def test_a_profile_reads_a_jobs_logs_and_metrics(
    service: RunningService, home: Path, job: RunningJob, tmp_path: Path
) -> None:
    with CortexTrainingClient.from_connection_name("local") as client:
        assert client.get_job(job.job_id)["status"] == "running"
        check_logs([*client.fetch_execution_logs(job.job_id)], job)
        stdout = client.download_stdout_logs(job.job_id, tmp_path)
        check_downloads([*stdout], [*client.download_metrics(job.job_id, tmp_path)], job)
        entries = list(client.stream_logs(job.job_id, follow=False, sub_job_id=f"{job.job_id}:training:0"))
        assert [entry["event"] for entry in entries if isinstance(entry, dict) and "loss" in entry] == [
            "forward-backward",
            "step",
            "forward-backward",
            "step",
        ]


def test_a_programmatic_access_token_reads_a_jobs_logs(
    service: RunningService, job: RunningJob, tmp_path: Path
) -> None:
    with CortexTrainingClient.from_pat(
        service.base_url, TOKEN, service.database, service.schema, ca_bundle=service.ready["ca_bundle"]
    ) as client:
        check_logs([*client.fetch_execution_logs(job.job_id)], job)
        stdout = client.download_stdout_logs(job.job_id, tmp_path)
        check_downloads([*stdout], [*client.download_metrics(job.job_id, tmp_path, resume=True)], job)


async def test_the_async_client_reads_a_jobs_logs(
    service: RunningService, home: Path, job: RunningJob, tmp_path: Path
) -> None:
    async with AsyncCortexTrainingClient.from_connection_name("local") as client:
        check_logs([*await client.fetch_execution_logs(job.job_id)], job)
        stdout = await client.download_stdout_logs(job.job_id, tmp_path)
        check_downloads([*stdout], [*await client.download_metrics(job.job_id, tmp_path)], job)


def test_the_command_line_downloads_logs_and_metrics(
    service: RunningService, home: Path, job: RunningJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        assert main(["--connection", "local", *arguments]) == 0, capsys.readouterr().err
        return dict(json.loads(capsys.readouterr().out))

    logs = run("download-log", job.job_id, "--output-dir", str(tmp_path))["logs"]
    assert [Path(log["saved_path"]).name for log in logs] == ["execution.jsonl", "execution.jsonl"]
    stdout = run("download-log", job.job_id, "--log-type", "stdout", "--output-dir", str(tmp_path))["logs"]
    check_downloads(stdout, run("download-metrics", job.job_id, "--output-dir", str(tmp_path))["metrics"], job)


@pytest.mark.public_client
def test_the_public_client_reads_a_jobs_logs(service: RunningService, job: RunningJob, tmp_path: Path) -> None:
    public_python = os.environ.get("CORTEX_TRAINING_PUBLIC_PYTHON")
    if not public_python:
        pytest.skip("CORTEX_TRAINING_PUBLIC_PYTHON is not set to a Python with cortex-training==0.0.3")
    script = Path(__file__).with_name("public_artifacts_walk.py")
    arguments = [service.base_url.removeprefix("https://"), TOKEN, job.job_id, str(tmp_path)]
    # The connector asks a cloud's metadata address who it is; here nobody answers.
    environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        # Elsewhere than in this repository, whose package has the same import name.
        [public_python, str(script), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    check_logs(seen["logs"], job)
    check_downloads(seen["stdout"], seen["metrics"], job)


def test_a_job_that_has_ended_has_all_its_output(service: RunningService, home: Path, tmp_path: Path) -> None:
    caller = Caller(service.url)
    caller.session.headers["authorization"] = f"Bearer {TOKEN}"
    caller.session.verify = service.ready["ca_bundle"]
    job = caller.running(training(config={"training_memory_telemetry": True}))
    job.forward_backward(masked_frame(token_batch()))
    assert (
        job.poll(job.post_frame(masked_frame(token_batch(), kwargs={"attention_mask": "none"})))["status"] == "failed"
    )
    job.call("POST", ":cancel")
    job.wait_for("cancelled")
    with CortexTrainingClient.from_connection_name("local") as client:
        [stdout] = client.download_stdout_logs(job.job_id, tmp_path)
        [metrics] = client.download_metrics(job.job_id, tmp_path)
        [log] = client.fetch_execution_logs(job.job_id)
    assert "forward-backward failed" in Path(stdout["saved_path"]).read_text()
    assert Path(metrics["saved_path"]).read_text()
    events = [json.loads(line) for line in log["content"].splitlines()]
    assert [event["event"] for event in events if "memory" in event] == ["fwd_bwd_end", "forward-backward"]
    assert events[-1]["level"] == "ERROR"
    assert events[-1]["error"]


@pytest.mark.parametrize(
    "path", ["../../jobs.sqlite", "_logs/../../x", "/etc/hostname", "_logs", "_stdout/", ".hidden", "_logs/x/y"]
)
def test_get_gives_files_of_the_run_alone(cursor: Any, job: RunningJob, path: str, tmp_path: Path) -> None:
    run = job.call("GET", "/experiment-run").json()
    location = f"snow://experiment/{run['experiment_name']}/versions/{run['experiment_run_name']}/{path}"
    quoted = location.replace("'", "''")
    if path == "_stdout/":
        cursor.execute(f"get '{quoted}' 'file://{tmp_path}/'")
        assert {name.name.split(".")[0] for name in tmp_path.iterdir()} == {"console"}
        return
    with pytest.raises(ProgrammingError, match="has no file"):
        cursor.execute(f"get '{quoted}' 'file://{tmp_path}/'")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_exist_cannot_be_listed(cursor: Any) -> None:
    with pytest.raises(ProgrammingError, match="does not exist"):
        cursor.execute("LIST 'snow://experiment/A.B.C/versions/RUN_X/_logs/'")
    with pytest.raises(ProgrammingError, match="GET a path and a folder"):
        cursor.execute("LIST 'snow://experiment/A.B.C/versions/RUN_X/_logs/' 'file:///tmp/'")


def test_links_of_files_cannot_be_bent(service: RunningService, cursor: Any, job: RunningJob) -> None:
    run = job.call("GET", "/experiment-run").json()
    location = f"snow://experiment/{run['experiment_name']}/versions/{run['experiment_run_name']}/_logs/"
    quoted = location.replace("'", "''")
    reply = requests.post(
        f"{service.base_url}/queries/v1/query-request",
        json={"sqlText": f"get '{quoted}' 'file:///tmp/'"},
        headers={"authorization": f'Snowflake Token="{cursor.connection.rest.token}"'},
        timeout=60,
    )
    link = reply.json()["data"]["presignedUrls"][0]
    assert requests.get(link, timeout=60).status_code == 200
    head, _, name = link.partition(job.job_id)
    assert requests.get(f"{head}{job.job_id}{name}x", timeout=60).status_code == 400
    expires = head.split("/stage-files/")[1].split("/")[0]
    later = link.replace(expires, str(int(expires) + 1))
    assert requests.get(later, timeout=60).status_code == 400


# --- TLS


async def test_both_transports_check_the_certificate(service: RunningService, tmp_path: Path) -> None:
    bundle = service.ready["ca_bundle"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("REQUESTS_CA_BUNDLE")
        with CortexTrainingClient.from_pat(service.base_url, TOKEN, "TESTS", "PUBLIC", ca_bundle=bundle) as client:
            assert client.get_capacity()["has_reservation"]
        async with AsyncCortexTrainingClient.from_pat(
            service.base_url, TOKEN, "TESTS", "PUBLIC", ca_bundle=bundle
        ) as asynchronous:
            assert (await asynchronous.get_capacity())["has_reservation"]
        with (
            CortexTrainingClient.from_pat(service.base_url, TOKEN, "TESTS", "PUBLIC", retry_budget_s=0) as client,
            pytest.raises(TransportError, match=r"(?i)certificate"),
        ):
            client.get_capacity()
        async with AsyncCortexTrainingClient.from_pat(
            service.base_url, TOKEN, "TESTS", "PUBLIC", retry_budget_s=0
        ) as asynchronous:
            with pytest.raises(TransportError, match=r"(?i)certificate"):
                await asynchronous.get_capacity()


def test_an_exported_checkpoint_is_fetched_over_https(service: RunningService, job: RunningJob) -> None:
    files = job.exported(job.save("weights-only"))
    assert {"config.json", "model.safetensors"} <= set(files)


def test_a_client_with_a_wrong_credential_is_told(service: RunningService, home: Path, tmp_path: Path) -> None:
    with (
        CortexTrainingClient.from_pat(
            service.base_url, "wrong", "TESTS", "PUBLIC", ca_bundle=service.ready["ca_bundle"]
        ) as client,
        pytest.raises(AuthError, match="390100"),
    ):
        client.get_capacity()
    with pytest.raises((SnowflakeProfileError, ConfigurationError)):
        CortexTrainingClient.from_connection_name("absent")


def test_the_key_is_private_and_no_authority_can_be_made_of_it(service: RunningService) -> None:
    folder = service.data_dir / "tls"
    assert sorted(path.name for path in folder.iterdir()) == ["ca-bundle.pem", "server-cert.pem", "server-key.pem"]
    assert os.stat(folder / "server-key.pem").st_mode & 0o777 == 0o600
    own = x509.load_pem_x509_certificates((folder / "server-cert.pem").read_bytes())[0]
    assert own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
