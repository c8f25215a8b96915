"""Where the public client 0.0.3 does harm, this one does not: both transports, against a server that misbehaves.

Calls and their errors are here, waiting and reading in `test_defects_in_waiting`; `docs/client.md` lists them all.
What `test_weather` proves already for every call is not repeated.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest

import cortex_training
from cortex_training import SubJobConfig, identity, wire
from cortex_training.errors import (
    ApiError,
    ChunkGroupConflictError,
    ChunkGroupRestartError,
    ConfigurationError,
    ConflictError,
    DeadlineExceeded,
    NotFoundError,
    OutcomeUnknown,
    ProtocolError,
    RateLimitedError,
)
from cortex_training.protocol import generation

BATCH = {"args": (), "kwargs": {"input_ids": np.arange(1000, dtype=np.int64)}}
OPTIONS = {"response_options": {"format": "dssst1", "delivery": "chunked"}, "router_replay": {"sampling_job_id": "s"}}
FRAME = wire.dumps(BATCH, OPTIONS)
SAMPLING = SubJobConfig.sampling_job("tiny", 64, 1)


@pytest.fixture
def says(scripted: Any) -> Any:
    return scripted


def described(seen: Any) -> dict[str, Any]:
    return wire.read_byte_chunk_metadata(seen.body) or {}


# What is sent


def test_batches_and_prompts_are_sent_without_torch(weather: Any, says: Any) -> None:
    """The public client declares torch, and needs a numpy that it does not declare."""
    program = """
    import asyncio, sys
    sys.modules["torch"] = None
    import numpy as np
    from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient, serialize_forward_backward_args
    frame = serialize_forward_backward_args(args=(), kwargs={"input_ids": np.ones((1, 4), np.int64)})
    client = CortexTrainingClient(sys.argv[1], "DB", "PUBLIC", token_prompts="tensor")
    print(client.forward_backward("j", frame), client.generate("j", ["text", [1, 2, 3]]))
    async def again():
        async with AsyncCortexTrainingClient(sys.argv[1], "DB", "PUBLIC", token_prompts="tensor") as client:
            print(await client.forward_backward("j", frame), await client.generate("j", ["text", [1, 2, 3]]))
    asyncio.run(again())
    """
    weather.sequence(says.Reply(body={"request_id": "r"}))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), weather.url], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("r r\nr r\n", "")
    posted = [seen for seen in weather.seen if seen.path == "/j/generate"]
    assert [prompt.tolist() for prompt in wire.loads(posted[1].body)["prompts"][1:]] == [[1, 2, 3]]


def test_a_batch_encoded_again_is_the_same_operation(client: Any, weather: Any, says: Any) -> None:
    """The public encoder shuffles the metadata, so that the service sees another frame under the same id."""
    weather.sequence(says.Reply(body={"request_id": "r"}))
    for _ in range(12):
        client.forward_backward("j", wire.dumps(BATCH, OPTIONS), chunk_group_id="g")
    assert len({seen.body for seen in weather.seen}) == 1


def test_a_crashed_driver_sends_its_batch_again_under_the_same_id(clients: Any, weather: Any, says: Any) -> None:
    group = identity.group_id("j", segment=0, step=1, micro_batch=0)
    weather.sequence(says.Drop())
    with pytest.raises(Exception, match="no answer came back"):
        clients(weather.url, max_retries=0).forward_backward("j", FRAME, chunk_group_id=group)
    weather.sequence(says.Reply(body={"request_id": "r"}))
    assert clients(weather.url).forward_backward("j", wire.dumps(BATCH, OPTIONS), chunk_group_id=group) == "r"
    assert weather.seen[0].body == weather.seen[1].body
    assert described(weather.seen[1])["chunk_group_id"] == group


def test_a_request_that_nobody_could_read_is_refused_before_it_is_sent(client: Any, weather: Any) -> None:
    """A header beyond 64 MiB is encoded by the public client and can't be decoded by anybody."""
    with pytest.raises(ConfigurationError, match="header"):
        client.generate("j", ["x" * (65 * 1024 * 1024)])
    assert weather.seen == []


def test_a_frame_is_checked_before_it_is_sent(client: Any, weather: Any, says: Any) -> None:
    for frame in (b"", b"opaque bytes", "text", None, FRAME[:20]):
        with pytest.raises(ConfigurationError, match="forward_backward"):
            client.forward_backward("j", frame)
    assert weather.seen == []
    weather.sequence(says.Reply(body={"request_id": "r"}))
    client.forward_backward("j", memoryview(bytearray(FRAME)))
    client.forward_backward("j", memoryview(FRAME).cast("q"))
    assert [wire.decode_byte_chunks([seen.body]) for seen in weather.seen] == [FRAME, FRAME]


