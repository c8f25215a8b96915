"""A job's files without the Snowflake connector: the bucket behind the stage, with credentials from the SQL API."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from cortex_training import artifacts
from cortex_training.auth import OAuthAuth
from cortex_training.errors import ConfigurationError, ProtocolError

RUN = {"experiment_name": "DB.S.IT'S", "experiment_run_name": "RUN"}
URI = "snow://experiment/DB.S.IT'S/versions/RUN/"
QUERY = "SELECT SYSTEM$GET_VSTAGE_WRITE_CREDS('snow://experiment/DB.S.IT''S/versions/RUN/')"
SECRETS = {"AWS_KEY_ID": "AKIASECRETID", "AWS_SECRET_KEY": "very-secret-key", "AWS_TOKEN": "very-secret-token"}
FILES = {
    "_logs/j:training:0/execution.jsonl": b'{"a":1}\n',
    "_logs/j:training:0/odd/bytes.log": b"\xff\xfe ok",
    "_logs/j:training:0/": b"",
    "_logs/k:training:0/execution.jsonl": b"another job",
    "checkpoints/_logs/j:sampling:0/server.log": b"served\n",
    "checkpoints/model.safetensors": b"no log",
    "_stdout/j:training:0/console.20260101-000002.b.gz": gzip.compress(b"two\n"),
    "_stdout/j:training:0/console.20260101-000001.a.gz": gzip.compress(b"one\n"),
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of an S3-compatible server whose bucket ``stage`` holds the files below ``run/7``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    line = ""
    while "http://" not in line:
        assert time.monotonic() < deadline
        line = process.stderr.readline()
    url = "http://" + line.partition("http://")[2].split()[0].rstrip("/")
    s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y")
    s3.create_bucket(Bucket="stage")
    for name, content in FILES.items():
        s3.put_object(Bucket="stage", Key=f"run/7/{name}", Body=content)
    yield url
    process.terminate()
    process.wait(20)


def grant(url: str, **changes: Any) -> dict[str, Any]:
    stage = {
        "locationType": "S3",
        "location": "stage/run/7/",
        "region": "us-east-1",
        "endPoint": url,
        "creds": SECRETS,
    }
    return {**stage, **changes}


@pytest.fixture
def client(clients: Any, weather: Any) -> Any:
    """A client whose credential the connector does not take."""
    return clients(weather.url, auth=OAuthAuth("an-oauth-token"))


def answering(scripted: Any, granted: Any) -> Any:
    def script(seen: Any) -> Any:
        if seen.target == "/api/v2/statements":
            assert json.loads(seen.body)["statement"] == QUERY
            return scripted.Reply(body={"data": [[granted if isinstance(granted, str) else json.dumps(granted)]]})
        return scripted.Reply(body=RUN)

    return script


def test_logs_of_the_jobs_own_sub_jobs_are_read_from_the_bucket(
    client: Any, weather: Any, scripted: Any, bucket: str
) -> None:
    weather.script = answering(scripted, grant(bucket))
    training, odd, sampling = client.fetch_execution_logs("j")
    assert training == {
        "sub_job_id": "j:training:0",
        "filename": "execution.jsonl",
        "artifact_uri": f"{URI}_logs/j:training:0/execution.jsonl",
        "s3_uri": "s3://stage/run/7/_logs/j:training:0/execution.jsonl",
        "content": '{"a":1}\n',
    }
    assert (odd["filename"], odd["content"]) == ("odd/bytes.log", "\ufffd\ufffd ok")
    assert (sampling["sub_job_id"], sampling["content"]) == ("j:sampling:0", "served\n")


def test_console_output_is_put_together_from_the_bucket(
    client: Any, weather: Any, scripted: Any, bucket: str, tmp_path: Path
) -> None:
    weather.script = answering(scripted, grant(bucket))
    [written] = client.download_stdout_logs("j", tmp_path)
    assert Path(written["saved_path"]).read_bytes() == b"one\ntwo\n"
    assert client.download_metrics("j", tmp_path) == []


def test_a_token_needs_no_connector(
    clients: Any, weather: Any, scripted: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "connector_is_installed", lambda: False)
    weather.script = answering(scripted, grant(bucket))
    assert len(clients.from_pat(weather.url).fetch_execution_logs("j")) == 3


@pytest.mark.parametrize(
    ("granted", "message"),
    [
        ("no json with very-secret-key", "JSON object"),
        ([SECRETS], "JSON object"),
        (grant("", locationType="AZURE"), "AZURE"),
        (grant("", locationType=None), "None"),
        (grant("", location="s3://"), "no bucket"),
        (grant("", location=None), "no bucket"),
        (grant("", creds=None), "AWS_KEY_ID"),
        (grant("", creds={**SECRETS, "AWS_TOKEN": 5}), "AWS_TOKEN"),
    ],
)
def test_what_are_no_credentials_of_a_bucket_are_refused_unseen(
    client: Any, weather: Any, scripted: Any, granted: Any, message: str
) -> None:
    weather.script = answering(scripted, granted)
    with pytest.raises(ProtocolError, match=message) as caught:
        client.fetch_execution_logs("j")
    assert "very-secret" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_an_error_without_its_credentials(
    client: Any, weather: Any, scripted: Any, bucket: str
) -> None:
    weather.script = answering(scripted, grant(bucket, location="another/run"))
    with pytest.raises(ProtocolError, match="s3://another/run/_logs/ cannot be listed") as caught:
        client.fetch_execution_logs("j")
    assert "very-secret" not in f"{caught.value!r}{caught.value}"


def test_without_connector_and_boto3_it_is_said_what_to_install(
    client: Any, weather: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    weather.script = answering(scripted, grant(""))
    with pytest.raises(ConfigurationError, match=r"cortex-training-client\[s3\]"):
        client.fetch_execution_logs("j")
