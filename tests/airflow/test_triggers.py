"""Waits in the triggerer against a scripted service: what they ask, what they tell, what they leave alone."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from airflow_cortex_training.connection import Target
from airflow_cortex_training.triggers import hub as hub_module
from airflow_cortex_training.triggers import kill, waiting
from airflow_cortex_training.triggers import requests as requests_module
from airflow_cortex_training.triggers.hub import RateBudget, open_hub
from airflow_cortex_training.triggers.jobs import CortexTrainingJobTrigger
from airflow_cortex_training.triggers.requests import CortexTrainingRequestTrigger
from airflow_cortex_training.triggers.session import MAX_REPLY_BYTES
from airflow_cortex_training.triggers.stored import TRIGGER_VERSION
from cortex_training.protocol.durations import Durations

PAT = "pat-0123456789-very-secret"


class ScriptedService:
    """Answers GETs from a script, one entry a request, the last one for ever; counts what it is asked."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.asked: list[str] = []
        self.at: list[float] = []
        self.tokens: list[str] = []
        self.accepts: str | None = None
        self.base_url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs.split('/cortex-training', 1)[-1]}")
        self.at.append(time.monotonic())
        self.tokens.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if self.accepts is not None and self.tokens[-1] != self.accepts:
            return web.json_response({"code": "390100", "message": "no such token"}, status=401)
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if entry == "hang up":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status, body, headers = entry if isinstance(entry, tuple) else (200, entry, {})
        return web.json_response(body, status=status, headers=headers)


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedService]:
    service = ScriptedService()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.base_url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    yield service
    await runner.cleanup()


@pytest.fixture
def conn(scripted: ScriptedService, connection) -> str:
    return connection("ct", host=scripted.base_url)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LINGER_S", 0.0)


def request_trigger(**changes: Any) -> CortexTrainingRequestTrigger:
    now = time.time()
    arguments = {
        "target": {"conn_id": "ct"},
        "job_id": "j1",
        "request_id": "r1",
        "operation": "step",
        "started": now,
        "not_before": now,
        "deadline": now + 30,
        "generation": [0, 0],
        **changes,
    }
    return CortexTrainingRequestTrigger(**arguments)


def job_trigger(**changes: Any) -> CortexTrainingJobTrigger:
    now = time.time()
    arguments = {"target": {"conn_id": "ct"}, "job_id": "j1", "started": now, "not_before": now, "deadline": now + 30}
    return CortexTrainingJobTrigger(**{**arguments, **changes})


async def fire(trigger: Any) -> dict[str, Any]:
    events = [event.payload async for event in trigger.run()]
    assert len(events) == 1
    return events[0]


