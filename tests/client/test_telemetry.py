"""Reports about failed operations, with both clients against an account and a collector of this machine's.

The names below are Snowflake's, answered by this process: tokens are sent to hosts of that domain only, over TLS.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient
from cortex_training.errors import ConfigurationError, OutcomeUnknown
from cortex_training.telemetry import Telemetry, redacted

PAT = "secret-token-value"
SESSION = "short-lived-session-token"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and self-signed certificate of the domain, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("*.snowflakecomputing.com")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("certificate") / "domain.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return file


class Account:
    """An account whose jobs answer `jobs(seen)`, and the collector that it names."""

    def __init__(self, server: Any, reply: Any) -> None:
        self.server = server
        self.host = f"https://account.snowflakecomputing.com:{server.port}"
        self.collector = f"collector.snowflakecomputing.com:{server.port}/system"
        self.jobs: Callable[[Any], Any] = lambda seen: reply(status=404, body={"code": "7", "message": "no such job"})
        self.ingest: Callable[[Any], Any] = lambda seen: reply(body={})
        self.discovery: Callable[[Any], Any] = lambda seen: reply(body={"hostname": self.collector})
        self.sessions: Callable[[Any], Any] = lambda seen: reply(body={"token": SESSION, "validityInSeconds": 3600})
        server.script = self.answer

    def answer(self, seen: Any) -> Any:
        paths = {
            "/api/v2/sessions": self.sessions,
            "/observability/system/hostname": self.discovery,
            "/system/v1/logs": self.ingest,
        }
        return paths.get(seen.target, self.jobs)(seen)

    def requests(self, target: str) -> list[Any]:
        return [seen for seen in self.server.seen if seen.target == target]

    def records(self) -> list[dict[str, Any]]:
        return [
            record
            for seen in self.requests("/system/v1/logs")
            for record in seen.json["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
        ]


@pytest.fixture
def account(certificate: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("CORTEX_TRAINING_"):
            monkeypatch.delenv(name)
    genuine = socket.getaddrinfo

    def local(host: Any, *args: Any, **kwargs: Any) -> Any:
        mine = str(host).endswith(".snowflakecomputing.com")
        return genuine("127.0.0.1" if mine else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", local)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = scripted.Weather(tls=context)
    yield Account(server, scripted.Reply)
    server.stop()


@pytest.fixture
def made(clients: Any, account: Account, certificate: Path) -> Callable[..., Any]:
    def client(**options: Any) -> Any:
        given = {"ca_bundle": str(certificate), "retry_budget_s": 5.0, "request_timeout": (5.0, 5.0)}
        return clients.from_pat(account.host, **(given | options))

    return client


def finish(client: Any) -> None:
    """Close it when everything was sent, however long that takes on a busy machine."""
    if client._telemetry is not None:
        client._telemetry.flush(60.0)
    client.close()


def plain(value: dict[str, Any]) -> Any:
    """A value of OTLP's JSON as Python has it."""
    ((kind, content),) = value.items()
    if kind == "kvlistValue":
        return {pair["key"]: plain(pair["value"]) for pair in content["values"]}
    if kind == "arrayValue":
        return [plain(element) for element in content["values"]]
    return int(content) if kind == "intValue" else content


def attributes(record: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: plain(pair["value"]) for pair in record["attributes"]}


def test_a_failed_operation_is_reported_with_what_it_was_about(made: Any, account: Account, scripted: Any) -> None:
    account.jobs = lambda seen: scripted.Reply(
        status=404, body={"code": "7", "message": "no such job"}, headers={"x-snowflake-request-id": "sf-1"}
    )
    client = made()
    with pytest.raises(Exception, match="no such job"):
        client.get_request_status("job-1", "request-1")
    finish(client)
    (record,) = account.records()
    assert record["severityText"] == "INFO"
    assert abs(int(record["timeUnixNano"]) / 1e9 - time.time()) < 600
    assert attributes(record) == {
        "event.name": "get_request_status",
        "job_id": "job-1",
        "request_id": "request-1",
        "error.type": "NotFoundError",
        "error.http_status": 404,
        "error.code": "7",
        "snowflake.request_id": "sf-1",
    }
    body = plain(record["body"])
    assert body.pop("duration_ms") >= 0
    assert "no such job" in body.pop("error_message")
    assert body == {"success": False, "request_count": 1, "attempt_count": 1, "retry_count": 0}


def test_the_token_is_exchanged_once_and_the_collector_asked_once(made: Any, account: Account) -> None:
    client = made()
    for number in range(3):
        with pytest.raises(Exception, match="no such job"):
            client.get_job(f"job-{number}")
    finish(client)
    (session,) = account.requests("/api/v2/sessions")
    assert session.headers["authorization"] == f"Bearer {PAT}"
    assert session.headers["x-snowflake-authorization-token-type"] == "PROGRAMMATIC_ACCESS_TOKEN"
    (discovery,) = account.requests("/observability/system/hostname")
    assert discovery.headers["accept"] == "application/json"
    for seen in [discovery, *account.requests("/system/v1/logs")]:
        assert seen.headers["authorization"] == f'Snowflake Token="{SESSION}"'
    assert [attributes(record)["job_id"] for record in account.records()] == ["job-0", "job-1", "job-2"]
    resource = account.requests("/system/v1/logs")[0].json["resourceLogs"][0]["resource"]
    told = attributes(resource)
    assert told["service.name"] == "cortex-training"
    assert told["snowflake.account_host"] == "account.snowflakecomputing.com"


