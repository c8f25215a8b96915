"""A missing database is created by a client that was told to, and by no other."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cortex_training import CortexTrainingClient, DatabaseNotCreated
from cortex_training.errors import ApiError, ConfigurationError, NotFoundError

STATEMENTS = "/api/v2/statements"
MISSING = {"code": "517602", "message": "Database 'DB' does not exist or not authorized."}


class Account:
    """Misses its database until both statements that a client may send were executed."""

    def __init__(self, server: Any, scripted: Any, needed: int, statement_reply: Any = None) -> None:
        self._reply = scripted.Reply
        self._server = server
        self._needed = needed
        self._statement_reply = statement_reply
        server.script = self.answer

    def answer(self, seen: Any) -> Any:
        if seen.target == STATEMENTS:
            return self._statement_reply or self._reply(body={"data": []})
        if len(self.statements()) < self._needed:
            return self._reply(status=404, body=MISSING)
        return self._reply(body={"jobs": [], "request_id": "request-1"})

    def statements(self) -> list[str]:
        return [seen.json["statement"] for seen in self._server.seen if seen.target == STATEMENTS]


def test_without_the_option_nothing_is_created(clients: Any, weather: Any, scripted: Any) -> None:
    account = Account(weather, scripted, needed=1)
    with pytest.raises(NotFoundError, match="does not exist or not authorized"):
        clients(weather.url).list_jobs()
    assert account.statements() == []


def test_the_database_is_created_and_the_call_sent_again(clients: Any, weather: Any, scripted: Any) -> None:
    account = Account(weather, scripted, needed=1)
    client = clients(weather.url, create_database=True)
    assert client.step("job-1") == "request-1"
    assert client.list_jobs() == []
    assert account.statements() == ["CREATE DATABASE IF NOT EXISTS DB"]
    assert [seen.target == STATEMENTS for seen in weather.seen] == [False, True, False, False]


def test_a_schema_of_its_own_is_created_too(weather: Any, scripted: Any) -> None:
    account = Account(weather, scripted, needed=2)
    # The script of the conftest knows one prefix; what matters here is what is executed.
    with CortexTrainingClient(weather.url, "DB", 'odd "name', create_database=True) as client:
        assert client.list_jobs() == []
    assert account.statements() == [
        "CREATE DATABASE IF NOT EXISTS DB",
        'CREATE SCHEMA IF NOT EXISTS DB."odd ""name"',
    ]


def test_a_name_is_never_a_second_statement(weather: Any, scripted: Any) -> None:
    account = Account(weather, scripted, needed=1)
    with CortexTrainingClient(weather.url, "x; DROP DATABASE y", "PUBLIC", create_database=True) as client:
        client.list_jobs()
    assert account.statements() == ['CREATE DATABASE IF NOT EXISTS "x; DROP DATABASE y"']


def test_what_stays_missing_is_an_error_and_is_created_once(clients: Any, weather: Any, scripted: Any) -> None:
    account = Account(weather, scripted, needed=1000)
    client = clients(weather.url, create_database=True)
    for _ in range(3):
        with pytest.raises(NotFoundError, match="does not exist or not authorized"):
            client.list_jobs()
    assert len(account.statements()) == 1


def test_other_refusals_create_nothing(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(status=400, body={"message": "job_id is malformed"}))
    with pytest.raises(ApiError, match="malformed"):
        clients(weather.url, create_database=True).get_job("j")
    assert len(weather.seen) == 1


@pytest.mark.parametrize(
    ("status", "words"), [(202, "accepted but has not completed"), (403, "Insufficient privileges")]
)
def test_a_failed_creation_says_what_to_run(clients: Any, weather: Any, scripted: Any, status: int, words: str) -> None:
    Account(weather, scripted, 1, scripted.Reply(status=status, body={"message": "Insufficient privileges"}))
    with pytest.raises(DatabaseNotCreated, match=f"CREATE DATABASE IF NOT EXISTS DB.*{words}.*role") as caught:
        clients(weather.url, create_database=True).list_jobs()
    assert isinstance(caught.value, RuntimeError)


def test_threads_that_find_it_missing_all_succeed(weather: Any, scripted: Any) -> None:
    Account(weather, scripted, needed=1)
    results: list[Any] = []
    with CortexTrainingClient(weather.url, "DB", "PUBLIC", create_database=True) as client:
        threads = [threading.Thread(target=lambda: results.append(client.list_jobs())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [[]] * 8


def test_the_option_is_a_flag(clients: Any) -> None:
    with pytest.raises(ConfigurationError, match="create_database"):
        clients("http://127.0.0.1:1", create_database="yes")