class TestRequest:
    async def test_fires_once_when_the_request_settled(self, scripted, conn) -> None:
        scripted.script = [
            {"status": "pending"},
            {"status": "REQUEST_STATE_RUNNING"},
            {"status": "done", "result": {"a": 1}},
        ]
        event = await fire(request_trigger())
        assert event == {"v": 1, "status": "settled", "job_id": "j1", "request_id": "r1", "state": "done"}
        assert scripted.asked == ["GET /j1/requests/r1?max_events=1"] * 3

    async def test_a_failed_request_is_settled_too(self, scripted, conn) -> None:
        scripted.script = [{"status": "failed", "error": "out of memory"}]
        assert (await fire(request_trigger()))["state"] == "failed"

    async def test_trouble_does_not_end_the_wait(self, scripted, conn) -> None:
        scripted.script = [
            "hang up",
            (500, {}, {}),
            (503, {}, {"Retry-After": "0"}),
            (429, {}, {"Retry-After": "0"}),
            {"status": "done"},
        ]
        assert (await fire(request_trigger()))["status"] == "settled"
        assert len(scripted.asked) == 5

    async def test_retry_after_is_obeyed(self, scripted, conn) -> None:
        scripted.script = [(429, {}, {"Retry-After": "3"}), {"status": "done"}]
        assert (await fire(request_trigger()))["status"] == "settled"
        assert scripted.at[1] - scripted.at[0] >= 3

    async def test_a_date_to_retry_after_is_by_the_services_clock(self, scripted, conn) -> None:
        clock = {"Date": "Wed, 21 Oct 2037 07:28:00 GMT", "Retry-After": "Wed, 21 Oct 2037 07:28:02 GMT"}
        scripted.script = [(503, {}, clock), {"status": "done"}]
        assert (await asyncio.wait_for(fire(request_trigger(deadline=time.time() + 600)), timeout=60))["status"]
        assert scripted.at[1] - scripted.at[0] >= 2

    async def test_a_large_reply_is_left_to_the_worker(self, scripted, conn) -> None:
        scripted.script = [{"status": "done", "result": {"payload_b64": "A" * (2 * MAX_REPLY_BYTES)}}]
        event = await fire(request_trigger())
        assert event["status"] == "settled"
        assert len(json.dumps(event)) < 1000

    @pytest.mark.parametrize("changes", [{"operation": "generate-stream"}, {}])
    async def test_a_stream_is_refused(self, scripted, conn, changes) -> None:
        scripted.script = [{"status": "streaming"}]
        event = await fire(request_trigger(**changes))
        assert event["status"] == "refused"
        assert len(scripted.asked) == (0 if changes else 1)

    @pytest.mark.parametrize("refusal", [400, 404, 409, 410, 412])
    async def test_an_ended_job_is_the_answer(self, scripted, conn, refusal) -> None:
        scripted.script = [(refusal, {"message": "not running"}, {}), {"status": "failed", "reason": "node lost"}]
        event = await fire(request_trigger())
        assert (event["status"], event["state"], event["error"]) == ("ended", "failed", "node lost")

    async def test_a_refusal_on_a_job_that_runs_is_an_outcome_only_if_it_is_final(self, scripted, conn) -> None:
        running = {"status": "running"}
        scripted.script = [(409, {}, {}), running, (404, {}, {}), running, {"status": "done"}]
        assert (await fire(request_trigger()))["status"] == "settled"
        scripted.script = [(400, {"message": "no such cursor"}, {}), running]
        event = await fire(request_trigger())
        assert event["status"] == "refused"
        assert "no such cursor" in event["error"]

    async def test_an_unknown_request_is_believed_lost_after_a_while(self, scripted, conn, monkeypatch) -> None:
        monkeypatch.setattr(waiting, "LOST_AFTER_S", 0.5)
        scripted.script = [(404, {"message": "no such request"}, {})]
        assert (await fire(request_trigger()))["status"] == "lost"

    async def test_the_deadline_is_absolute(self, scripted, conn) -> None:
        scripted.script = [{"status": "running"}]
        # As after a restart of the triggerer: started long ago, and the deadline has not moved.
        event = await fire(request_trigger(started=time.time() - 3600, deadline=time.time() - 1))
        assert event["status"] == "timeout"
        assert len(scripted.asked) == 1

    async def test_nothing_is_told_before_its_time(self, scripted, conn) -> None:
        scripted.script = [{"status": "done"}]
        moment = time.time() + 1.0
        await fire(request_trigger(not_before=moment))
        assert time.time() >= moment

    async def test_a_cancellation_is_passed_on(self, scripted, conn) -> None:
        scripted.script = [{"status": "running"}]
        task = asyncio.ensure_future(fire(request_trigger()))
        await asyncio.sleep(0.3)
        task.cancel("user action")
        with pytest.raises(asyncio.CancelledError):
            await task