def test_attempts_and_retries_are_counted(made: Any, account: Account, scripted: Any) -> None:
    answers = [scripted.Reply(status=503, body={}), scripted.Reply(status=503, body={}), scripted.Drop()]
    account.jobs = lambda seen: answers.pop(0) if answers else scripted.Reply(status=400, body={"message": "no"})
    client = made()
    with pytest.raises(Exception, match="no"):
        client.list_jobs()
    finish(client)
    body = plain(account.records()[0]["body"])
    assert (body["request_count"], body["attempt_count"], body["retry_count"]) == (1, 4, 3)


def test_an_unknown_outcome_is_reported_with_the_answer_behind_it(made: Any, account: Account, scripted: Any) -> None:
    account.jobs = lambda seen: scripted.Reply(status=500, body={"code": "9", "message": "broken"})
    client = made()
    with pytest.raises(OutcomeUnknown):
        client.step("job-1")
    finish(client)
    told = attributes(account.records()[0])
    assert (told["error.type"], told["error.http_status"], told["error.code"]) == ("OutcomeUnknown", 500, "9")


def test_only_the_outermost_call_is_reported(made: Any, account: Account) -> None:
    client = made()
    with pytest.raises(Exception, match="no such job"):
        client.fetch_execution_logs("job-1")  # which asks get_experiment_run
    finish(client)
    assert [attributes(record)["event.name"] for record in account.records()] == ["fetch_execution_logs"]


