from __future__ import annotations

import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import certifi
import pytest
from snowflake.connector.errors import ProgrammingError

from cortex_training.datasets import build_dataset
from cortex_training.errors import ConfigurationError
from demo.snowflake_server import SnowflakeServer

TOKENIZER = Path(__file__).parents[1] / "compat" / "tokenizer"
ROOT = Path(__file__).parents[2]


def in_another_process(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_json(output: str) -> object:
    """What the script printed last; engines print log lines before."""
    return json.loads(output.strip().splitlines()[-1])


@pytest.fixture
def numbers(snowflake: SnowflakeServer) -> str:
    with snowflake.connect() as connection:
        cursor = connection.cursor()
        cursor.execute("create or replace table NUMBERS (N number, PROMPT varchar, COMPLETION varchar)")
        cursor.executemany(
            "insert into NUMBERS values (%s, %s, %s)", [(n, f"What is {n}? ", f"number {n}") for n in range(30)]
        )
    return "NUMBERS"


def test_a_table_outlives_its_connection_and_is_seen_from_other_processes(
    snowflake: SnowflakeServer, numbers: str
) -> None:
    script = f"""
import json, snowflake.connector
with snowflake.connector.connect(**{snowflake.connection_arguments()!r}) as connection:
    connection.cursor().execute("create or replace table MADE_ELSEWHERE as select * from {numbers} where N < 7")
    print(json.dumps(connection.cursor().execute("select count(*) from {numbers}").fetchone()))
"""
    assert last_json(in_another_process(script)) == [30]
    with snowflake.connect() as connection:
        assert connection.cursor().execute("select count(*) from MADE_ELSEWHERE").fetchone() == (7,)


def test_the_unmodified_hook_and_sql_operator_of_airflow_work_through_it(
    snowflake: SnowflakeServer, numbers: str, tmp_path: Path
) -> None:
    script = f"""
import json
from airflow.providers.common.sql.operators.sql import SQLExecuteQueryOperator
from airflow.providers.snowflake.hooks.snowflake import SnowflakeHook

operator = SQLExecuteQueryOperator(
    task_id="transform",
    conn_id="demo_snowflake",
    sql="create or replace table EVEN as select PROMPT, COMPLETION from {numbers} where mod(N, 2) = 0",
)
operator.execute({{}})
hook = SnowflakeHook(snowflake_conn_id="demo_snowflake")
assert type(operator.get_db_hook()) is SnowflakeHook
cursor = hook.get_conn().cursor()
cursor.execute("select * from EVEN")
print(json.dumps([hook.get_records("select count(*) from EVEN"), [column[0] for column in cursor.description]]))
"""
    output = in_another_process(
        script, AIRFLOW_CONN_DEMO_SNOWFLAKE=snowflake.airflow_connection_json(), AIRFLOW_HOME=str(tmp_path)
    )
    assert last_json(output) == [[[15]], ["PROMPT", "COMPLETION"]]


def test_the_credentials_block_of_prefect_works_through_it(
    snowflake: SnowflakeServer, numbers: str, tmp_path: Path
) -> None:
    arguments = snowflake.connection_arguments()
    own = {key: arguments.pop(key) for key in ("account", "user", "password")}
    script = f"""
import json
from prefect_snowflake import SnowflakeCredentials
with SnowflakeCredentials(**{own!r}).get_client(**{arguments!r}) as connection:
    print(json.dumps(connection.cursor().execute("select count(*) from {numbers}").fetchone()))
"""
    assert last_json(in_another_process(script, PREFECT_HOME=str(tmp_path))) == [30]


def test_a_dataset_is_built_from_a_query_of_the_real_connector(
    snowflake: SnowflakeServer, numbers: str, tmp_path: Path
) -> None:
    with snowflake.connect() as connection:
        cursor = connection.cursor().execute(f"select prompt, completion from {numbers}")
        by_cursor = build_dataset(cursor, tmp_path / "cursor", tokenizer=TOKENIZER, max_seq_len=128)
        cursor = connection.cursor().execute(f"select prompt, completion from {numbers}")
        by_arrow = build_dataset(cursor.fetch_arrow_batches(), tmp_path / "arrow", tokenizer=TOKENIZER, max_seq_len=128)
    assert by_cursor.rows == 30
    assert by_cursor.content_sha256 == by_arrow.content_sha256


def test_an_empty_result_and_a_missing_table_say_so(snowflake: SnowflakeServer, numbers: str, tmp_path: Path) -> None:
    with snowflake.connect() as connection:
        cursor = connection.cursor().execute(f"select prompt, completion from {numbers} where N > 99")
        with pytest.raises(ConfigurationError, match="gave no rows"):
            build_dataset(cursor, tmp_path, tokenizer=TOKENIZER, max_seq_len=128)
        with pytest.raises(ProgrammingError, match="ABSENT"):
            connection.cursor().execute("select * from ABSENT")


def test_session_variables_are_expanded_in_statements_and_not_in_text(snowflake: SnowflakeServer) -> None:
    with snowflake.connect() as connection:
        cursor = connection.cursor()
        cursor.execute("set LIMIT_N = 7")
        statement = "select $LIMIT_N + 1, '$LIMIT_N of ''$HOME''' /* it's $ANYTHING */ -- or $THIS"
        assert cursor.execute(statement).fetchone() == (8, "$LIMIT_N of '$HOME'")
        with pytest.raises(ProgrammingError, match="UNKNOWN"):
            cursor.execute("select $UNKNOWN")


def test_variant_messages_are_read_as_conversations(snowflake: SnowflakeServer, tmp_path: Path) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}])
    with snowflake.connect() as connection:
        cursor = connection.cursor()
        cursor.execute("create or replace table CHATS (MESSAGES variant)")
        cursor.execute("insert into CHATS select parse_json(%s)", (messages,))
        cursor.execute("select MESSAGES from CHATS")
        assert build_dataset(cursor, tmp_path, tokenizer=TOKENIZER, max_seq_len=128).rows == 1