class TestPace:
    """Requests of one operation on one job are waited for with what the last ones took; by a clock of the test."""

    @pytest.fixture
    def clock(self, monkeypatch) -> SimpleNamespace:
        clock = SimpleNamespace(now=1_800_000_000.0)

        async def sleep(seconds: float) -> None:
            clock.now += seconds

        monkeypatch.setattr(waiting, "time", SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now))
        monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=sleep))
        return clock

    async def wait(self, clock: SimpleNamespace, durations: Durations, takes_s: float) -> tuple[float, int]:
        """How late a request is noticed, in seconds, and after how many looks."""
        started, looks = clock.now, 0

        async def look() -> waiting.Outcome | None:
            nonlocal looks
            looks += 1
            return waiting.Outcome(waiting.Status.SETTLED) if clock.now >= started + takes_s else None

        await waiting.wait_for(
            look,
            what="a step",
            started=started,
            deadline=started + 3600,
            bounds=requests_module._BOUNDS,
            durations=durations,
            log=logging.getLogger(__name__),
        )
        return clock.now - started - takes_s, looks

    async def test_a_steady_request_is_noticed_soon(self, clock) -> None:
        durations = Durations()
        noticed = [await self.wait(clock, durations, 60.0) for _ in range(10)]
        assert max(late for late, _ in noticed[4:]) <= 3.0
        assert max(looks for _, looks in noticed[4:]) <= 10

    async def test_only_a_request_that_settled_teaches(self, clock) -> None:
        durations = Durations()

        async def look() -> waiting.Outcome:
            return waiting.Outcome(waiting.Status.ENDED)

        clock.now += 60
        arguments = {"what": "", "started": clock.now - 60, "deadline": clock.now, "bounds": requests_module._BOUNDS}
        await waiting.wait_for(look, durations=durations, log=None, **arguments)
        assert durations.recent() == ()


class TestJob:
    async def test_running_and_ended(self, scripted, conn) -> None:
        scripted.script = [{"status": "JOB_STATE_RUNNING"}]
        assert (await fire(job_trigger()))["status"] == "running"
        scripted.script = [{"status": "failed", "reason": "no GPUs"}]
        event = await fire(job_trigger())
        assert (event["status"], event["state"], event["error"]) == ("ended", "failed", "no GPUs")


class TestVersions:
    @pytest.mark.parametrize("changes", [{"v": TRIGGER_VERSION + 1}, {"colour": "blue"}])
    async def test_a_newer_trigger_is_refused_when_it_runs(self, scripted, conn, changes) -> None:
        # An exception in the constructor would end Airflow's trigger runner with every other wait in it.
        for make in (request_trigger, job_trigger):
            with pytest.raises(RuntimeError, match="deferred by a newer release"):
                await fire(make(**changes))
        assert scripted.asked == []


class TestHub:
    async def test_waits_share_one_lookup_and_one_session(self, scripted, conn, monkeypatch) -> None:
        lookups = []
        original = hub_module.CortexTrainingHook.asettings

        async def counted(hook):
            lookups.append(hook.conn_id)
            return await original(hook)

        monkeypatch.setattr(hub_module.CortexTrainingHook, "asettings", counted)
        scripted.script = [{"status": "done"}]
        hubs = []

        async def wait() -> None:
            async with open_hub(Target("ct")) as hub:
                hubs.append(hub)
                await hub.request_status("j", "r")
                await asyncio.sleep(0.2)

        await asyncio.gather(*(wait() for _ in range(50)))
        assert len(lookups) == 1
        assert len(set(map(id, hubs))) == 1
        assert len(scripted.asked) == 50

    async def test_other_endpoints_have_other_hubs(self, scripted, conn) -> None:
        async with open_hub(Target("ct")) as one, open_hub(Target("ct", schema="OTHER")) as other:
            assert one is not other

    async def test_an_unknown_connection_is_an_outcome(self) -> None:
        with pytest.raises(Exception, match="'gone' does not exist"):
            await fire(request_trigger(target={"conn_id": "gone"}))

    async def test_a_refused_token_is_read_again_once(self, scripted, conn, connection) -> None:
        scripted.script, scripted.accepts = [{"status": "done"}], "pat-the-next-one"
        async with open_hub(Target("ct")) as hub:
            connection("ct", host=scripted.base_url, password="pat-the-next-one")
            await asyncio.gather(*(hub.request_status("j", "r") for _ in range(10)))
        assert scripted.tokens.count("pat-the-next-one") == 10

    async def test_a_revoked_token_ends_the_wait_without_a_storm(self, scripted, conn) -> None:
        scripted.script, scripted.accepts = [{"status": "done"}], "another"
        event = await fire(request_trigger())
        assert event["status"] == "denied"
        assert len(scripted.asked) == 1
        assert PAT not in json.dumps(event)

    async def test_the_budget_spreads_requests(self) -> None:
        budget = RateBudget(per_s=100.0, burst=10)
        began = time.monotonic()
        await asyncio.gather(*(budget.take() for _ in range(60)))
        assert time.monotonic() - began >= 0.45


