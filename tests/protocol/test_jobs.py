"""Jobs: what is created, adopted, waited for and cancelled."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cortex_training.config import Hardware, SubJobConfig
from cortex_training.errors import (
    ConfigurationError,
    ConflictError,
    DeadlineExceeded,
    JobFailed,
    NotFoundError,
    OutcomeUnknown,
    ProtocolError,
)
from cortex_training.protocol import jobs
from cortex_training.protocol.messages import Kind

MINE = "8d5b3c1e-0000-4000-8000-000000000001"


def training(**options: Any) -> SubJobConfig:
    arguments = {"optimizer": {"name": "AdamW", "lr": 1e-4}, "max_seq_len": 128, "train_batch_size": 8, "n_gpus": 1}
    return SubJobConfig.training_job("m", **{**arguments, **options})


def sampling(**options: Any) -> SubJobConfig:
    return SubJobConfig.sampling_job("m", **{"max_seq_len": 128, "n_gpus": 1, **options})


def as_served(sub_jobs: list[SubJobConfig], status: str = "running", **fields: Any) -> dict[str, Any]:
    """A job as the service returns it: numbers as floats, fields of its own."""

    def floats(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: floats(part) for key, part in value.items()}
        return float(value) if type(value) is int else value

    served = [
        {**floats(job.to_wire()), "sub_job_id": f"{MINE}:x:{i}", "status": status} for i, job in enumerate(sub_jobs)
    ]
    return {"job_id": MINE, "status": status, "sub_jobs": served, **fields}


def test_create_sends_exactly_what_was_configured(world: Any, say: Any) -> None:
    created = world.run(
        jobs.create_job(world.context, [training(), sampling()], MINE, "exp", Hardware.B200, 1800, 300),
        [say.reply({"job_id": MINE})],
    )
    assert created == MINE
    assert world.sent == ["POST "]
    assert world.body == {
        "sub_job_configs": [training().to_wire(), sampling().to_wire()],
        "job_id": MINE,
        "experiment_name": "exp",
        "hardware": "B200",
        "idle_timeout_seconds": 1800,
        "pending_timeout_seconds": 300,
    }


def test_create_leaves_out_what_was_not_given(world: Any, say: Any) -> None:
    world.run(jobs.create_job(world.context, [sampling()]), [say.reply({"job_id": "j"})])
    assert world.body == {"sub_job_configs": [sampling().to_wire()]}


@pytest.mark.parametrize("sub_jobs", [[], None, "x", {}, [1], [{"job_type": "training"}]])
def test_create_refuses_what_is_no_list_of_sub_jobs(world: Any, sub_jobs: Any) -> None:
    with pytest.raises(ConfigurationError, match="sub_jobs"):
        world.run(jobs.create_job(world.context, sub_jobs))


@pytest.mark.parametrize("hardware", ["A10", "h200", "", 200])
def test_create_refuses_unknown_hardware(world: Any, hardware: Any) -> None:
    with pytest.raises(ConfigurationError, match="hardware"):
        world.run(jobs.create_job(world.context, [sampling()], hardware=hardware))


@pytest.mark.parametrize("seconds", [-1, 1, 299, 604_801, True, 300.0, "300"])
def test_create_refuses_timeouts_out_of_range(world: Any, seconds: Any) -> None:
    for name in ("idle_timeout_seconds", "pending_timeout_seconds"):
        with pytest.raises(ConfigurationError, match=name):
            world.run(jobs.create_job(world.context, [sampling()], **{name: seconds}))


def test_only_the_idle_timeout_may_be_zero(world: Any, say: Any) -> None:
    for seconds in (0, 300, 604_800):
        world.run(
            jobs.create_job(world.context, [sampling()], idle_timeout_seconds=seconds), [say.reply({"job_id": "j"})]
        )
        assert world.body["idle_timeout_seconds"] == seconds
    with pytest.raises(ConfigurationError, match="pending_timeout_seconds"):
        world.run(jobs.create_job(world.context, [sampling()], pending_timeout_seconds=0))


def test_an_error_in_a_sub_job_names_it(world: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"sub_jobs\[1\]\.training_config\.max_seq_len = 0"):
        world.run(jobs.create_job(world.context, [sampling(), training(max_seq_len=0)]))


@pytest.mark.parametrize("second", ["training", " TRAINING ", "JOB_TYPE_TRAINING"])
def test_two_training_sub_jobs_are_refused(world: Any, second: str) -> None:
    body = {"sub_job_configs": [training().to_wire(), {**training().to_wire(), "job_type": second}]}
    with pytest.raises(ConfigurationError, match="at most one training"):
        world.run(jobs.create_job_from_body(world.context, body))
    assert world.requests == []


def test_many_sampling_sub_jobs_are_fine(world: Any, say: Any) -> None:
    world.run(jobs.create_job(world.context, [training(), sampling(), sampling()]), [say.reply({"job_id": "j"})])


@pytest.mark.parametrize("job_id", ["a:b", "a/b", "", "..", 7])
def test_a_job_id_the_service_would_split_is_refused(world: Any, job_id: Any) -> None:
    with pytest.raises(ConfigurationError, match="job_id"):
        world.run(jobs.create_job(world.context, [sampling()], job_id))


def test_adapters_that_could_not_be_synced_are_refused_before_the_job_is_created(world: Any) -> None:
    peft = {"peft_type": "Lora", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    other = {**peft, "r": 8}
    with pytest.raises(ConfigurationError, match=r"sub_jobs\[1\]\.inference_config\.peft_config\.r = 8.*16"):
        world.run(
            jobs.create_job(
                world.context,
                [training(extra_training={"peft_config": peft}), sampling(extra_sampling={"peft_config": other})],
            )
        )
    assert world.requests == []


def test_adapters_are_equal_in_any_order_and_with_defaults_spelled_out(world: Any, say: Any) -> None:
    ours = {"peft_type": "Lora", "target_modules": ["q_proj", "v_proj"]}
    theirs = {"peft_type": "Lora", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    pair = [training(extra_training={"peft_config": ours}), sampling(extra_sampling={"peft_config": theirs})]
    world.run(jobs.create_job(world.context, pair), [say.reply({"job_id": "j"})])


def test_a_raw_body_is_posted_unchanged(world: Any, say: Any) -> None:
    body = {"sub_job_configs": [{"job_type": "sampling", "anything": [1, None]}], "new_field": {"a": 1}}
    before = copy.deepcopy(body)
    reply = world.run(jobs.create_job_from_body(world.context, body), [say.reply({"job_id": "j", "extra": 1})])
    assert reply == {"job_id": "j", "extra": 1}
    assert world.body == before == body


@pytest.mark.parametrize("body", [None, [], {}, {"sub_job_configs": []}, {"sub_job_configs": "x"}])
def test_a_raw_body_without_sub_jobs_is_refused(world: Any, body: Any) -> None:
    with pytest.raises(ConfigurationError):
        world.run(jobs.create_job_from_body(world.context, body))


def test_debug_options_need_their_switch(world: Any, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"sub_job_configs": [sampling().to_wire()], "debug": {"x": 1}}
    monkeypatch.delenv(jobs.DEBUG_OPTIONS_ENV, raising=False)
    with pytest.raises(ConfigurationError, match=jobs.DEBUG_OPTIONS_ENV):
        world.run(jobs.create_job_from_body(world.context, body))
    monkeypatch.setenv(jobs.DEBUG_OPTIONS_ENV, "yes")
    world.run(jobs.create_job_from_body(world.context, body), [say.reply({"job_id": "j"})])


def test_values_that_json_cannot_hold_are_refused(world: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written as JSON"):
        world.run(jobs.create_job_from_body(world.context, {"sub_job_configs": [{"lr": float("nan")}]}))


def test_create_without_an_id_is_at_most_once(world: Any, say: Any) -> None:
    with pytest.raises(OutcomeUnknown, match="list_jobs"):
        world.run(jobs.create_job(world.context, [sampling()]), [say.lost])
    assert world.requests[0].kind is Kind.AT_MOST_ONCE


def test_create_with_our_id_is_repeated_and_the_job_it_made_adopted(world: Any, say: Any) -> None:
    wanted = [training(), sampling()]
    created = world.run(
        jobs.create_job(world.context, wanted, MINE),
        [say.lost, say.reply({"message": "job exists"}, 409), say.reply(as_served(wanted, "placing"))],
    )
    assert created == MINE
    assert world.sent == ["POST ", "POST ", f"GET /{MINE}"]


def test_another_process_job_under_our_id_is_adopted_only_if_it_is_the_same(world: Any, say: Any) -> None:
    conflict = say.reply({"message": "job exists"}, 409)
    assert (
        world.run(jobs.create_job(world.context, [training()], MINE), [conflict, say.reply(as_served([training()]))])
        == MINE
    )
    for other in ([training(train_batch_size=16)], [training(), sampling()], [sampling()]):
        with pytest.raises(ConfigurationError, match="is another one"):
            world.run(jobs.create_job(world.context, [training()], MINE), [conflict, say.reply(as_served(other))])


@pytest.mark.parametrize("status", ["cancelled", "JOB_STATE_FAILED", "terminated", "done"])
def test_an_ended_job_is_not_adopted(world: Any, say: Any, status: str) -> None:
    with pytest.raises(ConflictError):
        world.run(
            jobs.create_job(world.context, [training()], MINE),
            [say.reply({}, 409), say.reply(as_served([training()], status))],
        )


def test_a_conflict_without_a_job_stays_a_conflict(world: Any, say: Any) -> None:
    with pytest.raises(ConflictError):
        world.run(jobs.create_job(world.context, [training()], MINE), [say.reply({}, 409), say.reply({}, 404)])


def test_the_services_id_wins_and_its_creates_are_at_most_once_from_then_on(world: Any, say: Any, caplog: Any) -> None:
    assert world.run(jobs.create_job(world.context, [training()], MINE), [say.reply({"job_id": "theirs"})]) == "theirs"
    assert "theirs" in caplog.text
    with pytest.raises(OutcomeUnknown):
        world.run(jobs.create_job(world.context, [training()], MINE), [say.lost])


def test_a_create_without_a_job_id_in_its_reply_is_a_protocol_error_or_unknown(world: Any, say: Any) -> None:
    with pytest.raises(ProtocolError, match="without a job_id"):
        world.run(jobs.create_job(world.context, [training()], MINE), [say.reply({"id": "j"})])
    with pytest.raises(OutcomeUnknown):
        world.run(jobs.create_job(world.context, [training()]), [say.reply({"id": "j"})])


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ({"n_gpus": 1}, {"n_gpus": 1.0, "more": 2}, True),
        ({"flag": True}, {"flag": 1}, False),
        ({"list": [1, {"a": 2}]}, {"list": [1.0, {"a": 2, "b": 3}]}, True),
        ({"list": [1]}, {"list": [1, 2]}, False),
        ({"a": None}, {}, True),
        ({"a": {"b": 1}}, {"a": 1}, False),
        ({"job_type": "log_probability"}, {"job_type": "LOG_PROB"}, True),
    ],
)
def test_configurations_are_compared_by_what_we_sent(ours: Any, theirs: Any, same: bool) -> None:
    assert (jobs.difference_from([ours], [theirs]) == "") is same


def test_list_jobs(world: Any, say: Any) -> None:
    assert world.run(jobs.list_jobs(world.context), [say.reply({"jobs": [{"job_id": "j"}]})]) == [{"job_id": "j"}]
    assert world.requests[-1].query == ()
    assert world.run(jobs.list_jobs(world.context, "running"), [say.reply({})]) == []
    assert world.requests[-1].query == (("status", "running"),)
    assert world.sent == ["GET ", "GET "]


def test_cancel_is_repeated_and_an_ended_job_refuses_it(world: Any, say: Any) -> None:
    assert world.run(jobs.cancel_job(world.context, "j"), [say.lost, say.reply({})]) is None
    with pytest.raises(ConflictError):
        world.run(jobs.cancel_job(world.context, "j"), [say.reply({"message": "job is terminated"}, 409)])


def test_a_refusal_that_echoes_our_own_cancel_is_success(world: Any, say: Any) -> None:
    answers = [say.lost, say.reply({"message": "job is terminated"}, 409), say.reply({"status": "terminated"})]
    assert world.run(jobs.cancel_job(world.context, "j"), answers) is None


def test_capacity_has_all_six_fields(world: Any, say: Any) -> None:
    assert world.run(jobs.get_capacity(world.context), [say.reply({})]) == {
        "has_reservation": False,
        "max_total_gpus": 0,
        "reserved_gpus": 0,
        "in_use_gpus": 0,
        "pending_gpus": 0,
        "available_gpus": 0,
    }
    answer = {"has_reservation": True, "max_total_gpus": -1, "in_use_gpus": "8", "available_gpus": 56.0, "new": "x"}
    capacity = world.run(jobs.get_capacity(world.context, Hardware.B300), [say.reply(answer)])
    assert (capacity["max_total_gpus"], capacity["in_use_gpus"], capacity["available_gpus"]) == (-1, 8, 56)
    assert capacity["new"] == "x"
    assert world.requests[-1].query == (("hardware", "B300"),)
    assert world.requests[-1].timeouts.read_s == 30


def test_wait_returns_the_running_job_and_reports_each_look(world: Any, say: Any) -> None:
    seen: list[str] = []
    states = ["JOB_STATE_PENDING", 3, None, "placing", "initializing", "JOB_STATE_RUNNING"]
    job = world.run(
        jobs.wait_for_job(world.context, "j", progress=lambda job: seen.append(job["status"])),
        [say.reply({"status": state}) for state in states],
    )
    assert job["status"] == "JOB_STATE_RUNNING"
    assert seen == states


@pytest.mark.parametrize("state", ["failed", "done", "cancelled", "canceled", "terminated", "JOB_STATE_TERMINATED"])
def test_wait_ends_at_every_terminal_state(world: Any, say: Any, state: str) -> None:
    with pytest.raises(JobFailed) as caught:
        world.run(jobs.wait_for_job(world.context, "j"), [say.reply({"status": state, "reason": "pending_timeout"})])
    assert caught.value.reason == "pending_timeout"
    assert isinstance(caught.value, RuntimeError)


def test_wait_ends_at_its_deadline_and_never_sleeps_beyond_it(world: Any, say: Any) -> None:
    with pytest.raises(DeadlineExceeded, match="last state: pending") as caught:
        world.run(jobs.wait_for_job(world.context, "j", timeout_s=10), lambda sent: say.reply({"status": "pending"}))
    assert isinstance(caught.value, TimeoutError)
    assert world.now - 1000 == pytest.approx(10)


def test_wait_survives_an_outage_shorter_than_its_deadline(world: Any, say: Any) -> None:
    def respond(sent: Any) -> Any:
        return say.reply({}, 503) if world.now < 1300 else say.reply({"status": "running"})

    assert world.run(jobs.wait_for_job(world.context, "j"), respond)["status"] == "running"
    assert 300 <= world.now - 1000 <= 311


def test_wait_for_an_unknown_job_fails_at_once(world: Any, say: Any) -> None:
    with pytest.raises(NotFoundError):
        world.run(jobs.wait_for_job(world.context, "j"), [say.reply({}, 404)])


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "5", True])
def test_a_wait_needs_a_sensible_timeout(world: Any, timeout_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout_s"):
        world.run(jobs.wait_for_job(world.context, "j", timeout_s=timeout_s))
