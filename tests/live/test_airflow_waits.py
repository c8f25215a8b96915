"""Waits for single requests: many at once, bad weather between, wrong answers, credentials that run out."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from demo.airflow_cluster import AirflowCluster
from tests.faults.proxy import ANSWER, DROP_AFTER, HOLD, Rule
from tests.live.conftest import PAT, Night, Run, wait_until
from tests.live.plans import training_sub_job
from tests.live.searching import in_database, in_files

POLL = r"GET .*/requests/"
SAVE = r"POST .*/save$"
UNDER_WAY = {"status": "running"}
EVER = 10**9
BUDGET_PER_S, BURST = 50, 20

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


def test_requests_that_end_soon_are_not_deferred(night: Night) -> None:
    run = saves(night, "quick_saves", count=64)
    run.wait(timeout_s=600)
    instances = of(run, "save")
    assert Counter(ti["state"] for ti in instances) == {"success": 64}
    assert {ti["try_number"] for ti in instances} == {1}
    assert not [log for log in task_logs(night.airflow, run, "save") if "DEFERRED" in log]
    assert len(night.executed("save")) == 64
    night.settle()


def test_requests_that_end_as_their_tasks_are_deferred_fail_none(night: Night) -> None:
    run = saves(night, "deferred_saves", count=16)
    run.wait(timeout_s=600)
    instances = of(run, "save")
    assert Counter(ti["state"] for ti in instances) == {"success": 16}
    # A task that was taken for lost would have a second try: no retry helps this out.
    assert {ti["try_number"] for ti in instances} == {1}
    assert len([log for log in task_logs(night.airflow, run, "save") if "DEFERRED" in log]) == 16
    assert len(night.executed("save")) == 16
    night.settle()


def test_fifty_waits_on_two_triggerers_one_of_which_dies(night: Night) -> None:
    weather = under_way(night)
    run = saves(night, "deferred_saves", count=50)
    wait_until(lambda: Counter(ti["state"] for ti in of(run, "save"))["deferred"] == 50, "all wait", 300)
    posts = night.proxy.count("POST ")

    asked, since = night.proxy.count(POLL), time.monotonic()
    wait_until(lambda: night.proxy.count(POLL) >= asked + 100, "they are all asked for")
    assert night.proxy.count(POLL) - asked <= 2 * (BURST + BUDGET_PER_S * (time.monotonic() - since + 1))

    triggerers = triggerer_pids(night.airflow)
    (holder, _), *_ = Counter(night.airflow.owner_of(ti) for ti in of(run, "save")).most_common()
    night.airflow.kill_component(holder)
    night.airflow.restart_triggerer(holder)
    wait_until(lambda: lost(night.airflow, of(run, "save")) == [], "every wait has a living triggerer")
    night.proxy.rules.remove(weather)
    run.wait(timeout_s=300)

    assert Counter(ti["state"] for ti in of(run, "save")) == {"success": 50}
    # The cancel of the teardown is the only thing that was sent since: waits read, wherever they move.
    assert night.proxy.count("POST ") - posts == 1
    assert len(night.executed("save")) == 50
    assert len({ti["id"] for ti in of(run, "save")}) == 50
    # One look-up of the connection for all waits of a triggerer, and another one where they moved.
    triggerers |= triggerer_pids(night.airflow)
    looked_up = {pid: count for pid, count in night.lookups().items() if pid in triggerers}
    assert looked_up
    assert max(looked_up.values()) <= 2, looked_up
    night.settle()


def test_bad_weather_between_two_polls_costs_no_second_job(night: Night) -> None:
    weather = under_way(night)
    run = saves(night, "deferred_saves", count=1)
    wait_until(lambda: [ti["state"] for ti in of(run, "save")] == ["deferred"], "it waits")
    wait_until(lambda: weather.seen > 2, "it is asked for")

    # A poll hangs for some seconds, the next one loses its connection, then the service is away for a while.
    hanging = night.proxy.add(POLL, HOLD)
    night.proxy.add(POLL, DROP_AFTER)
    away = night.proxy.add(POLL, ANSWER, status=503, body={"message": "back soon"}, times=EVER)
    night.proxy.rules.remove(weather)
    assert hanging.holding.wait(60)
    time.sleep(3)
    seen: list[float] = []

    def see() -> None:
        seen.append(time.monotonic())

    hanging.released.set()
    wait_until(lambda: away.seen > 2, "it is asked in vain")
    night.proxy.add(POLL, ANSWER, status=429, headers={"Retry-After": "7"}, before=see)
    night.proxy.add(POLL, "forward", before=see)
    night.proxy.rules.remove(away)
    run.wait()

    assert seen[1] - seen[0] >= 7
    assert [ti["try_number"] for ti in of(run, "save")] == [1]
    assert len(night.executed("save")) == 1
    night.settle()


def test_an_answer_of_any_size_reaches_neither_event_nor_database(night: Night) -> None:
    words = "the model said: \ud83d\ude00 \u0000 ".replace("\u0000", "\\0") + "x" * 300_000
    failed = {"status": "failed", "error": words, "result": {"blob": words}}
    night.proxy.add(POLL, ANSWER, status=200, body=failed, times=EVER)
    run = saves(night, "deferred_saves", count=2)
    run.wait("failed")
    assert {ti["state"] for ti in of(run, "save")} == {"failed"}
    assert night.airflow.pids().keys() >= {"triggerer", "triggerer-2"}
    assert "failed" in "".join(task_logs(night.airflow, run, "save"))
    assert in_database(night.airflow, "x" * 2000) == []
    night.settle()


def test_a_credential_that_is_replaced_is_read_again_and_one_that_is_revoked_ends_the_wait(night: Night) -> None:
    weather = under_way(night)
    run = saves(night, "deferred_saves", count=2)
    wait_until(lambda: Counter(ti["state"] for ti in of(run, "save"))["deferred"] == 2, "all wait")
    wait_until(lambda: night.proxy.count(POLL) > 4, "they are asked for")
    night.connect(pat="pat-of-the-next-day-9876543210")
    night.proxy.token = "pat-of-the-next-day-9876543210"
    asked = night.proxy.count(POLL)
    wait_until(lambda: weather.seen > asked + 2, "they go on with the new credential")
    night.proxy.rules.remove(weather)
    run.wait()
    night.settle()

    under_way(night)
    revoked = saves(night, "deferred_saves", count=2)
    wait_until(lambda: Counter(ti["state"] for ti in of(revoked, "save"))["deferred"] == 2, "all wait")
    night.proxy.token = "of somebody else"
    wait_until(lambda: {ti["state"] for ti in of(revoked, "save")} == {"failed"}, "they fail")
    assert {ti["try_number"] for ti in of(revoked, "save")} == {1}
    assert "401" in "".join(task_logs(night.airflow, revoked, "save"))
    asked = len(night.proxy.lines)
    time.sleep(5)
    assert len(night.proxy.lines) - asked < 20  # The teardown asks a few times, nobody storms.
    night.proxy.token = None
    # Neither of the two, nor the one before them, is anywhere in logs or database.
    for secret in (PAT, "pat-of-the-next-day-9876543210"):
        assert in_files(night.airflow.home, secret) == []
        assert in_database(night.airflow, secret) == []


def test_a_worker_dies_between_create_and_its_answer(night: Night) -> None:
    for supervisor_too in (False, True):
        held = night.proxy.add(r"POST .*/cortex-training/?(jobs)?$", HOLD)
        run = saves(night, "quick_saves", count=1)
        assert held.holding.wait(90), (run.why(), night.proxy.lines)
        night.airflow.kill_task(run.instance("create")["id"], supervisor_too=supervisor_too)
        held.released.set()
        run.wait()
        assert run.instance("create")["try_number"] == 2
    assert len(night.executed("save")) == 2
    night.settle(jobs=2)


def test_clearing_the_creation_of_a_job_cancels_it_and_creates_another(night: Night) -> None:
    weather = under_way(night)
    run = saves(night, "deferred_saves", count=1)
    wait_until(lambda: [ti["state"] for ti in of(run, "save")] == ["deferred"], "it waits")
    (old,) = night.live_jobs()
    run.clear("create", "running", "save", "cancel")
    wait_until(lambda: len(night.jobs()) == 2, "another job")
    wait_until(lambda: night.jobs()[old] == "cancelled", "the old one is cancelled")
    night.proxy.rules.remove(weather)
    run.wait()
    assert run.xcom("create") != old
    assert night.cancels(old) == 1
    night.settle(jobs=2)


def saves(night: Night, dag_id: str, *, count: int) -> Run:
    return night.start(dag_id, sub_jobs=[training_sub_job()], count=count)


def under_way(night: Night) -> Rule:
    """From now on every request is still running, whatever the service knows."""
    return night.proxy.add(POLL, ANSWER, status=200, body=UNDER_WAY, times=EVER)


def of(run: Run, task_id: str) -> list[dict[str, Any]]:
    return [ti for ti in run.night.airflow.task_instances(run.dag_id, run.run_id) if ti["task_id"] == task_id]


def task_logs(airflow: AirflowCluster, run: Run, task_id: str) -> list[str]:
    folder = airflow.home / "logs" / f"dag_id={run.dag_id}" / f"run_id={run.run_id}" / f"task_id={task_id}"
    return [path.read_text(errors="replace") for path in folder.rglob("*.log*")]


def lost(airflow: AirflowCluster, instances: list[dict[str, Any]]) -> list[str]:
    return [ti["id"] for ti in instances if ti["state"] == "deferred" and airflow.owner_of(ti) is None]


def triggerer_pids(airflow: AirflowCluster) -> set[int]:
    return {pid for name, pids in airflow.process_tree().items() if name.startswith("triggerer") for pid in pids}