def test_a_name_of_another_resource_is_not_an_id(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={}))
    client.delete_checkpoint("j", "../../j2")
    assert weather.seen[0].path == "/j/checkpoints/..%2F..%2Fj2"
    for call in (client.get_job, client.cancel_job, client.list_checkpoints, client.step):
        for nothing in ("", "  ", ".", "..", None, 7):
            with pytest.raises(ConfigurationError, match="job_id"):
                call(nothing)
    assert len(weather.seen) == 1


def test_two_keys_that_read_alike_both_arrive(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"request_id": "r"}))
    values = [
        {"a": {"b": np.zeros(2)}, "a.b": np.ones(2)},
        {"a": [np.zeros(2)], "a.0": np.ones(2)},
        {"": {"x": np.zeros(2)}, "x": np.ones(2)},
        {"__metadata__": np.zeros(2), "__dss_empty__": np.ones(2)},
    ]
    for value in values:
        client.forward_backward("j", wire.dumps(value))
        arrived = wire.loads(wire.decode_byte_chunks([weather.seen[-1].body]), framework="numpy")
        assert repr(arrived) == repr(value)


def test_a_rate_is_sent_only_when_one_is_given(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"request_id": "r"}))
    client.step("j")
    client.step("j", 2e-5)
    assert [seen.json for seen in weather.seen] == [{}, {"learning_rate": 2e-5}]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.weight_sync("j", "j:training:0", "j:sampling:0"), "target_sub_job_ids"),
        (lambda client: client.weight_sync("j", "j:training:0", ["j:sampling:0"], weight_format="gguf"), "weight_form"),
        (lambda client: client.step("j", "1e-4"), "learning_rate"),
        (lambda client: client.step("j", -1), "learning_rate"),
        (lambda client: client.step("j", float("nan")), "learning_rate"),
        (lambda client: client.save("j", checkpoint_type=5), "checkpoint_type"),
        (lambda client: client.create_job([SubJobConfig.sampling_job("tiny", 64, True)]), "n_gpus"),
        (lambda client: client.create_job([SubJobConfig.sampling_job("tiny", 64, 1.5)]), "n_gpus"),
        (lambda client: client.create_job([SubJobConfig.sampling_job("tiny", "8", 1)]), "max_seq_len"),
        (lambda client: client.poll_request("j", "r", timeout_s=float("nan")), "timeout_s"),
        (lambda client: client.get_capacity("h200"), "hardware"),
    ],
)
def test_a_bad_argument_is_named_before_anything_is_sent(client: Any, weather: Any, call: Any, field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        call(client)
    assert weather.seen == []


def test_a_host_may_be_given_as_a_url(clients: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"jobs": []}))
    assert clients.from_pat(f"{weather.url}/").list_jobs() == []
    assert clients.from_pat("https://h/").base_url == "https://h"


@pytest.mark.parametrize(
    "prompts", ["hello", [], [1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), [[]], [[1, "2"]], [[True]], [[-1]], [None]]
)
@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_prompts_of_another_shape_are_refused(client: Any, weather: Any, call: str, prompts: Any) -> None:
    with pytest.raises(ConfigurationError, match="prompts"):
        getattr(client, call)("j", prompts)
    assert weather.seen == []


@pytest.mark.parametrize("window", [8, 8.0, "8"])
@pytest.mark.parametrize("prompt", [list(range(8)), tuple(range(8)), np.arange(8)])
@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_the_window_is_that_of_the_sampling_sub_job(
    client: Any, weather: Any, says: Any, call: str, prompt: Any, window: Any
) -> None:
    job = {
        "sub_jobs": [
            {"job_type": "log_probability", "inference_config": {"max_seq_len": 4}},
            {"job_type": "sampling", "inference_config": {"max_seq_len": window}},
        ]
    }
    weather.script = lambda seen: says.Reply(body=job if seen.method == "GET" else {"request_id": "r"})
    with pytest.raises(ConfigurationError, match="8 tokens leave no room for an answer in the window of 8"):
        getattr(client, call)("j", [prompt])
    assert [seen.method for seen in weather.seen] == ["GET"]
    getattr(client, call)("j", [prompt[:7]])
    assert [seen.method for seen in weather.seen] == ["GET", "POST"]


