"""The client objects themselves: threads, forks, event loops, pickles."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import threading
from typing import Any

import aiohttp
import pytest

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient, wire
from cortex_training.auth import PatAuth
from cortex_training.errors import ConfigurationError, DeadlineExceeded


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    def methods(kind: type) -> dict[str, Any]:
        return {
            name: inspect.signature(value)
            for name, value in vars(kind).items()
            if inspect.isfunction(value) and not name.startswith("_") and name not in ("close", "aclose")
        }

    blocking, coroutines = methods(CortexTrainingClient), methods(AsyncCortexTrainingClient)
    assert blocking.keys() == coroutines.keys()
    for name, signature in blocking.items():
        assert signature.parameters == coroutines[name].parameters, name
        function = vars(AsyncCortexTrainingClient)[name]
        assert inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function), name


def test_every_method_says_what_it_does() -> None:
    for kind in (CortexTrainingClient, AsyncCortexTrainingClient):
        for name, value in vars(kind).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                assert value.__doc__, name


def test_the_constructors_take_the_public_clients_arguments_in_its_order() -> None:
    public = [
        *("self", "base_url", "database", "schema", "endpoint", "poll_interval", "poll_timeout"),
        *("poll_backoff_multiplier", "poll_max_interval", "pool_maxsize", "max_retries"),
    ]
    for kind in (CortexTrainingClient, AsyncCortexTrainingClient):
        assert list(inspect.signature(kind.__init__).parameters)[: len(public)] == public


def test_a_client_pickles_as_its_configuration(weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body={"jobs": []}))
    original = CortexTrainingClient.from_pat(weather.url, "secret-token-value", "DB", "S", poll_timeout=7.0)
    original.list_jobs()
    copy = pickle.loads(pickle.dumps(original))
    assert repr(copy) == repr(original)
    assert copy.list_jobs() == []
    assert weather.seen[-1].headers["authorization"] == "Bearer secret-token-value"
    asynchronous = pickle.loads(pickle.dumps(AsyncCortexTrainingClient(weather.url, "DB", "S")))
    assert asyncio.run(_listed(asynchronous)) == []
    original.close()
    copy.close()


async def _listed(client: AsyncCortexTrainingClient) -> list[dict[str, Any]]:
    async with client:
        return await client.list_jobs()


def test_a_representation_shows_where_but_no_secret() -> None:
    client = CortexTrainingClient("http://h:1/", "DB", "S", auth=PatAuth("secret-token-value"))
    assert repr(client) == "CortexTrainingClient('http://h:1', 'DB', 'S', 'cortex-training', auth=PatAuth(***))"
    assert "secret" not in repr(client._settings)


def test_threads_share_one_client(weather: Any, scripted: Any) -> None:
    weather.script = lambda seen: scripted.Reply(body={"job_id": seen.path.removeprefix("/")})
    with CortexTrainingClient(weather.url, "DB", "S") as client:
        failures: list[str] = []

        def ask(number: int) -> None:
            for index in range(20):
                job = f"job-{number}-{index}"
                answer = client.get_job(job)["job_id"]
                if not answer.endswith(job):
                    failures.append(f"{job}: {answer}")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(weather.seen) == 160


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_gets_sockets_of_its_own(weather: Any, scripted: Any) -> None:
    weather.script = lambda seen: scripted.Reply(body={"connection": seen.connection})
    with CortexTrainingClient(weather.url, "DB", "S") as client:
        mine = client.get_job("parent")["connection"]
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if client.get_job("child")["connection"] != mine else 3)
            except BaseException:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.get_job("parent")["connection"] == mine


def test_a_client_works_again_after_close(weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body={"jobs": []}))
    with CortexTrainingClient(weather.url, "DB", "S") as client:
        client.list_jobs()
    assert client.list_jobs() == []
    client.close()
    client.close()


def test_an_async_client_serves_one_event_loop_after_the_other(weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body={"jobs": []}))
    client = AsyncCortexTrainingClient(weather.url, "DB", "S")

    async def ask() -> list[dict[str, Any]]:
        async with client:
            return await client.list_jobs()

    assert asyncio.run(ask()) == asyncio.run(ask()) == []


async def test_a_shared_session_is_used_and_left_open(weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body={"jobs": []}))
    async with aiohttp.ClientSession() as session:
        async with AsyncCortexTrainingClient(weather.url, "DB", "S", session=session) as client:
            await client.list_jobs()
        assert not session.closed
    async with aiohttp.ClientSession(trust_env=True) as session:
        with pytest.raises(ConfigurationError, match="trust_env=False"):
            AsyncCortexTrainingClient(weather.url, "DB", "S", session=session)


async def test_many_waits_share_one_client_and_its_connections(weather: Any, scripted: Any) -> None:
    looks: dict[str, int] = {}
    lock = threading.Lock()

    def respond(seen: Any) -> Any:
        with lock:
            looks[seen.path] = looks.get(seen.path, 0) + 1
            done = looks[seen.path] > 2
        return scripted.Reply(body={"status": "done" if done else "running", "result": {"path": seen.path}})

    weather.script = respond
    async with AsyncCortexTrainingClient(weather.url, "DB", "S", pool_maxsize=16) as client:
        results = await asyncio.gather(*(client.poll_request("j", f"r{number}") for number in range(60)))
    assert {result["path"].rpartition("/")[2] for result in results} == {f"r{number}" for number in range(60)}
    assert len({seen.connection for seen in weather.seen}) <= 16


async def test_cancelling_a_wait_ends_it_at_once(weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Hang())
    async with AsyncCortexTrainingClient(weather.url, "DB", "S") as client:
        wait = asyncio.create_task(client.poll_request("j", "r"))
        await asyncio.sleep(0.2)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait


async def test_decoding_a_large_result_leaves_the_loop_free(
    weather: Any, scripted: Any, large_result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weather.sequence(scripted.Reply(body=large_result))
    decoded_in: list[threading.Thread] = []
    decode = wire.loads

    def watched(*args: Any, **kwargs: Any) -> Any:
        decoded_in.append(threading.current_thread())
        return decode(*args, **kwargs)

    monkeypatch.setattr(wire, "loads", watched)
    async with AsyncCortexTrainingClient(weather.url, "DB", "S") as client:
        result = await client.poll_request("j", "r")
    assert len(result["x"]) == 400_000
    assert decoded_in
    assert threading.main_thread() not in decoded_in


def test_a_wait_in_a_dead_calm_ends_at_its_deadline(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body={"status": "running"}))
    with pytest.raises(DeadlineExceeded, match="last state: running"):
        clients(weather.url).poll_request("j", "r", timeout_s=0.5)