def test_successes_are_reported_when_asked_for(
    made: Any, account: Account, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.jobs = lambda seen: scripted.Reply(body={"request_id": "request-1"})
    quiet = made()
    quiet.step("job-1")
    quiet.close()
    assert account.requests("/api/v2/sessions") == []
    monkeypatch.setenv("CORTEX_TRAINING_ENABLE_SUCCESS_TELEMETRY", "1")
    client = made()
    client.step("job-1")
    finish(client)
    (record,) = account.records()
    assert attributes(record) == {"event.name": "step", "job_id": "job-1", "request_id": "request-1"}
    assert plain(record["body"])["success"] is True


def test_an_application_reports_events_of_its_own(made: Any, account: Account) -> None:
    client = made()
    client.emit_metric(
        "evaluate",
        {"duration_ms": 42, "success": True, "score": float("nan"), "parts": [1, "two", None]},
        attributes={"job_id": "job-1", "event.name": "other", "left_out": None},
    )
    client.emit_metric("tick")
    finish(client)
    first, second = account.records()
    assert attributes(first) == {"event.name": "evaluate", "job_id": "job-1"}
    assert plain(first["body"]) == {"duration_ms": 42, "success": True, "score": "nan", "parts": [1, "two", "None"]}
    assert plain(second["body"]) == 1


def test_an_event_that_cannot_be_written_is_dropped(made: Any, account: Account) -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

    client = made()
    client.emit_metric("bad", Hostile())
    client.emit_metric("good")
    finish(client)
    assert [attributes(record)["event.name"] for record in account.records()] == ["good"]


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_it_can_be_switched_off(made: Any, account: Account, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CORTEX_TRAINING_DISABLE_TELEMETRY", value)
    client = made()
    with pytest.raises(Exception, match="no such job"):
        client.get_job("job-1")
    client.emit_metric("tick")
    finish(client)
    assert [seen.path for seen in account.server.seen] == ["/job-1"]


def test_a_client_for_an_address_reports_nothing(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(status=404, body={}))
    for client in (clients(weather.url), clients.from_pat(weather.url)):
        with pytest.raises(Exception, match="404"):
            client.get_job("job-1")
        client.emit_metric("tick")
        client.close()
    assert [seen.path for seen in weather.seen] == ["/job-1", "/job-1"]


@pytest.mark.parametrize("timeout", [0, -1.0, "soon", float("nan"), True])
def test_a_senseless_time_limit_is_refused(clients: Any, timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="telemetry_timeout"):
        clients.from_pat("account.snowflakecomputing.com", telemetry_timeout=timeout)


def test_the_session_token_goes_to_no_foreign_host(made: Any, account: Account) -> None:
    account.collector = f"127.0.0.1:{account.server.port}/system"
    client = made()
    with pytest.raises(Exception, match="no such job"):
        client.get_job("job-1")
    finish(client)
    assert account.requests("/observability/system/hostname")
    assert account.records() == []


def test_a_refused_session_is_replaced(made: Any, account: Account, scripted: Any) -> None:
    answers = [scripted.Reply(status=401, body={})]
    account.ingest = lambda seen: answers.pop() if answers else scripted.Reply(body={})
    client = made()
    client.emit_metric("refused")
    client._telemetry.flush(30.0)
    client.emit_metric("taken")
    finish(client)
    assert len(account.requests("/api/v2/sessions")) == 2
    assert [attributes(record)["event.name"] for record in account.records()] == ["refused", "taken"]


def test_a_dead_collector_changes_nothing_and_is_soon_left_alone(made: Any, account: Account, scripted: Any) -> None:
    account.discovery = lambda seen: scripted.Drop()
    client = made()
    for _ in range(6):
        with pytest.raises(Exception, match="no such job"):
            client.get_job("job-1")
        client._telemetry.flush(30.0)
    assert len(account.requests("/observability/system/hostname")) == 3
    finish(client)


def test_a_hanging_collector_delays_no_call(made: Any, account: Account, scripted: Any) -> None:
    """The calls below end while the report about the first one is still under way."""
    account.sessions = lambda seen: scripted.Hang(600.0)
    client = made(telemetry_timeout=60.0)
    for number in range(20):
        with pytest.raises(Exception, match="no such job"):
            client.get_job(f"job-{number}")
    assert client._telemetry._queue.unfinished_tasks == 20
    client._telemetry.flush(0.0)
    assert account.records() == []


def test_a_full_queue_drops_events(made: Any, account: Account, scripted: Any) -> None:
    account.sessions = lambda seen: scripted.Hang(600.0)
    client = made(telemetry_timeout=60.0)
    for _ in range(3000):
        client._telemetry.emit("tick")
    assert client._telemetry._queue.qsize() == 1024
    assert sum(thread.name == "cortex-training-telemetry" for thread in _threads_of(client)) == 1


def _threads_of(client: Any) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread is client._telemetry._thread]


def test_a_forked_process_starts_over(account: Account, certificate: Path, scripted: Any) -> None:
    client = CortexTrainingClient.from_pat(account.host, PAT, "DB", "PUBLIC", ca_bundle=str(certificate))
    account.sessions = lambda seen: scripted.Hang(600.0)
    client.emit_metric("parent")
    telemetry = client._telemetry
    assert isinstance(telemetry, Telemetry)
    with telemetry._lock:  # which the child must not wait for
        child = os.fork()
        if child == 0:
            fresh = telemetry._thread is None and telemetry._queue.empty() and telemetry._lock.acquire(timeout=1)
            os._exit(0 if fresh else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert telemetry._queue.unfinished_tasks == 1


async def test_tasks_of_one_loop_are_counted_apart(account: Account, certificate: Path, scripted: Any) -> None:
    def jobs(seen: Any) -> Any:
        return scripted.Reply(status=404 if seen.path == "/job-1" else 503, body={})

    account.jobs = jobs
    options: dict[str, Any] = {"ca_bundle": str(certificate), "max_retries": 2}
    async with AsyncCortexTrainingClient.from_pat(account.host, PAT, "DB", "PUBLIC", **options) as client:
        await asyncio.gather(client.get_job("job-1"), client.get_job("job-2"), return_exceptions=True)
    counted = {attributes(record)["job_id"]: plain(record["body"])["attempt_count"] for record in account.records()}
    assert counted == {"job-1": 1, "job-2": 3}


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {PAT}",
        f"bearer {PAT}",
        f'Authorization: Snowflake Token="{PAT}"',
        f'{{"password": "{PAT}"}}',
        f"pat={PAT}&next=1",
        f"api_key = {PAT}, more",
        f"session token: '{PAT}'",
        f"GET https://stage.example/file?X-Amz-Signature={PAT} failed",
    ],
)
def test_credentials_are_redacted(text: str) -> None:
    assert PAT not in redacted(text)
    assert "<redacted>" in redacted(text)


def test_other_text_is_kept_on_one_short_line() -> None:
    assert redacted("job  j\nfailed: compat: 3") == "job j failed: compat: 3"
    assert len(redacted("x" * 100_000)) == 512


def test_an_error_message_with_a_credential_is_redacted(made: Any, account: Account, scripted: Any) -> None:
    account.jobs = lambda seen: scripted.Reply(status=400, body={"message": "password=hunter2-hunter2 is wrong"})
    client = made()
    with pytest.raises(Exception, match="hunter2"):
        client.list_jobs()
    finish(client)
    assert "hunter2" not in json.dumps(account.records())
    assert re.search(r"password=<redacted>", plain(account.records()[0]["body"])["error_message"])


def test_a_process_with_a_report_under_way_ends_soon() -> None:
    """At its end a process waits for reports, but not for a collector that never answers."""
    program = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
genuine = socket.getaddrinfo
socket.getaddrinfo = lambda host, *args, **kwargs: genuine("127.0.0.1", *args, **kwargs)
from cortex_training import CortexTrainingClient
host = f"https://account.snowflakecomputing.com:{listener.getsockname()[1]}"
client = CortexTrainingClient.from_pat(host, "pat", "DB", "PUBLIC", telemetry_timeout=3600.0)
client.emit_metric("tick")
"""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith("CORTEX_TRAINING_")
    }
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)