def test_no_operation_writes_to_standard_output(
    client: Any, weather: Any, says: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The public client prints every operation with its payload, into whatever its user pipes or logs."""
    weather.script = lambda seen: says.Reply(
        body={"status": "done", "result": {}, "request_id": "r", "entries": [], "eof": True}
    )
    source, target = "j:training:0", "j:sampling:0"
    client.forward("j", b"secret batch")
    client.weight_sync("j", source, [target])
    client.bootstrap_router_replay("j", target, source)
    client.router_replay_discard("j", ["s"])
    client.reset_prefix_cache("j")
    client.cancel_request("j", "r")
    client.tail_logs("j")
    client.poll_request("j", client.forward_backward("j", FRAME))
    assert tuple(capfd.readouterr()) == ("", "")


def test_what_the_service_does_not_serve_is_not_offered(client: Any) -> None:
    assert not hasattr(client, "tail_events")
    assert not hasattr(client, "stream_events")


def test_a_forward_goes_either_way(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"request_id": "r"}))
    client.forward("j", FRAME)
    client.forward("j", FRAME, route="direct")
    enveloped, direct = weather.seen
    assert enveloped.path == "/j/operation"
    assert set(enveloped.json["payload"]) == {"payload_b64", "content_type"}
    assert (direct.path, direct.body) == ("/j/forward", FRAME)


# What comes back


def test_an_unknown_job_is_an_error_after_one_look(client: Any, weather: Any, says: Any) -> None:
    """The public client asks 22 times, for two minutes, before it says so."""
    weather.sequence(says.Reply(404, {"message": "no such job"}))
    for call in (
        lambda: client.generate("mistyped", [[1, 2, 3]]),
        lambda: client.generate("mistyped", ["text"]),
        lambda: client.wait_for_job("mistyped"),
        lambda: client.export_checkpoint("mistyped", "cp_1"),
        lambda: client.delete_checkpoint("j", "cp_mistyped"),
        lambda: client.forward_backward("mistyped", FRAME),
    ):
        weather.seen.clear()
        with pytest.raises(NotFoundError, match="no such job"):
            call()
        assert len(weather.seen) == 1
    weather.seen.clear()
    with pytest.raises(NotFoundError, match="no such job"):
        client.poll_request("mistyped", "r")
    assert [seen.path for seen in weather.seen] == ["/mistyped/requests/r", "/mistyped"]


def test_a_job_that_was_just_created_may_not_be_known_everywhere_yet(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(
        says.Reply(body={"job_id": "j"}), says.Reply(404), says.Reply(404), says.Reply(body={"status": "pending"})
    )
    job = client.create_job([SAMPLING])
    assert client.get_job(job)["status"] == "pending"


@pytest.mark.parametrize(
    "call", [lambda c: c.cancel_job("j"), lambda c: c.step("j"), lambda c: c.forward_backward("j", FRAME)]
)
def test_a_terminal_conflict_is_not_repeated(client: Any, weather: Any, says: Any, call: Any) -> None:
    weather.sequence(says.Reply(409, {"code": 409, "message": "job is terminated"}))
    with pytest.raises(ConflictError, match="job is terminated"):
        call(client)
    assert len(weather.seen) == 1


def test_a_service_that_says_when_is_asked_then(client: Any, weather: Any, says: Any) -> None:
    times: list[float] = []

    def script(seen: Any) -> Any:
        times.append(time.monotonic())
        return says.Reply(body={"request_id": "r"}) if len(times) > 1 else says.Reply(429, {}, {"Retry-After": "1"})

    weather.script = script
    assert client.step("j") == "r"
    assert len(times) == 2
    assert times[1] - times[0] >= 1.0


def test_a_wait_of_the_service_beyond_the_deadline_is_not_waited_for(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(429, {"message": "quota"}, {"Retry-After": "120"}))
    with pytest.raises(RateLimitedError, match="quota"):
        client.step("j")
    with pytest.raises(DeadlineExceeded, match="r"):
        client.poll_request("j", "r", timeout_s=0.5)
    assert len(weather.seen) == 2


@pytest.mark.parametrize("code", ["chunk_group_restart_required", "chunk_group_missing_chunks", "chunk_group_conflict"])
def test_a_large_generation_is_restarted_once_and_never_repeated_blindly(
    client: Any, weather: Any, says: Any, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(generation, "MAX_REQUEST_BYTES", 64)
    detail = {"code": code, "message": "restart from chunk 0", "chunk_group_id": "g"}
    wrapped = f"zone returned 409: {json.dumps({'detail': detail})}"
    weather.sequence(says.Reply(409, {"code": "517604", "message": wrapped}))
    restart = code == "chunk_group_restart_required"
    with pytest.raises(ChunkGroupRestartError if restart else ChunkGroupConflictError) as caught:
        client.generate("j", ["a prompt longer than the limit of this test" * 3])
    assert caught.value.detail["code"] == code
    assert len(weather.seen) == (2 if restart else 1)
    assert len({seen.body for seen in weather.seen}) == 1
    weather.sequence(says.Reply(409, {"detail": detail}), says.Reply(body={"request_id": "r"}))
    if restart:
        assert client.generate("j", ["a prompt longer than the limit of this test" * 3]) == "r"


def test_an_error_says_what_the_service_said(client: Any, weather: Any, says: Any) -> None:
    """The public client shows the URL alone."""
    body = {"code": "390201", "message": "the role may not use this schema"}
    weather.sequence(says.Reply(400, body, {"X-Snowflake-Request-Id": "req-1"}))
    with pytest.raises(ApiError, match=r"the role may not use this schema.*req-1") as caught:
        client.get_job("j")
    error = caught.value
    assert (error.status, error.code, error.request_id) == (400, "390201", "req-1")
    assert error.response.json() == body


@pytest.mark.parametrize("reply", [{}, {"request_id": None}, {"request_id": ""}, {"request_id": 7}])
def test_a_reply_without_its_id_is_no_key_error(client: Any, weather: Any, says: Any, reply: Any) -> None:
    weather.sequence(says.Reply(body=reply))
    with pytest.raises(ProtocolError, match="request_id"):
        client.forward_backward("j", FRAME)
    for call in (lambda: client.step("j"), lambda: client.save("j"), lambda: client.generate("j", ["x"])):
        with pytest.raises(OutcomeUnknown, match="request_id"):
            call()
    with pytest.raises(OutcomeUnknown, match="job_id"):
        client.create_job([SAMPLING])
    with pytest.raises(ProtocolError, match="job_id"):
        client.create_job([SAMPLING], job_id=identity.new_job_id())


@pytest.mark.parametrize("status", [304, 300, 302])
def test_what_is_no_answer_of_the_service_is_not_taken_for_one(
    client: Any, weather: Any, says: Any, status: int
) -> None:
    weather.sequence(says.Reply(status, b"", {"Location": f"{weather.url}/sign-in"}))
    with pytest.raises(ApiError) as caught:
        client.get_job("j")
    assert caught.value.status == status
    assert len(weather.seen) == 1


def test_a_lost_reply_to_a_create_leaves_one_job_whose_id_is_known(client: Any, weather: Any, says: Any) -> None:
    jobs: dict[str, Any] = {}

    def script(seen: Any) -> Any:
        if seen.method == "GET":
            return says.Reply(body=jobs[seen.path.strip("/")])
        body = seen.json
        if body["job_id"] in jobs:
            return says.Reply(409, {"message": "the job exists"})
        jobs[body["job_id"]] = {"status": "pending", "sub_jobs": body["sub_job_configs"]}
        return says.Drop()

    weather.script = script
    job_id = identity.new_job_id()
    assert client.create_job([SAMPLING], job_id=job_id) == job_id
    assert list(jobs) == [job_id]


def test_a_create_without_an_id_is_never_sent_twice(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Drop())
    with pytest.raises(OutcomeUnknown, match="list_jobs"):
        client.create_job([SAMPLING])
    assert len(weather.seen) == 1
    weather.sequence(says.Reply(429, {}, {"Retry-After": "0"}), says.Reply(body={"job_id": "j"}))
    assert client.create_job([SAMPLING]) == "j"


def test_capacity_has_its_ceiling(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"has_reservation": True, "max_total_gpus": -1, "in_use_gpus": "8"}))
    capacity = client.get_capacity()
    assert (capacity["max_total_gpus"], capacity["in_use_gpus"], capacity["pending_gpus"]) == (-1, 8, 0)


# What the package says of itself, and what a value costs


def test_the_version_is_that_of_the_distribution() -> None:
    assert cortex_training.__version__ == importlib.metadata.version("cortex-training-client")


def test_a_deep_value_is_walked_once() -> None:
    """The public encoder walks all that is below each level again: ten seconds for what takes milliseconds."""
    walks: list[int] = []

    class Watched(dict[str, Any]):
        def items(self) -> Any:
            walks.append(1)
            return super().items()

        def values(self) -> Any:
            walks.append(1)
            return super().values()

    value: Any = np.zeros(1)
    for _ in range(60):
        value = Watched(below=value, beside=1)
    wire.dumps(value)
    assert len(walks) <= 4 * 60
