"""A flow run that is run again, with its stored results or without them, does nothing twice."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.states import Paused

from cortex_training.errors import (
    ApiError,
    ConfigurationError,
    JobFailed,
    NotFoundError,
    OutcomeUnknown,
    ProtocolError,
    RequestFailed,
    TransportError,
)
from demo.prefect_server import PrefectServer
from prefect_cortex_training import (
    await_remote,
    cancel_job,
    create_job,
    forward_backward,
    jobs_cancelled_at_end,
    load,
    save,
    step,
    submit_generate,
    submit_save,
    submit_weight_sync,
    wait_for_capacity,
    wait_until_running,
)
from prefect_cortex_training.cleanup import cancel_jobs_of_run
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.labels import RunLabels, jobs_in
from prefect_cortex_training.tasks import operations

from .scripted_service import ScriptedService

SUB_JOBS = [{"job_type": "training", "model_name": "tiny"}]


@pytest.fixture
def service(on_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> ScriptedService:
    scripted = ScriptedService()

    @asynccontextmanager
    async def connected(name: str) -> AsyncIterator[ScriptedService]:
        yield scripted

    # What another execution that is alive would have written by then is written at once here.
    monkeypatch.setattr("prefect_cortex_training.settling.ON_ITS_WAY_S", 0.0)
    for module in ("cleanup", "waiting", "tasks.jobs", "tasks.capacity", "tasks.operations", "tasks.checkpoints"):
        monkeypatch.setattr(f"prefect_cortex_training.{module}.connected", connected)
    return scripted


@pytest.fixture
def lose_results(results_folder: Path) -> Callable[[], None]:
    """Makes every stored result disappear, as with a container's own disk."""
    return lambda: shutil.rmtree(results_folder, ignore_errors=True)


def labels() -> dict[str, Any]:
    return run_to_end(RunLabels(flow_run.id).read())


def in_a_flow(body: Callable[[], Any]) -> Any:
    @flow(result_serializer="json")
    def around() -> Any:
        return body()

    return around()


def test_the_job_id_is_written_down_before_the_job_is_created(service: ScriptedService) -> None:
    seen: list[dict[str, Any]] = []
    service.before["create"] = lambda job_id: seen.append(labels())
    job_id = in_a_flow(lambda: create_job("block", SUB_JOBS))
    assert seen == [{f"job.training.0.{job_id}": "block"}]


def test_a_living_job_is_used_again_whatever_became_of_the_results(
    service: ScriptedService, lose_results: Callable[[], None]
) -> None:
    def body() -> set[str]:
        first = create_job("block", SUB_JOBS)
        lose_results()
        return {first, create_job("block", SUB_JOBS)}

    assert in_a_flow(body) == set(service.jobs)
    assert len(service.named("create")) == 1


def test_a_job_that_failed_is_replaced_once_under_the_next_generation(service: ScriptedService) -> None:
    def body() -> list[str]:
        first = create_job("block", SUB_JOBS)
        service.jobs[first].update(status="failed", reason="node lost")
        return [first, create_job("block", SUB_JOBS), create_job("block", SUB_JOBS), labels()]  # type: ignore[list-item]

    first, second, third, written = in_a_flow(body)
    assert second == third != first
    assert len(service.named("create")) == 2
    assert [key for key in written if key.startswith("job.")] == [
        f"job.training.{n}.{j}" for n, j in enumerate((first, second))
    ]


def suspend_and_resume() -> None:
    """What the server sees of a suspension, without the end of this process."""

    async def come_and_go() -> None:
        async with get_client() as client:
            await client.set_flow_run_state(flow_run.id, Paused(timeout_seconds=60, pause_key="a wait"))
            await client.resume_flow_run(flow_run.id)

    run_to_end(come_and_go())


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_job_that_ended_during_a_suspension_is_given_back_in_this_try_and_replaced_in_the_next(
    service: ScriptedService, lose_results: Callable[[], None], end: str
) -> None:
    """A wait that comes back fails as one that stayed does: not in circles, with one job more each time. It is the
    same when the stored results are gone too.
    """
    tries: list[list[str]] = []

    # Two, because Prefect counts coming back within one process as a try; after a suspension it does not.
    @flow(retries=2, result_serializer="json")
    def loses_its_job() -> None:
        tries.append([create_job("block", SUB_JOBS)])
        if len(tries) == 1:
            service.jobs[tries[0][0]].update(status=end, reason="somebody's decision")
        suspend_and_resume()
        lose_results()
        tries[-1].append(create_job("block", SUB_JOBS))
        if len(tries) == 1:
            raise JobFailed(job_id=tries[0][0], state=end)

    loses_its_job()
    (lost, still_lost), (second, still_second) = tries
    assert lost == still_lost != second == still_second
    assert list(service.jobs) == [lost, second]


