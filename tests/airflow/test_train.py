"""The training run as a task: driven by the trigger or by the worker, over retries, clears, stops and kills."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import AssetAlias
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralError, TaskDeferralTimeout, TaskDeferred

from airflow_cortex_training.assets import publications
from airflow_cortex_training.links import CortexTrainingCheckpointLink, CortexTrainingJobLink
from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator
from airflow_cortex_training.operators.train import CortexTrainingTrainOperator
from airflow_cortex_training.run_folder import is_let_go, write_plan
from airflow_cortex_training.triggers import kill
from airflow_cortex_training.triggers import train as train_trigger
from airflow_cortex_training.triggers.train import CortexTrainingTrainTrigger
from cortex_training.client import CortexTrainingClient
from cortex_training.errors import CortexTrainingError, DeadlineExceeded
from cortex_training.publication import PosixStore, PublicationLog
from cortex_training.states import JobState, is_terminal_job, job_state
from cortex_training.training import TrainingPlan, status
from cortex_training.training.journal import JournalWriter, read_journal
from tests.airflow.test_operators import SAMPLING, TRAINING
from tests.faults.proxy import HOLD, FaultProxy

STEPS = 4


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def plan(root: str, manifest: str, **changes: Any) -> dict[str, Any]:
    value = {
        "root": root,
        "dataset": manifest,
        "steps": STEPS,
        "micro_batch_size": 2,
        "save_every_steps": 2,
        "learning_rate": {"schedule": "constant", "peak": 3e-3},
        "patience_s": 60,
        **changes,
    }
    if "job_id" not in value:
        value.setdefault("sub_jobs", [copy.deepcopy(TRAINING)])
    return value


def train(conn_id: str, plan: Any, **arguments: Any) -> CortexTrainingTrainOperator:
    return CortexTrainingTrainOperator(task_id="train", conn_id=conn_id, plan=plan, **{"deferrable": True, **arguments})


def steps_executed(service: Any, root: str) -> list[int]:
    jobs = status(root).state.job_ids
    return [
        entry["global_steps"] for entry in service.execution_log() if entry["job_id"] in jobs and entry["op"] == "step"
    ]


def jobs_alive(service: Any, root: str) -> list[str]:
    """Jobs that nobody asked to end. One that was asked ends with what it had in flight."""
    with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
        states = {job_id: job_state(client.get_job(job_id)["status"]) for job_id in status(root).state.job_ids}
    return [j for j, state in states.items() if state != JobState.CANCELLING and not is_terminal_job(state)]


def defer(operator: Any, run: Any) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferral:
        operator.execute(run.context())
    return deferral.value


@pytest.mark.parametrize("deferrable", [True, False])
def test_both_ways_train_every_step_once(
    task_run, service_connection, local_service, manifest, root, no_grace, deferrable
) -> None:
    run = task_run("train")
    result = run.execute(train(service_connection, plan(root, manifest), deferrable=deferrable))
    assert (result["steps"], result["global_steps"], result["segments"]) == (STEPS, STEPS, 1)
    assert result["last_loss"] < result["first_loss"]
    assert steps_executed(local_service, root) == [1, 2, 3, 4]
    assert PublicationLog(root).latest().name == result["entry"]
    assert jobs_alive(local_service, root) == []
    assert len(json.dumps(result)) < 1000
    assert all(len(json.dumps(d.trigger.serialize())) < 1000 for d in run.deferrals)
    assert all(len(json.dumps(event)) < 1000 for event in run.events)


@pytest.mark.parametrize("deferrable", [True, False])
def test_links_lead_to_the_job_that_the_run_made_and_to_what_it_published(
    task_run, service_connection, local_service, manifest, root, no_grace, deferrable
) -> None:
    operator = train(service_connection, plan(root, manifest, steps=2), deferrable=deferrable)
    result = task_run("train").execute(operator)
    key = SimpleNamespace()
    job = CortexTrainingJobLink().get_link(operator, ti_key=key)
    assert job.startswith(local_service.base_url)
    assert job.endswith(f"/{result['job_id']}")
    published = CortexTrainingCheckpointLink().get_link(operator, ti_key=key)
    # A folder has no page; the task's XComs name it.
    assert published.endswith("/dags/dag/runs/manual__2026-01-01/tasks/train/xcom")


@pytest.mark.parametrize("deferrable", [True, False])
def test_what_a_run_published_is_announced(task_run, service_connection, manifest, root, no_grace, deferrable) -> None:
    alias, own = AssetAlias("fine-tuned"), publications(root)
    run = task_run("train")
    given = plan(root, manifest, steps=2)
    result = run.execute(train(service_connection, given, deferrable=deferrable, outlets=[alias, own]))
    (event,) = run.outlet_events[alias].asset_alias_events
    assert event.dest_asset_key.uri == own.uri
    told = {name: event.extra[name] for name in ("entry", "step", "job_id", "checkpoint_id")}
    assert told == {"entry": result["entry"], "step": 2, **{n: result[n] for n in ("job_id", "checkpoint_id")}}
    assert run.outlet_events[own].extra == event.extra


def test_progress_reaches_the_log(task_run, service_connection, manifest, root, no_grace, caplog, capfd) -> None:
    task_run("train").execute(train(service_connection, plan(root, manifest)))
    said = caplog.text + capfd.readouterr().out
    assert f"train {STEPS}/{STEPS} · loss" in said
    assert "publish" in said


async def test_a_trigger_that_is_stopped_releases_the_run_and_another_finishes_it(
    task_run, connection, local_service, manifest, root, no_grace
) -> None:
    with FaultProxy(local_service.base_url) as proxy:
        conn_id = connection("held", host=proxy.base_url, database=local_service.database, schema=local_service.schema)
        rule = proxy.add(r"POST .*/step", HOLD, skip=1)
        trigger = defer(train(conn_id, plan(root, manifest)), task_run("train")).trigger
        task = asyncio.ensure_future(_fire(trigger))
        await asyncio.to_thread(rule.holding.wait, 60)
        assert rule.holding.is_set()
        # What Airflow's shutdown does: every task of the loop is cancelled, once.
        task.cancel()
        await asyncio.sleep(0.2)
        rule.released.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        event = await _fire(_copy(trigger))
    assert event["status"] == "trained"
    assert steps_executed(local_service, root) == [1, 2, 3, 4]


def test_a_triggerer_that_shuts_down_releases_its_runs(
    task_run, service_connection, local_service, manifest, root, no_grace
) -> None:
    trigger = defer(train(service_connection, plan(root, manifest, steps=300)), task_run("train")).trigger

    async def triggerer() -> None:
        task = asyncio.ensure_future(_fire(trigger))
        await asyncio.to_thread(_wait_for_losses, root)
        assert not task.done()

    # At its end asyncio.run cancels every task there is, shielded ones too: this is how Airflow's runner stops.
    asyncio.run(triggerer())
    assert read_journal(PosixStore(root))[-1].type == "released"
    assert len(jobs_alive(local_service, root)) == 1
    cancel = CortexTrainingCancelJobOperator(task_id="cancel", conn_id=service_connection, root=root)
    task_run("cancel").execute(cancel)
    executed = steps_executed(local_service, root)
    assert executed == list(range(1, len(executed) + 1))


def test_a_worker_that_is_killed_takes_its_job_along_and_makes_no_other(
    task_run, service_connection, local_service, manifest, root
) -> None:
    operator = train(service_connection, plan(root, manifest, steps=300), deferrable=False)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            task_run("train").execute(operator)
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    _wait_for_losses(root)
    operator.on_kill()
    worker.join(timeout=60)
    assert not worker.is_alive()
    assert failures
    assert len(status(root).state.job_ids) == 1
    assert jobs_alive(local_service, root) == []


async def test_a_run_that_was_ended_is_not_driven_on(
    task_run, service_connection, local_service, manifest, root, no_grace, monkeypatch
) -> None:
    monkeypatch.setattr(train_trigger, "SUPERSEDED_LOOK_S", 0.1)
    trigger = defer(train(service_connection, plan(root, manifest, steps=300)), task_run("train")).trigger
    standing_by = asyncio.ensure_future(_fire(trigger))
    await asyncio.to_thread(_wait_for_losses, root)
    cancel = CortexTrainingCancelJobOperator(task_id="cancel", conn_id=service_connection, root=root)
    await asyncio.to_thread(task_run("cancel").execute, cancel)
    told = await asyncio.wait_for(standing_by, timeout=60)
    assert (told["status"], told["permanent"]) == ("failed", True)
    assert "was ended by a teardown" in told["error"]
    assert len(status(root).state.job_ids) == 1
    assert await asyncio.to_thread(jobs_alive, local_service, root) == []


class TestARunOfSomebodyElse:
    """A root is shared by mistake, or its run was taken over: whoever does not drive it last ends nothing of it."""

    @pytest.fixture
    async def driven(self, task_run, service_connection, local_service, manifest, root, no_grace) -> Any:
        """A live run of another task."""
        trigger = defer(train(service_connection, plan(root, manifest, steps=100_000)), task_run("other")).trigger
        driving = asyncio.ensure_future(_fire(trigger))
        await asyncio.to_thread(_wait_for_losses, root)
        yield driving
        driving.cancel()
        await asyncio.wait({driving})
        end = CortexTrainingCancelJobOperator(task_id="end", conn_id=service_connection, root=root)
        await asyncio.to_thread(task_run("end").execute, end)

    async def _lives(self, driving: Any, service: Any, root: str) -> None:
        known = len(steps_executed(service, root))
        assert len(await asyncio.to_thread(jobs_alive, service, root)) == 1
        while len(steps_executed(service, root)) <= known:
            assert not driving.done()
            await asyncio.sleep(0.05)

    @pytest.mark.parametrize("deferrable", [True, False])
    async def test_another_plan_on_its_root_is_refused_and_it_lives_on(
        self, task_run, service_connection, local_service, manifest, root, driven, deferrable
    ) -> None:
        run, operator = (
            task_run("train"),
            train(service_connection, plan(root, manifest, seed=5), deferrable=deferrable),
        )
        if deferrable:
            event = await _fire(defer(operator, run).trigger)
            assert event["permanent"]
            with pytest.raises(AirflowFailException, match="seed"):
                await asyncio.to_thread(operator.execute_complete, run.context(), event, root)
        else:
            with pytest.raises(AirflowFailException, match="seed"):
                await asyncio.to_thread(operator.execute, run.context())
        await self._lives(driven, local_service, root)

    async def test_standing_by_for_it_until_the_deadline_leaves_it_alone(
        self, task_run, service_connection, local_service, manifest, root, driven
    ) -> None:
        run, operator = task_run("train"), train(service_connection, plan(root, manifest, steps=100_000))
        told = {"v": 1, "status": "timeout", "root": root}
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(operator.execute_complete, run.context(), told, root)
        await self._lives(driven, local_service, root)

    async def test_a_user_who_ends_the_task_that_stands_by_leaves_it_alone(
        self, task_run, service_connection, local_service, manifest, root, driven, monkeypatch
    ) -> None:
        async def yes(*_: Any) -> bool:
            return True

        monkeypatch.setattr(kill, "may_cancel", yes)
        await defer(train(service_connection, plan(root, manifest, steps=100_000)), task_run("train")).trigger.on_kill()
        await self._lives(driven, local_service, root)


@pytest.mark.parametrize("gone", ["data", "root"])
@pytest.mark.parametrize("last", [False, True])
async def test_a_machine_that_lacks_a_folder_for_a_moment_ends_no_live_run(
    task_run, service_connection, local_service, manifest, root, no_grace, tmp_path, gone, last
) -> None:
    data = tmp_path / "data"
    shutil.copytree(Path(manifest).parent, data)
    operator = train(service_connection, plan(root, str(data / "manifest.json"), steps=100_000))
    run = task_run("train", retries=0 if last else 2)
    trigger = defer(operator, run).trigger
    driving = asyncio.create_task(_fire(_copy(trigger)))
    await asyncio.to_thread(_wait_for_losses, root)
    driving.cancel()
    await asyncio.wait({driving})

    folder = data if gone == "data" else Path(root)
    folder.rename(tmp_path / "unmounted")
    event = await _fire(_copy(trigger))
    (tmp_path / "unmounted").rename(folder)
    assert event["permanent"]
    with pytest.raises(CortexTrainingError, match="not visible" if gone == "root" else "does not exist"):
        await asyncio.to_thread(operator.execute_complete, run.context(), event, root)
    assert len(await asyncio.to_thread(jobs_alive, local_service, root)) == (0 if last else 1)
    if not last:
        await asyncio.to_thread(
            task_run("teardown").execute,
            CortexTrainingCancelJobOperator(task_id="cancel", conn_id=service_connection, root=root),
        )


async def test_a_trigger_that_sees_no_root_says_so(service_connection, tmp_path) -> None:
    event = await _fire(_trigger(service_connection, str(tmp_path / "elsewhere")))
    assert event["status"] == "failed"
    assert "root" in event["error"]
    assert "not visible from the triggerer" in event["error"]


async def test_a_plan_of_a_newer_worker_is_retried_and_its_jobs_live_on(
    task_run, service_connection, manifest, root, no_grace, monkeypatch
) -> None:
    trigger = defer(train(service_connection, plan(root, manifest, steps=4)), task_run("train")).trigger
    (path,) = (Path(root) / "exec").glob("*/plan.json")
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"plan": document["plan"] | {"of_tomorrow": True}}))
    event = await _fire(trigger)
    assert not event["permanent"]
    assert "another release" in event["error"]
    assert "of_tomorrow" in event["error"]
    assert "restart" in event["error"]

    cancelled: list[object] = []
    operator = train(service_connection, plan(root, manifest, steps=4))
    monkeypatch.setattr(operator, "_cancel_journal", lambda *given: cancelled.append(given))
    with pytest.raises(CortexTrainingError, match="another release"):
        operator.execute_complete(task_run("train", retries=2).context(), event)
    assert not cancelled


async def test_a_trigger_of_an_earlier_try_stands_by(
    task_run, service_connection, local_service, manifest, root, no_grace
) -> None:
    run = task_run("train")
    old = defer(train(service_connection, plan(root, manifest)), run).trigger
    run.retry()
    new = defer(train(service_connection, plan(root, manifest)), run).trigger
    waiting = asyncio.ensure_future(_fire(old))
    assert (await _fire(new))["status"] == "trained"
    assert not waiting.done()
    waiting.cancel()
    assert steps_executed(local_service, root) == [1, 2, 3, 4]


async def test_standing_by_ends_at_the_deadline(service_connection, manifest, root) -> None:
    write_plan(TrainingPlan.from_dict(plan(root, manifest)), "a", "another-nonce")
    trigger = _trigger(service_connection, root)
    trigger.deadline = time.time() - 1
    # Without an end it would ask the root for ever, as fast as it answers.
    event = await asyncio.wait_for(_fire(trigger), timeout=30)
    assert (event["status"], event["root"]) == ("timeout", root)


class TestLettingGo:
    """When a run whose driver says nothing may be taken over."""

    @pytest.fixture
    def began(self, manifest, root, monkeypatch) -> Any:
        """A run with `running_timeout_s` of a day whose driver wrote these records so many seconds ago."""
        written = TrainingPlan.from_dict(plan(root, manifest, running_timeout_s=86_400))

        def begin(seconds_ago: float, *records: tuple[str, dict[str, Any]]) -> None:
            write_plan(written, "a", "n")
            moment = time.time() - seconds_ago
            with monkeypatch.context() as patch:
                patch.setattr("cortex_training.training.journal.time.time", lambda: moment)
                writer = JournalWriter.take_over(PosixStore(root), 1, "token", {})
                for type_, body in records:
                    writer.append(type_, body)

        return begin

    SEGMENT = ("segment", {"segment": 0, "job_id": "j", "owned": True, "base": None, "reason": "first start"})
    INTENT = ("intent", {"op": "forward_backward", "segment": 0, "step": 1})

    def test_a_driver_that_waits_for_gpus_is_not_silent(self, began, root) -> None:
        began(20 * 3600.0, self.SEGMENT)
        assert not is_let_go(root, "a")

    def test_not_even_gpus_are_waited_for_longer_than_the_plan_says(self, began, root) -> None:
        began(26 * 3600.0, self.SEGMENT)
        assert is_let_go(root, "a")

    @pytest.mark.parametrize(("seconds", "let_go"), [(600.0, False), (2 * 3600.0, True)])
    def test_a_driver_at_work_is_silent_for_an_hour_at_most(self, began, root, seconds, let_go) -> None:
        began(seconds, self.SEGMENT, self.INTENT)
        assert is_let_go(root, "a") is let_go

    def test_a_released_run_is_let_go_at_once(self, began, root) -> None:
        began(0.0, self.SEGMENT, ("released", {}))
        assert is_let_go(root, "a")

    def test_a_run_that_nobody_began_is_not_let_go(self, root) -> None:
        Path(root).mkdir()
        assert not is_let_go(root, "a")


def test_the_deadline_ends_the_run_and_its_jobs(task_run, connection, local_service, manifest, root, no_grace) -> None:
    with FaultProxy(local_service.base_url) as proxy:
        conn_id = connection("held", host=proxy.base_url, database=local_service.database, schema=local_service.schema)
        proxy.add(r"GET .*/requests/", "answer", times=100_000, status=200, body={"status": "running"})
        with pytest.raises(DeadlineExceeded, match="did not end within 6 s; its jobs were cancelled"):
            task_run("train").execute(train(conn_id, plan(root, manifest), timeout_s=6.0))
    assert jobs_alive(local_service, root) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("deferrable", [True, False])
def test_the_deadline_holds_while_nobody_answers(
    task_run, unreachable_connection, manifest, root, no_grace, monkeypatch, deferrable
) -> None:
    """Not for as long as a client tries one call by itself."""
    monkeypatch.setattr("airflow_cortex_training.triggers.train.STOP_S", 0.1)
    monkeypatch.setattr("airflow_cortex_training.operators.train.STOP_S", 0.1)
    made = plan(root, manifest, job_id="j")
    operator = train(unreachable_connection, made, timeout_s=1.0, deferrable=deferrable)
    with pytest.raises(DeadlineExceeded):
        task_run("train").execute(operator)


def test_a_plan_with_an_unusable_field_creates_nothing(task_run, service_connection, manifest, root) -> None:
    unusable = ({"steps": 0}, "steps"), ({"job_id": 7}, "job_id"), ({"colour": 1}, "colour")
    for changes, named in unusable:
        with pytest.raises(AirflowFailException, match=f"plan.{named}"):
            task_run("train").execute(train(service_connection, plan(root, manifest, **changes)))
    with pytest.raises(AirflowFailException, match="no-such-folder"):
        task_run("train").execute(train(service_connection, plan("/no-such-folder/run", manifest)))
    assert not Path(root).exists()


def test_data_that_is_not_there_is_found_out_before_the_deferral(
    task_run, service_connection, manifest, root, tmp_path
) -> None:
    whole, halved = Path(manifest).parent, tmp_path / "halved"
    halved.mkdir()
    (halved / "manifest.json").write_bytes(Path(manifest).read_bytes())
    (tmp_path / "other.json").write_text("[]")
    for dataset, said in (
        (tmp_path / "nowhere/manifest.json", "does not exist"),
        (Path(manifest) / "manifest.json", "does not exist"),
        (whole, "is a folder"),
        (halved / "manifest.json", "is missing"),
        (tmp_path / "other.json", "is not a dataset manifest"),
    ):
        run = task_run("train")
        with pytest.raises(AirflowFailException, match=said) as failure:
            run.execute(train(service_connection, plan(root, str(dataset))))
        assert str(dataset.parent if said == "is missing" else dataset) in str(failure.value)
        assert run.deferrals == []
    assert not Path(root).exists()


def test_a_root_that_is_none_is_found_out_before_the_deferral(task_run, service_connection, manifest, tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.json").write_text("{}")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/run.json").write_text('{"v": 99, "identity": {}}')
    for name, said in (
        ("file", "is not a folder"),
        ("file/run", "does not exist"),
        ("other", "is not a run's identity"),
        ("newer", "99"),
    ):
        run = task_run("train")
        with pytest.raises(AirflowFailException, match=said) as failure:
            run.execute(train(service_connection, plan(str(tmp_path / name), manifest)))
        assert str(tmp_path / name) in str(failure.value)
        assert run.deferrals == []


def test_a_cleared_task_ends_its_jobs_although_its_data_is_gone(
    task_run, service_connection, root, tmp_path, monkeypatch
) -> None:
    run, ended = task_run("train"), []
    monkeypatch.setattr(
        "airflow_cortex_training.operators.train.end_run", lambda _, root, *__: ended.append(root) or []
    )
    run.store.set("cortex_training", {"v": 1, "generation": [2, 0], "root": root, "attempt": "a"})
    run.clear()
    with pytest.raises(AirflowFailException, match="does not exist"):
        run.execute(train(service_connection, plan(root, str(tmp_path / "gone/manifest.json"))))
    assert ended == [root]


def test_a_dataset_that_does_not_match_fails_before_a_job(
    task_run, service_connection, manifest, root, no_grace, tmp_path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(manifest).parent.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1
        (broken / file.name).write_bytes(data)
    with pytest.raises(AirflowFailException, match="shard"):
        task_run("train").execute(train(service_connection, plan(root, str(broken / "manifest.json"))))
    assert not (Path(root) / "journal").exists()


def test_a_retry_goes_on_and_a_clear_of_an_ended_run_starts_beside_it(
    task_run, service_connection, local_service, manifest, root, no_grace
) -> None:
    run = task_run("train")
    operator = train(service_connection, plan(root, manifest))
    first = run.execute(operator)
    run.retry()
    assert run.execute(train(service_connection, plan(root, manifest)))["entry"] == first["entry"]
    assert steps_executed(local_service, root) == [1, 2, 3, 4]
    run.clear()
    second = run.execute(train(service_connection, plan(root, manifest)))
    assert second["root"] == f"{root}-r2"
    assert steps_executed(local_service, f"{root}-r2") == [1, 2, 3, 4]


def test_a_clear_cancels_the_jobs_and_resumes_from_the_latest_publication(
    task_run, connection, local_service, manifest, root, no_grace
) -> None:
    run = task_run("train")
    with FaultProxy(local_service.base_url) as proxy:
        conn_id = connection("held", host=proxy.base_url, database=local_service.database, schema=local_service.schema)
        rule = proxy.add(r"POST .*/step", HOLD, skip=3)
        trigger = defer(train(conn_id, plan(root, manifest)), run).trigger

        async def cut_off() -> None:
            task = asyncio.ensure_future(_fire(trigger))
            await asyncio.to_thread(rule.holding.wait, 60)
            task.cancel()
            rule.released.set()
            await asyncio.wait({task})

        asyncio.run(cut_off())
        assert len(jobs_alive(local_service, root)) == 1
        run.clear()
        result = run.execute(train(conn_id, plan(root, manifest)))
    assert result["root"] == root
    assert result["segments"] == 2
    assert result["steps"] == STEPS
    assert jobs_alive(local_service, root) == []


def test_somebody_elses_job_is_not_replaced(
    task_run, service_connection, local_service, manifest, root, no_grace
) -> None:
    with CortexTrainingClient(local_service.base_url, local_service.database, local_service.schema) as client:
        job_id = client.create_job_from_body({"sub_job_configs": [TRAINING, SAMPLING]})["job_id"]
        client.wait_for_job(job_id)
        result = task_run("train").execute(train(service_connection, plan(root, manifest, job_id=job_id)))
        assert result["job_id"] == job_id
        assert client.get_job(job_id)["status"] == "running"
        client.cancel_job(job_id)
        with pytest.raises(AirflowFailException, match=job_id):
            task_run("train").execute(train(service_connection, plan(f"{root}-2", manifest, job_id=job_id)))


def test_what_a_failed_deferral_leaves_is_cancelled(
    task_run, service_connection, local_service, manifest, root, no_grace
) -> None:
    for error, expected, try_number in (
        ({"error": "Trigger timeout"}, TaskDeferralTimeout, 1),
        ({"error": "Trigger failure"}, TaskDeferralError, 3),
    ):
        run = task_run("train", retries=2)
        run.try_number = try_number
        run_root = f"{root}-{try_number}"
        operator = train(service_connection, plan(run_root, manifest, when_done="keep"))
        trigger = defer(operator, run).trigger
        assert asyncio.run(_fire(trigger))["status"] == "trained"
        assert len(jobs_alive(local_service, run_root)) == 1
        # That another task of the run was cleared meanwhile is no reason to forget them.
        run.clear_another_task()
        with pytest.raises(expected):
            operator.resume_execution("__fail__", error, run.context())
        assert jobs_alive(local_service, run_root) == []


def test_teardown_cancels_every_job_of_the_journal(
    task_run, service_connection, local_service, manifest, root, no_grace
) -> None:
    task_run("train").execute(train(service_connection, plan(root, manifest, when_done="keep")))
    (alive,) = jobs_alive(local_service, root)
    cancel = CortexTrainingCancelJobOperator(task_id="cancel", conn_id=service_connection, root=root)
    assert task_run("cancel").execute(cancel) == [alive]
    assert jobs_alive(local_service, root) == []


async def test_a_user_who_ends_the_task_ends_its_job(
    task_run, service_connection, local_service, manifest, root, no_grace, monkeypatch
) -> None:
    monkeypatch.setattr(kill, "_state", lambda ti: ("failed", True))
    operator = train(service_connection, plan(root, manifest, steps=500))
    trigger = defer(operator, task_run("train")).trigger
    trigger.task_instance = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1)
    task = asyncio.ensure_future(_fire(trigger))
    await asyncio.to_thread(_wait_for_losses, root)
    assert not task.done()
    task.cancel("user action")
    with pytest.raises(asyncio.CancelledError):
        await task
    await trigger.on_kill()
    assert await asyncio.to_thread(jobs_alive, local_service, root) == []


def test_who_opted_out_keeps_the_jobs(
    task_run, service_connection, local_service, manifest, root, no_grace, monkeypatch
) -> None:
    monkeypatch.setattr(kill, "_state", lambda ti: ("failed", True))
    made = plan(root, manifest, steps=1, save_every_steps=1, when_done="keep")
    kept = defer(train(service_connection, made, cancel_on_kill=False), task_run("train")).trigger
    assert asyncio.run(_fire(kept))["status"] == "trained"
    alive = jobs_alive(local_service, root)
    assert len(alive) == 1

    again = _copy(kept)
    again.task_instance = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1)
    assert again.cancel_on_kill is False
    asyncio.run(again.on_kill())
    # On a worker, while it drives the run.
    operator = train(service_connection, made, deferrable=False, cancel_on_kill=False)
    operator._driving = (TrainingPlan.from_dict(made), operator.hook.settings(), kept.attempt)
    operator.on_kill()
    assert jobs_alive(local_service, root) == alive

    operator.cancel_on_kill = True
    operator.on_kill()
    assert jobs_alive(local_service, root) == []


def _wait_for_losses(root: str) -> None:
    """Until the run is under way."""
    deadline = time.monotonic() + 60
    while not (Path(root, "journal").exists() and status(root).state.losses):
        assert time.monotonic() < deadline, "the run made no step"
        time.sleep(0.1)


def _trigger(conn_id: str, root: str) -> CortexTrainingTrainTrigger:
    now = time.time()
    return CortexTrainingTrainTrigger(
        target={"conn_id": conn_id},
        root=root,
        attempt="a",
        nonce="n",
        not_before=now,
        deadline=now + 60,
        generation=[0, 0],
    )


def _copy(trigger: CortexTrainingTrainTrigger) -> CortexTrainingTrainTrigger:
    return CortexTrainingTrainTrigger(**json.loads(json.dumps(trigger.serialize()[1])))


async def _fire(trigger: Any) -> dict[str, Any]:
    events = [event.payload async for event in trigger.run()]
    assert len(events) == 1
    return json.loads(json.dumps(events[0]))
