"""Real stores for the publication tests: a directory, and S3-compatible servers.

moto runs in a process of its own, from the environment the tests run in: its pins were resolved together with the
others, and a second environment would cost every fresh clone 140 MB. rclone is no package one imports, and has a folder
of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex_training.publication import PosixStore, Store, open_store
from tests.publication.servers import (
    REGION,
    FaultHandler,
    FaultProxy,
    S3Server,
    free_port,
    installed_rclone,
    serving,
    write_secret,
)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto in a process of its own; after the first three calls every request must carry a valid signature."""
    import boto3

    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("s3_process.py")), str(port)]
    environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            _wait_for_port(port, process)
            iam = boto3.client(
                "iam",
                endpoint_url=f"http://127.0.0.1:{port}",
                region_name=REGION,
                aws_access_key_id="unchecked",
                aws_secret_access_key="unchecked",
            )
            iam.create_user(UserName="tester")
            policy = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'
            iam.put_user_policy(UserName="tester", PolicyName="all", PolicyDocument=policy)
            key = iam.create_access_key(UserName="tester")["AccessKey"]
            yield S3Server(port, key["AccessKeyId"], key["SecretAccessKey"])
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="session")
def careless_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """``rclone serve s3``: it checks signatures, takes conditional writes, and ignores the condition."""
    try:
        rclone = installed_rclone()
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"rclone cannot be installed: {problem.stderr.strip().splitlines()[-1:]}")
    port = free_port()
    server = S3Server(port, "AKIATESTTEST", "SECRETSECRET")
    keys = f"{server.access_key_id},{server.secret_access_key}"
    folder = tmp_path_factory.mktemp("rclone")
    command = [str(rclone), "serve", "s3", "--auth-key", keys, "--addr", f"127.0.0.1:{port}", str(folder)]
    # No configuration of whoever runs the tests.
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "RCLONE_CONFIG": str(folder / "none")}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            _wait_for_port(port, process)
            yield server
        finally:
            process.terminate()
            process.wait(20)


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the S3 server ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    pytest.fail("the S3 server did not start")


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    name = f"ckpts-{secrets.token_hex(6)}"
    s3_server.client().create_bucket(Bucket=name)
    return name


@pytest.fixture
def creds(s3_server: S3Server, tmp_path: Path) -> str:
    return write_secret(
        tmp_path / "creds",
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
        endpoint=s3_server.endpoint,
    )


@pytest.fixture
def s3_root(bucket: str) -> str:
    return f"s3://{bucket}/team/run-7"


@pytest.fixture
def s3_store(s3_root: str, creds: str) -> Store:
    return open_store(s3_root, creds, timeout_s=20)


@pytest.fixture
def posix_store(tmp_path: Path) -> PosixStore:
    root = tmp_path / "root"
    root.mkdir()
    return PosixStore(root)


@pytest.fixture(params=["posix", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each kind of store in turn."""
    found: Store = request.getfixturevalue(f"{request.param}_store")
    return found


@pytest.fixture
def faults(s3_server: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3_server.port)
    with serving(type("Handler", (FaultHandler,), {"proxy": proxy})) as port:
        proxy.port = port
        yield proxy


@pytest.fixture
def faulty_creds(s3_server: S3Server, faults: FaultProxy, tmp_path: Path) -> str:
    return write_secret(
        tmp_path / "faulty",
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
        endpoint=faults.endpoint,
    )


@pytest.fixture
def faulty_store(s3_root: str, faulty_creds: str) -> Store:
    """The S3 store behind the fault proxy."""
    return open_store(s3_root, faulty_creds, timeout_s=20)