def test_the_certificate_is_checked_and_the_key_is_private(snowflake: SnowflakeServer) -> None:
    address = (snowflake.host, snowflake.port)
    trusting = ssl.create_default_context(cafile=snowflake.ca_bundle)
    for name in ("127.0.0.1", "localhost"):
        with socket.create_connection(address) as plain, trusting.wrap_socket(plain, server_hostname=name) as secure:
            assert secure.version() in ("TLSv1.2", "TLSv1.3")
    usual = ssl.create_default_context(cafile=certifi.where())
    with socket.create_connection(address) as plain, pytest.raises(ssl.SSLCertVerificationError):
        usual.wrap_socket(plain, server_hostname="localhost")
    assert stat.S_IMODE((snowflake.folder / "server-key.pem").stat().st_mode) == 0o600
    # The bundle still holds the certificates that other addresses need.
    assert len(trusting.get_ca_certs()) > len(usual.get_ca_certs()) > 50


def test_trust_is_given_back_and_the_process_is_gone_after_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/before.pem")
    server = SnowflakeServer(tmp_path).start()
    pid = server.pid
    assert os.environ["REQUESTS_CA_BUNDLE"] == str(server.ca_bundle)
    server.stop()
    server.stop()  # twice is once
    assert os.environ["REQUESTS_CA_BUNDLE"] == "/before.pem"
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    script = f"""
import os, signal
from demo.snowflake_server import SnowflakeServer
print(SnowflakeServer({str(tmp_path)!r}).start().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    server = int(parent.stdout)
    for _ in range(600):
        if not _is_running(server):
            return
        time.sleep(0.1)
    os.kill(server, 9)
    pytest.fail("the server outlived its parent")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "server-key.pem").mkdir()  # where the key has to go
    with pytest.raises(RuntimeError, match="did not start") as caught:
        SnowflakeServer(tmp_path).start()
    assert "server-key.pem" in str(caught.value)