class Comms:
    """What the triggerer's supervisor would answer."""

    def __init__(self, state: str | None, token: Any = None, *, known: bool = True) -> None:
        self.state, self.token, self.known = state, token, known

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kill, "_state", lambda ti: (self.state, self.known))
        monkeypatch.setattr(kill, "_token", lambda ti: self.token)


TI = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1)


class TestKill:
    @pytest.mark.parametrize(
        ("comms", "cancels"),
        [
            (Comms("failed"), True),
            (Comms("skipped"), True),
            (Comms("removed"), True),
            (Comms(None, known=False), True),
            (Comms(None), False),
            (Comms("scheduled"), False),
            (Comms("queued"), False),
            (Comms("running"), False),
            (Comms("success"), False),
            (Comms("up_for_retry"), False),
            # Another triggerer took over, or a retry adopted the job: the task still waits for this very thing.
            (Comms("deferred", {"id": "mine", "generation": [0, 0]}), False),
            # Cleared, and the new try waits for something else by now.
            (Comms("deferred", {"id": "other", "generation": [1, 1]}), True),
            # A retry of the same generation replaced the job: whoever did that settled the old one.
            (Comms("deferred", {"id": "other", "generation": [0, 0]}), False),
            # The same, told by releases that do and do not count the clears of other tasks of the run.
            (Comms("deferred", {"id": "other", "generation": [0, 1]}), False),
            (Comms("deferred", {"id": "other", "generation": [0]}), False),
            (Comms("deferred", {"id": "other", "generation": None}), True),
            (Comms("deferred", None), False),
        ],
    )
    async def test_only_a_user_may_cancel(self, monkeypatch, comms, cancels) -> None:
        comms.install(monkeypatch)
        assert await kill.may_cancel(TI, "mine", [0, 0]) is cancels

    async def test_what_cannot_be_found_out_cancels_nothing(self, monkeypatch) -> None:
        def unreachable(ti: Any) -> Any:
            raise OSError("the supervisor is gone")

        monkeypatch.setattr(kill, "_state", unreachable)
        assert await kill.may_cancel(TI, "mine", [0, 0]) is False
        assert await kill.may_cancel(None, "mine", [0, 0]) is False

    async def test_a_kill_survives_repeated_cancellation(self, scripted, conn, monkeypatch) -> None:
        Comms("failed").install(monkeypatch)
        scripted.script = [(200, {"status": "cancelled"}, {})]
        release = asyncio.Event()
        allowed = kill.may_cancel

        async def slow(*arguments: Any) -> bool:
            await release.wait()
            return await allowed(*arguments)

        monkeypatch.setattr(kill, "may_cancel", slow)
        trigger = request_trigger(cancel_on_kill=True)
        trigger.task_instance = TI
        killing = asyncio.ensure_future(trigger.on_kill())
        await asyncio.sleep(0.05)
        killing.cancel("again")
        with pytest.raises(asyncio.CancelledError):
            await killing
        release.set()
        for _ in range(100):
            if scripted.asked:
                break
            await asyncio.sleep(0.05)
        assert [line for line in scripted.asked if "operation" in line] == ["POST /j1/operation"]

    @pytest.mark.parametrize("status", [404, 409])
    async def test_a_request_that_is_over_by_then_is_no_failure(self, scripted, conn, monkeypatch, status) -> None:
        Comms("failed").install(monkeypatch)
        scripted.script = [(status, {"message": "it is done"}, {})]
        trigger = request_trigger(cancel_on_kill=True)
        trigger.task_instance = TI
        await trigger.on_kill()
        assert any("operation" in line for line in scripted.asked)

    async def test_without_cancel_on_kill_nothing_is_asked(self, scripted, conn) -> None:
        trigger = request_trigger()
        trigger.task_instance = TI
        await trigger.on_kill()
        assert scripted.asked == []


async def test_triggers_only_read(scripted, conn) -> None:
    scripted.script = [{"status": "running"}, {"status": "done"}]
    await fire(request_trigger())
    assert all(line.startswith("GET ") for line in scripted.asked)