def test_a_crash_between_label_and_create_leads_to_the_same_id(service: ScriptedService) -> None:
    def crash(job_id: str) -> None:
        service.before.clear()
        raise RuntimeError("the process dies here")

    def body() -> tuple[str, str]:
        service.before["create"] = crash
        with pytest.raises(RuntimeError):
            create_job("block", SUB_JOBS)
        (written,) = [job.job_id for job in jobs_in(labels())]
        return written, create_job("block", SUB_JOBS)

    written, created = in_a_flow(body)
    assert written == created
    assert list(service.jobs) == [created]


def test_a_create_whose_answer_was_lost_is_adopted(service: ScriptedService) -> None:
    def lose_the_answer(job_id: str) -> None:
        service.after.clear()
        raise TransportError("connection reset", sent=True)

    service.after["create"] = lose_the_answer
    created = in_a_flow(lambda: create_job.with_options(retry_delay_seconds=0)("block", SUB_JOBS))
    assert list(service.jobs) == [created]
    assert len(service.named("create")) == 1


def test_the_id_that_the_service_answers_wins(service: ScriptedService) -> None:
    service.own_job_ids = ["chosen-by-the-service"]
    written: list[dict[str, Any]] = []

    def body() -> list[str]:
        ids = [create_job("block", SUB_JOBS), create_job("block", SUB_JOBS)]
        written.append(labels())
        return ids

    assert in_a_flow(body) == ["chosen-by-the-service"] * 2
    assert written[0]["job.training.0.chosen-by-the-service"] == "block"


@pytest.mark.parametrize("rival", ["0-smaller", "z-greater"])
@pytest.mark.parametrize("moment", ["claims", "has created"])
def test_two_processes_of_one_flow_run_end_up_with_one_job(service: ScriptedService, rival: str, moment: str) -> None:
    """The other one read no label, as this one did, and does the same while our job is being created."""

    def the_other(job_id: str) -> None:
        service.before.clear()
        run_to_end(RunLabels(flow_run.id).write({f"job.training.0.{rival}": "block"}))
        if moment == "has created":
            service.jobs[rival] = {"job_id": rival, "status": "running"}

    def body() -> list[str]:
        service.before["create"] = the_other
        return [create_job("block", SUB_JOBS), create_job("block", SUB_JOBS)]

    first, again = in_a_flow(body)
    assert first == again
    assert [job_id for job_id, job in service.jobs.items() if job["status"] == "running"] == [first]


def test_a_claim_of_another_process_that_is_seen_in_time_decides_the_id(service: ScriptedService) -> None:
    def body() -> list[str]:
        run_to_end(RunLabels(flow_run.id).write({"job.training.0.theirs": "block"}))
        return [create_job("block", SUB_JOBS)]

    assert in_a_flow(body) == ["theirs"]


def test_a_name_that_would_break_the_label_is_refused(service: ScriptedService) -> None:
    with pytest.raises(ConfigurationError, match=r"name = 'a\.b'"):
        in_a_flow(lambda: create_job("block", SUB_JOBS, name="a.b"))


def test_several_jobs_of_one_run_have_names(service: ScriptedService) -> None:
    ids = in_a_flow(lambda: [create_job("block", SUB_JOBS, name=name) for name in ("a", "b", "a")])
    assert ids[0] == ids[2] != ids[1]


def test_waiting_counts_from_the_first_wait(service: ScriptedService) -> None:
    def body() -> None:
        job_id = create_job("block", SUB_JOBS)
        run_to_end(RunLabels(flow_run.id).write({f"waiting_since.{job_id}.earlier": 1.0}))
        wait_until_running("block", job_id, timeout_s=10.0)

    in_a_flow(body)
    assert service.named("wait")[0][2] == 1.0


def test_a_job_that_not_every_part_of_the_service_knows_yet_is_waited_for(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefect_cortex_training.jobs._TRY_AGAIN_S", 0.01)
    looks: list[str] = []

    def appear(job_id: str, timeout_s: float) -> None:
        looks.append(job_id)
        if len(looks) < 3:
            raise NotFoundError(status=404, message="no such job")

    service.before["wait"] = appear
    job_id = in_a_flow(lambda: wait_until_running("block", create_job("block", SUB_JOBS)))
    assert looks == [job_id] * 3


def test_a_job_that_nobody_has_known_for_a_minute_is_an_error(service: ScriptedService) -> None:
    def appear(job_id: str, timeout_s: float) -> None:
        raise NotFoundError(status=404, message="no such job")

    def body() -> None:
        run_to_end(RunLabels(flow_run.id).write({"waiting_since.j.earlier": time.time() - 61}))
        wait_until_running("block", "j")

    service.before["wait"] = appear
    with pytest.raises(NotFoundError):
        in_a_flow(body)
    assert len(service.named("wait")) == 1


def test_a_step_is_executed_once_although_its_result_is_lost(
    service: ScriptedService, lose_results: Callable[[], None]
) -> None:
    def body() -> list[dict[str, Any]]:
        first = step("block", "j", seq=1, expected_global_step=1)
        lose_results()
        again = step("block", "j", seq=1, expected_global_step=1)
        return [first, again, step("block", "j", seq=2, expected_global_step=2)]

    first, again, second = in_a_flow(body)
    assert first == again == {"request_id": "r1", "global_steps": 1}
    assert second["global_steps"] == 2
    assert len(service.named("step")) == 2


def test_the_intent_of_a_step_is_written_down_before_it_is_sent(service: ScriptedService) -> None:
    seen: list[Any] = []

    def claims() -> list[Any]:
        return [value for key, value in labels().items() if key.startswith("step.j.1.")]

    def body() -> list[Any]:
        service.before["step"] = lambda *_: seen.extend(claims())
        step("block", "j", seq=1, expected_global_step=1)
        return claims()

    assert in_a_flow(body) == ["r1"]
    assert seen == ["intent"]


def test_of_two_processes_at_one_step_at_most_one_sends_it(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read no claim; then the other one writes its own, and then we write ours."""
    from prefect_cortex_training import submission

    def claim_after_the_other() -> str:
        run_to_end(RunLabels(flow_run.id).write({"step.j.1.theirs": "intent"}))
        return "f" * 32

    def body() -> None:
        monkeypatch.setattr(submission, "new_token", claim_after_the_other)
        with pytest.raises(OutcomeUnknown, match="another execution"):
            step("block", "j", seq=1, expected_global_step=1)
        run_to_end(RunLabels(flow_run.id).write({"step.j.1.theirs": "their-request"}))
        service.results["their-request"] = {"global_steps": 1}
        assert step("block", "j", seq=1, expected_global_step=1)["request_id"] == "their-request"

    in_a_flow(body)
    assert service.named("step") == []


@pytest.mark.parametrize("lost", ["the answer", "the request"])
def test_a_step_whose_answer_never_came_is_settled_by_a_save(service: ScriptedService, lost: str) -> None:
    """Not sent again: the save's count tells that it was executed."""

    def lose_the_answer(*_: Any) -> None:
        raise OutcomeUnknown(operation="step", job_id="j", reason="connection reset", hint="look")

    def forget(request_id: str) -> None:
        service.after.clear()
        del service.results[request_id]

    def body() -> Any:
        service.after["step"] = lose_the_answer if lost == "the answer" else forget
        return step("block", "j", seq=1, expected_global_step=1)

    assert in_a_flow(body)["global_steps"] == 1
    assert len(service.named("step")) == 1
    assert service.named("save") == [("save", "j", "resumable")]


def test_a_step_that_may_still_land_gives_the_job_up_and_says_what_to_do(service: ScriptedService) -> None:
    def lose_the_call(*_: Any) -> None:
        raise OutcomeUnknown(operation="step", job_id="j", reason="connection reset", hint="look")

    def body() -> None:
        service.before["step"] = lose_the_call
        with pytest.raises(OutcomeUnknown, match=r"Checkpoint cp_1 holds everything.*cancel the job and run the flow"):
            step("block", "j", seq=1, expected_global_step=1)
        service.before.clear()
        # A rerun asks again, and sends nothing but a save.
        with pytest.raises(OutcomeUnknown, match="Checkpoint cp_2"):
            step("block", "j", seq=1, expected_global_step=1)

    in_a_flow(body)
    assert len(service.named("step")) == 1


def test_a_load_is_never_sent_twice(service: ScriptedService, lose_results: Callable[[], None]) -> None:
    """A second one would undo what was trained in between."""

    def body() -> list[Any]:
        first = load("block", "j", "cp_1", source_job_id="earlier")
        lose_results()
        return [first, load("block", "j", "cp_1", source_job_id="earlier")]

    first, again = in_a_flow(body)
    assert first == again == {"request_id": "r1", "global_steps": 0}
    assert service.named("load") == [("load", "j", "cp_1", "earlier")]


def test_a_submitted_save_is_found_by_save_and_replaced_once_it_failed(service: ScriptedService) -> None:
    def body() -> list[Any]:
        first = submit_save("block", "j")
        again = submit_save("block", "j")
        service.fail_request("j", first)
        third = submit_save("block", "j")
        return [first, again, third, save("block", "j")]

    first, again, third, checkpoint = in_a_flow(body)
    assert first == again != third
    assert checkpoint == "cp_2"
    assert len(service.named("save")) == 2


NOTHING = {
    "has_reservation": False,
    "max_total_gpus": 0,
    "reserved_gpus": 0,
    "in_use_gpus": 0,
    "pending_gpus": 0,
    "available_gpus": 0,
}


@pytest.mark.parametrize(
    ("capacities", "free", "asked"),
    [
        ([NOTHING | {"max_total_gpus": 8}, NOTHING | {"max_total_gpus": 8, "available_gpus": 4}], 4, 2),
        ([NOTHING | {"max_total_gpus": -1}], -1, 1),
        ([NOTHING], 0, 1),
    ],
)
def test_capacity_is_waited_for_until_it_is_there_or_nothing_is_known(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch, capacities: list[Any], free: int, asked: int
) -> None:
    monkeypatch.setattr("prefect_cortex_training.tasks.capacity.EVERY_S", 0.01)
    service.capacities = capacities
    assert in_a_flow(lambda: wait_for_capacity("block", 4, hardware="H200")) == free
    assert service.named("capacity") == [("capacity", "H200")] * asked


def test_more_gpus_than_the_account_may_use_are_refused(service: ScriptedService) -> None:
    service.capacities = [NOTHING | {"max_total_gpus": 2, "available_gpus": 2}]
    with pytest.raises(ConfigurationError, match=r"gpus = 4.*2 at most"):
        in_a_flow(lambda: wait_for_capacity("block", 4))


@pytest.mark.parametrize("refusal", [TransportError("refused", sent=False), ApiError(status=400, message="no")])
def test_a_step_that_was_provably_not_executed_may_be_sent_again(service: ScriptedService, refusal: Exception) -> None:
    def refuse(*_: Any) -> None:
        service.before.clear()
        raise refusal

    def body() -> Any:
        service.before["step"] = refuse
        with pytest.raises(type(refusal)):
            step("block", "j", seq=1, expected_global_step=1)
        return step("block", "j", seq=1, expected_global_step=1)

    assert in_a_flow(body)["global_steps"] == 1
    assert service.global_steps == 1


def test_a_count_that_surprises_stops_the_flow(service: ScriptedService) -> None:
    service.global_steps = 1
    with pytest.raises(ProtocolError, match="global_steps=2, expected 1"):
        in_a_flow(lambda: step("block", "j", seq=1, expected_global_step=1))


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_cortex_training.tasks.operations._frame", lambda *place: repr(place).encode())


def dies(*_: Any) -> None:
    raise RuntimeError("the process dies here")


def test_a_forward_backward_keeps_its_group_until_the_service_says_it_failed(
    service: ScriptedService, frames: None
) -> None:
    def body() -> None:
        call = forward_backward.with_options(retries=0)
        arguments: dict[str, Any] = {"step": 1, "micro_batch": 0, "micro_batch_size": 2}
        service.before["poll"] = dies
        with pytest.raises(RuntimeError):
            call("block", "j", "manifest.json", **arguments)
        service.before.clear()
        service.after["forward_backward"] = lambda request_id: service.fail_request("j", request_id)
        with pytest.raises(RequestFailed):
            call("block", "j", "manifest.json", **arguments)
        service.after.clear()
        call("block", "j", "manifest.json", **arguments)
        call("block", "j", "manifest.json", **{**arguments, "micro_batch": 1})

    in_a_flow(body)
    first, again, after_failure, other = [call[2] for call in service.named("forward_backward")]
    assert first == again
    assert len({first, after_failure, other}) == 3


def test_two_processes_of_one_flow_run_send_a_micro_batch_under_one_group_id(
    service: ScriptedService, frames: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has written anything when the other one reads."""
    read = RunLabels.read

    async def body() -> None:
        both_have_read = asyncio.Barrier(2)

        async def read_together(labels: RunLabels) -> dict[str, Any]:
            found = await read(labels)
            await both_have_read.wait()
            return found

        monkeypatch.setattr(RunLabels, "read", read_together)
        call = operations._forward_backward("block", "j", "manifest.json", step=1, micro_batch=0, micro_batch_size=2)
        again = operations._forward_backward("block", "j", "manifest.json", step=1, micro_batch=0, micro_batch_size=2)
        await asyncio.gather(call, again)

    in_a_flow(lambda: run_to_end(body()))
    first, second = [call[2] for call in service.named("forward_backward")]
    assert first == second


def test_two_flow_runs_on_one_job_have_groups_of_their_own(service: ScriptedService, frames: None) -> None:
    def body() -> None:
        forward_backward("block", "j", "manifest.json", step=1, micro_batch_size=2)

    in_a_flow(body)
    in_a_flow(body)
    first, second = [call[2] for call in service.named("forward_backward")]
    assert first != second


def test_a_save_in_flight_is_waited_for_and_a_lost_one_is_sent_anew(service: ScriptedService) -> None:
    def body() -> list[str]:
        saved = []
        for seq in (1, 2):
            service.before["poll"] = dies
            with pytest.raises(RuntimeError):
                save.with_options(retries=0)("block", "j", seq=seq)
            service.before.clear()
            if seq == 2:
                service.results.clear()
            saved.append(save("block", "j", seq=seq))
        return saved

    assert in_a_flow(body) == ["cp_1", "cp_3"]


def test_jobs_are_cancelled_when_the_block_ends_well_and_are_not_replaced_by_a_rerun(service: ScriptedService) -> None:
    def body() -> set[str]:
        with jobs_cancelled_at_end():
            first = create_job("block", SUB_JOBS)
        return {first, create_job("block", SUB_JOBS)}

    (only,) = in_a_flow(body)
    assert service.jobs[only]["status"] == "cancelled"


def submits(verb: str, job_id: str) -> str:
    """One of the requests that a flow waits for by its bare id."""
    if verb == "save":
        return submit_save("block", job_id)
    if verb == "weight_sync":
        return submit_weight_sync("block", job_id)
    return submit_generate("block", job_id, ["a prompt"], seq=1)


@pytest.mark.parametrize("verb", ["save", "weight_sync", "generate"])
@pytest.mark.parametrize("results", ["kept", "lost"])
def test_a_rerun_of_finished_work_waits_for_nothing_and_asks_nothing_of_the_job_that_has_ended(
    service: ScriptedService, lose_results: Callable[[], None], verb: str, results: str
) -> None:
    """What failed comes after the work: the job of the first try is gone, and none is paid for again."""
    waited: list[Any] = []

    @flow(retries=1, result_serializer="json")
    def fails_after_its_work() -> None:
        with jobs_cancelled_at_end():
            job_id = create_job("block", SUB_JOBS)
            wait_until_running("block", job_id)
            await_remote("block", job_id)
            request_id = submits(verb, job_id)
            waited.append((job_id, request_id, await_remote("block", job_id, request_id)))
        if results == "lost":
            lose_results()
        if len(waited) == 1:
            raise RuntimeError("nobody could be told")

    fails_after_its_work()
    first, again = waited
    assert again[:2] == first[:2]
    assert {name: first[2].get(name) for name in again[2]} == again[2]
    assert ("checkpoint_id" in again[2]) == (verb == "save")
    assert len(service.jobs) == len(service.named("create")) == len(service.named(verb)) == 1


@pytest.mark.parametrize("verb", ["save", "weight_sync", "generate"])
def test_a_rerun_after_its_job_failed_waits_for_a_request_of_the_next_generation(
    service: ScriptedService, verb: str
) -> None:
    tried: list[tuple[str, str]] = []

    def fail_the_job(request_id: str) -> None:
        if len(tried) == 1:
            service.jobs[tried[0][0]].update(status="failed", reason="node lost")

    @flow(retries=1, result_serializer="json")
    def loses_its_job() -> None:
        job_id = create_job("block", SUB_JOBS)
        request_id = submits(verb, job_id)
        tried.append((job_id, request_id))
        await_remote("block", job_id, request_id)

    service.before["poll"] = fail_the_job
    loses_its_job()
    (lost, asked), (second, asked_again) = tried
    assert (lost, asked) != (second, asked_again)
    assert list(service.jobs) == [lost, second]


def test_a_rerun_on_a_healthy_job_waits_for_the_request_that_is_there(service: ScriptedService) -> None:
    tried: list[tuple[str, str]] = []

    @flow(retries=1, result_serializer="json")
    def fails_once() -> None:
        job_id = create_job("block", SUB_JOBS)
        request_id = submit_save("block", job_id)
        tried.append((job_id, request_id))
        await_remote("block", job_id, request_id)
        if len(tried) == 1:
            raise RuntimeError("something else")

    fails_once()
    assert tried[0] == tried[1]
    assert len(service.named("save")) == 1
    assert len(service.named("poll")) == 2


def test_jobs_are_cancelled_when_the_block_fails_and_a_rerun_gets_a_new_one(service: ScriptedService) -> None:
    def body() -> list[str]:
        def fails(job_id: str) -> None:
            with jobs_cancelled_at_end():
                raise JobFailed(job_id=job_id, state="failed")

        first = create_job("block", SUB_JOBS)
        with pytest.raises(JobFailed):
            fails(first)
        return [first, create_job("block", SUB_JOBS)]

    first, second = in_a_flow(body)
    assert service.jobs[first]["status"] == "cancelled"
    assert service.jobs[second]["status"] == "running"


@flow(result_serializer="json")
def makes_a_job(name: str) -> str:
    return create_job("block", SUB_JOBS, name=name)


@flow(result_serializer="json")
def makes_two_jobs() -> list[str]:
    return [create_job("block", SUB_JOBS), makes_a_job("deeper")]


def test_jobs_that_a_subflow_made_end_with_the_flow_run_around_it(service: ScriptedService) -> None:
    """The subflow is over, and its jobs are worked with outside. A rerun finds them finished."""

    def body() -> list[str]:
        with jobs_cancelled_at_end():
            made = makes_two_jobs()
            assert [service.jobs[job_id]["status"] for job_id in made] == ["running"] * 2
        return made

    made = in_a_flow(body)
    assert list(service.jobs) == made
    assert [service.jobs[job_id]["status"] for job_id in made] == ["cancelled"] * 2


@flow(result_serializer="json")
def dies_with_a_job(killed: list[str]) -> None:
    """Once the flow around it has ended, as the server sees it, this one has not: nobody is left to say so."""
    create_job("block", SUB_JOBS)
    run_to_end(cancel_jobs_of_run(RunLabels(killed[0]), logging.getLogger("a-test")))


def test_who_ends_a_flow_run_from_outside_ends_the_jobs_of_its_subflows(service: ScriptedService) -> None:
    in_a_flow(lambda: dies_with_a_job([str(flow_run.id)]))
    assert [job["status"] for job in service.jobs.values()] == ["cancelled"]


def test_a_suspended_run_keeps_its_jobs(service: ScriptedService) -> None:
    def body() -> str:
        def suspends() -> None:
            with jobs_cancelled_at_end():
                raise Pause

        job_id = create_job("block", SUB_JOBS)
        with pytest.raises(Pause):
            suspends()
        return job_id

    job_id = in_a_flow(body)
    assert service.jobs[job_id]["status"] == "running"


def test_one_job_that_cannot_be_cancelled_does_not_save_the_next(
    service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_the_first(job_id: str) -> None:
        if job_id == min(service.jobs):
            raise TransportError("no route")

    def body() -> None:
        for name in ("a", "b"):
            create_job("block", SUB_JOBS, name=name)
        service.before["cancel"] = refuse_the_first
        run_to_end(cancel_jobs_of_run(RunLabels(flow_run.id), logging.getLogger("a-test")))

    in_a_flow(body)
    assert sorted(job["status"] for job in service.jobs.values()) == ["cancelled", "running"]
    assert f"job {min(service.jobs)} could not be cancelled" in caplog.text


@pytest.mark.parametrize("status", ["failed", "terminated", "cancelled"])
def test_cancelling_what_has_ended_is_no_error(service: ScriptedService, status: str) -> None:
    service.jobs["j"] = {"job_id": "j", "status": status}
    assert in_a_flow(lambda: [cancel_job("block", "j"), cancel_job("block", "unknown")]) == ["j", "unknown"]
