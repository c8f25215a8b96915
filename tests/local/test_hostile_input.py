"""Nothing that is sent makes the service fail: bad input is a 4xx answer in JSON that says what is wrong."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from cortex_training import wire
from tests.conftest import RunningService, ServiceFactory
from tests.local.api import LORA, Caller, RunningJob, chunks_of, masked_frame, sampling, token_batch, training

OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture
def job(caller: Caller) -> RunningJob:
    return caller.running()


def refused(reply: requests.Response, *statuses: int) -> str:
    """The message of a refusal in the service's shape."""
    assert reply.status_code in (statuses or (400,)), reply.text
    assert reply.headers["x-snowflake-request-id"]
    body = reply.json()
    assert body["message"]
    assert body["code"]
    return str(body["message"])


@pytest.mark.parametrize(
    ("sub_jobs", "fields", "names"),
    [
        ([training(config={"n_gpus": 0})], {}, "n_gpus"),
        ([training(config={"n_gpus": True})], {}, "n_gpus"),
        ([training(config={"n_gpus": "8"})], {}, "n_gpus"),
        ([training(config={"max_seq_len": 0})], {}, "max_seq_len"),
        ([training(config={"max_seq_len": 513})], {}, "max_seq_len"),
        ([training(config={"train_batch_size": None})], {}, "train_batch_size"),
        ([training(config={"n_gpus": 8, "sp_size": 3})], {}, "sp_size"),
        ([training(config={"ac_config": {"mode": "selective", "offload_config": {"enabled": True}}})], {}, "ac_config"),
        ([training(config={"multiplex_job_id": "elsewhere"})], {}, "multiplex_job_id"),
        ([training(config={"multiplex_job_id": "own:training:0"})], {"job_id": "own"}, "multiplex_job_id"),
        ([training(config={"optimizer": {}})], {}, "optimizer"),
        ([training(config={"optimizer": {"name": "SGD"}})], {}, "optimizer.name"),
        ([training(config={"optimizer": {"name": "AdamW", "lr": -1}})], {}, "optimizer.lr"),
        ([training(config={"optimizer": {"name": "AdamW", "lr": "1e-4"}})], {}, "optimizer.lr"),
        ([training(config={"optimizer": {"name": "AdamW", "betas": [0.9]}})], {}, "betas"),
        ([training(config={"optimizer": {"name": "AdamW", "momentum": 0.9}})], {}, "momentum"),
        ([training(config={"gradient_clipping": -1})], {}, "gradient_clipping"),
        ([training(config={"peft_config": {**LORA, "r": 0}})], {}, "peft_config.r"),
        ([training(config={"peft_config": {**LORA, "peft_type": "Prefix"}})], {}, "peft_type"),
        ([training(config={"peft_config": {"peft_type": "Lora"}})], {}, "target_modules"),
        ([training(config={"peft_config": {**LORA, "bias": "all"}})], {}, "bias"),
        ([training(config={"load_optimizer_states": "false"})], {}, "load_optimizer_states"),
        ([training(config={"step_peak_memory_log": 1})], {}, "step_peak_memory_log"),
        ([training(config={"training_memory_telemetry": "on"})], {}, "training_memory_telemetry"),
        ([training(config={"cuda_allocator_conf": {}})], {}, "cuda_allocator_conf"),
        ([training(global_batch_size=0)], {}, "global_batch_size"),
        ([training(model_post_init="hook")], {}, "model_post_init"),
        ([training(model_name="")], {}, "model_name"),
        ([training(model_name="../../etc")], {}, "model_name"),
        ([training(model_name="no/such-model")], {}, "no/such-model"),
        ([training(job_type="evaluation")], {}, "job_type"),
        ([training(dtype="int8")], {}, "dtype"),
        *[([training(dtype=nothing)], {}, "dtype") for nothing in (False, 0, "", [], {})],
        ([training(seed=-1)], {}, "seed"),
        ([training(surprise=1)], {}, "surprise"),
        ([training(inference_config={"max_seq_len": 8, "n_gpus": 1})], {}, "inference_config"),
        ([training(source_checkpoint_info={})], {}, "checkpoint_id"),
        ([training(source_checkpoint_info={"checkpoint_id": "x"})], {}, "source_job_id"),
        ([training(source_checkpoint_info={"external_stage_path": "@A.B.C/d"})], {}, "external_stage_path"),
        ([training(), training()], {}, "at most one"),
        ([{"job_type": "training", "model_name": "tiny"}], {}, "training_config"),
        (["training"], {}, "sub_job_configs.0"),
        ([training()], {"hardware": "A10"}, "hardware"),
        ([training()], {"hardware": "h200"}, "hardware"),
        ([training()], {"idle_timeout_seconds": 299}, "idle_timeout_seconds"),
        ([training()], {"idle_timeout_seconds": True}, "idle_timeout_seconds"),
        ([training()], {"pending_timeout_seconds": 0}, "pending_timeout_seconds"),
        ([training()], {"pending_timeout_seconds": 604801}, "pending_timeout_seconds"),
        ([training()], {"experiment_name": "a\nb"}, "experiment_name"),
        ([training()], {"idle_timout_seconds": 300}, "idle_timout_seconds"),
        ([training()], {"job_id": "a:b"}, "job_id"),
        ([training()], {"job_id": "a/b"}, "job_id"),
        ([training()], {"job_id": ".."}, "job_id"),
        ([training()], {"job_id": "capacity"}, "job_id"),
        ([training()], {"job_id": ""}, "job_id"),
        ([training()], {"job_id": "x" * 129}, "job_id"),
        ([training()], {"job_id": 7}, "job_id"),
        ([training()], {"job_id": "\ud800"}, "job_id"),
        ([training()], {"sub_job_configs": []}, "sub_job_configs"),
        ([training()], {"sub_job_configs": None}, "sub_job_configs"),
        ([training()], {"sub_job_configs": [training()] * 65}, "sub_job_configs"),
    ],
)
def test_create_names_the_wrong_field(caller: Caller, sub_jobs: list[Any], fields: dict[str, Any], names: str) -> None:
    assert names in refused(caller.create(*sub_jobs, **fields), 400)


def test_a_source_checkpoint_must_exist(caller: Caller) -> None:
    source = {"checkpoint_id": "cp_none", "source_job_id": "none"}
    assert "cp_none" in refused(caller.create(training(source_checkpoint_info=source)), 404)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"learning_rate": NaN}',
        b'{"learning_rate": Infinity}',
        b'{"learning_rate": 1e999}',
        b'{"learning_rate": "fast"}',
        b'{"learning_rate": -1}',
        b'{"learning_rate": true}',
        b'{"lr": 1}',
        b'{"learning_rate": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_bad_json(job: RunningJob, body: bytes) -> None:
    refused(job.call("POST", "/step", data=body, headers={"content-type": "application/json"}))
    refused(job.call("POST", "/operation", data=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"source_sub_job_id": "{job}:training:0"},
        {"source_sub_job_id": "{job}:training:0", "target_sub_job_ids": []},
        {"source_sub_job_id": "{job}:training:0", "target_sub_job_ids": "{job}:sampling:0"},
        {"source_sub_job_id": "{job}:training:0", "target_sub_job_ids": ["{job}:training:0"]},
        {"source_sub_job_id": "{job}:sampling:0", "target_sub_job_ids": ["{job}:sampling:0"]},
        {"source_sub_job_id": "{job}:training:0", "target_sub_job_ids": ["{job}:sampling:0"] * 2},
        {"source_sub_job_id": "{job}:training:0", "target_sub_job_ids": [["{job}:sampling:0"]]},
        {"source_sub_job_id": ["x"], "target_sub_job_ids": ["{job}:sampling:0"]},
        {"source_sub_job_id": "{job}:training:0", "target_sub_job_ids": ["{job}:sampling:0"], "weight_format": "gguf"},
        {"source_sub_job_id": "{job}:training:0", "target_sub_job_ids": ["{job}:sampling:0"], "weight_format": ["hf"]},
    ],
)
def test_bad_weight_syncs(caller: Caller, payload: dict[str, Any]) -> None:
    job = caller.running(training(), sampling())
    filled = json.loads(json.dumps(payload).replace("{job}", job.job_id))
    refused(job.operation("weight-sync", filled), 400)


@pytest.mark.parametrize(
    "body",
    [
        {"operation_type": "zmd-events"},
        {"operation_type": None},
        {"operation_type": ["tail-logs"]},
        {"operation_type": "tail-logs", "payload": []},
        {"operation_type": "tail-logs", "sub_job_id": 5},
        {"operation_type": "tail-logs", "sub_job_type": {}},
        {"operation_type": "tail-logs", "extra": 1},
        {"operation_type": "reset-prefix-cache", "payload": {"timeout_s": "soon"}},
    ],
)
def test_bad_operations(caller: Caller, body: dict[str, Any]) -> None:
    job = caller.running(training(), sampling())
    refused(job.call("POST", "/operation", json=body), 400)


@pytest.mark.parametrize(
    "frame",
    [
        b"x",
        b"\x00" * 8,
        b"\xff" * 64,
        b"\x80\x04\x95pickled",
        b"PK\x03\x04zip",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        wire.dumps({"a": 1})[:-1],
        b'{"prompts": 5',
    ],
)
def test_bad_frames(caller: Caller, frame: bytes) -> None:
    job = caller.running(training(), sampling())
    refused(job.post_frame(frame))
    refused(job.post_frame(frame, path="/generate"))
    refused(job.post_frame(b""))


def test_bad_response_options(job: RunningJob) -> None:
    for options in ("dssst1", {"format": "pickle"}, {"format": ["dssst1"]}):
        refused(job.post_frame(wire.dumps({"a": 1}, metadata={"response_options": options})))


def descriptor(**changes: Any) -> bytes:
    """A chunk frame with some fields of its descriptor changed or, when None, left out."""
    described: dict[str, Any] = {
        "chunk_idx": 0,
        "total_chunks": 1,
        "frame_sha256": "0" * 64,
        "frame_size_bytes": 10,
        "chunk_group_id": "g",
        "operation": "fwd-bwd",
        **changes,
    }
    kept = {name: value for name, value in described.items() if value is not None}
    return wire.dumps({"payload": token_batch(1, 2)}, metadata={"request_chunk": kept})


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"chunk_idx": None}, 400),
        ({"chunk_idx": -1}, 400),
        ({"chunk_idx": 1}, 400),
        ({"chunk_idx": True}, 400),
        ({"chunk_idx": "0"}, 400),
        ({"total_chunks": 0}, 400),
        ({"total_chunks": 10**9}, 400),
        ({"frame_sha256": "short"}, 400),
        ({"frame_sha256": 5}, 400),
        ({"frame_size_bytes": -1}, 400),
        ({"frame_size_bytes": 1 << 40}, 413),
        ({"chunk_group_id": None}, 400),
        ({"chunk_group_id": ""}, 400),
        ({"chunk_group_id": "g" * 257}, 400),
        ({"chunk_group_id": 5}, 400),
        ({"operation": 5}, 400),
        ({}, 400),
    ],
)
def test_bad_chunks(job: RunningJob, changes: dict[str, Any], status: int) -> None:
    refused(job.post_frame(descriptor(**changes)), status)


def test_result_chunks_are_no_requests(job: RunningJob) -> None:
    [chunk] = wire.encode_byte_chunks(masked_frame(token_batch()), kind="result", force_chunk=True)
    refused(job.post_frame(chunk))


def test_unknown_things_are_not_found(caller: Caller, job: RunningJob) -> None:
    for path in ("/no-such-job", "/..", "/%2e%2e", "/a%2fb", "/a%00b", "/no-such-job/requests/x", "//"):
        refused(caller.call("GET", path), 404)
    refused(caller.call("POST", "/no-such-job:cancel"), 404)
    refused(caller.call("POST", "/no-such-job/step", json={}), 404)
    refused(job.call("GET", "/requests/no-such-request"), 404)
    refused(job.call("GET", "/no-such-route"), 404)
    refused(job.call("DELETE", "/checkpoints/..%2f..%2fx"), 404)
    refused(job.call("POST", "/checkpoints/x:export"), 404)
    refused(job.call("PUT", ""), 405)
    refused(job.call("GET", "/step"), 405)
    for outside in ("/x", "/api/v2/statements", "/exports/x/y"):
        reply = requests.get(caller.url.partition("/api/")[0] + outside, timeout=60)
        refused(reply, 403, 404)


def test_content_types_and_sizes_are_checked(caller: Caller, job: RunningJob) -> None:
    refused(job.call("POST", "/step", data=b"{}", headers={"content-type": "text/plain"}), 415)
    refused(job.call("POST", "/forward-backward", data=b"{}", headers={"content-type": "text/plain"}), 415)
    refused(job.call("POST", "/step", data=b" " * (9 << 20), headers={"content-type": "application/json"}), 413)
    # A body of unknown length, so that only counting can tell.
    endless = (b" " * (1 << 20) for _ in range(70))
    # The service may hang up while the caller is still sending: also an answer.
    with contextlib.suppress(requests.ConnectionError):
        refused(job.call("POST", "/forward-backward", data=endless, headers=OCTETS), 413)
    assert job.step()["global_steps"] == 1


@pytest.mark.parametrize("nothing", [False, 0, "", [], {}])
def test_what_is_empty_is_not_what_is_absent(caller: Caller, nothing: Any) -> None:
    """A wrong value that Python takes for false must not become the default."""
    job = caller.running(training(), sampling())
    refused(job.call("POST", "/save", json={"checkpoint_type": nothing}), 400)
    sync = {"source_sub_job_id": f"{job.job_id}:training:0", "target_sub_job_ids": [f"{job.job_id}:sampling:0"]}
    refused(job.operation("weight-sync", {**sync, "weight_format": nothing}), 400)
    if nothing != {}:
        refused(job.call("POST", "/operation", json={"operation_type": "tail-logs", "payload": nothing}), 400)
        refused(job.call("POST", "/load", json={"checkpoint_id": nothing}), 400)


def test_only_this_machines_names_are_answered(caller: Caller) -> None:
    """A web page of another site whose name was made to point here gets nothing."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        refused(caller.call("GET", "", headers={"host": host}), 421)
    assert caller.call("GET", "", headers={"host": "localhost:1"}).status_code == 200


def test_a_token_is_asked_for_when_there_is_one(contrary_service: RunningService) -> None:
    caller = Caller(contrary_service.url)
    accepted = ("Bearer s3cret", "bearer s3cret", 'Snowflake Token="s3cret"')
    for header in accepted:
        assert caller.call("GET", "", headers={"authorization": header}).status_code == 200
    for header in (
        "Bearer other",
        "Bearer",
        "Basic czNjcmV0",
        'Snowflake Token="s3cret',
        "s3cret",
        "Bearer s3cret x",
        "ü",
    ):
        message = refused(caller.call("GET", "", headers={"authorization": header.encode()}), 401)
        assert "s3cret" not in message
    refused(caller.call("GET", ""), 401)


@pytest.mark.parametrize("tail", [":80/exports/?", ":80/?", ":80/openapi.json#", "/exports/?", "@127.0.0.1/exports/?"])
def test_a_host_cannot_stand_in_for_an_open_path(contrary_service: RunningService, tail: str) -> None:
    headers = {"host": "127.0.0.1" + tail}
    reply = requests.get(f"{contrary_service.url}/capacity", headers=headers, timeout=30)
    assert reply.status_code in (401, 421), reply.text


def test_half_open_connections_do_not_block_others(caller: Caller, local_service: RunningService) -> None:
    host, port = local_service.base_url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        for one in idle:
            one.sendall(b"POST /api HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")
        assert caller.call("GET", "").status_code == 200
    finally:
        for one in idle:
            one.close()
    assert caller.call("GET", "").status_code == 200


def test_thousands_of_connections_cost_little(start_local_service: ServiceFactory) -> None:
    """Half of them have sent a part of a request, the others nothing; everyone else is served as before."""
    service = start_local_service(simulate="0")
    host, port = service.base_url.removeprefix("http://").split(":")
    before = resident_bytes(service.pid)
    opened: list[socket.socket] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        for number in range(min(3000, hard - 500)):
            opened.append(socket.create_connection((host, int(port))))
            if number % 2:
                opened[-1].sendall(b"POST /api HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\nX: ")
        caller = Caller(service.url)
        job = caller.running()
        assert job.step()["global_steps"] == 1
        assert resident_bytes(service.pid) - before < 150 << 20
    finally:
        for one in opened:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caller.call("GET", "").status_code == 200


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("line", [b"X: " + b"x" * 1000 + b"\r\n", b"x" * 1000])
def test_headers_without_end_are_cut_off(
    start_local_service: ServiceFactory, tmp_path: Path, line: bytes, faults: bool
) -> None:
    rules = tmp_path / "faults.json"
    rules.write_text('{"rules": []}')
    service = start_local_service(simulate="0", **({"faults": rules} if faults else {}))
    host, port = service.base_url.removeprefix("http://").split(":")
    before, sent = resident_bytes(service.pid), 0
    with socket.create_connection((host, int(port)), timeout=30) as one, contextlib.suppress(ConnectionError):
        one.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + (b"" if line.endswith(b"\n") else b"X: "))
        while sent < 64 << 20:
            one.sendall(line * 64)
            sent += len(line) * 64
    assert sent < 64 << 20
    assert resident_bytes(service.pid) - before < 32 << 20
    assert requests.get(service.base_url + "/", timeout=30).status_code == 200


@pytest.mark.parametrize("together", ["one piece", "head apart", "body apart"])
def test_a_body_does_not_count_as_the_headers_behind_it(local_service: RunningService, together: str) -> None:
    """The next request's first line may come in one piece with the end of a body, or with all of the request."""
    host, port = local_service.base_url.removeprefix("http://").split(":")
    body = b"[" + b" " * 100_000 + b"]"
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    begun = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    pieces = {
        "one piece": [head + body + begun],
        "head apart": [head, body + begun],
        "body apart": [head + body, begun],
    }
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=30) as one:
            for piece in pieces[together]:
                one.sendall(piece)
                time.sleep(0.002)
            refusal = one.recv(1 << 16)
            one.sendall(b"Connection: close\r\n\r\n")
            answers = refusal + b"".join(iter(lambda: one.recv(1 << 16), b""))
        assert b"headers are longer" not in answers
        assert answers.count(b"HTTP/1.1 200 ") == 1


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_caller_that_goes_away_leaves_nothing(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    host, port = local_service.base_url.removeprefix("http://").split(":")
    [chunk] = chunks_of(masked_frame(token_batch()))
    path = f"{caller.url.removeprefix(local_service.base_url)}/{job.job_id}/forward-backward"
    with socket.create_connection((host, int(port))) as half:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\n"
        half.sendall(f"{head}Content-Length: {len(chunk)}\r\n\r\n".encode() + chunk[:100])
    assert job.step()["global_steps"] == 1
    assert [entry["op"] for entry in local_service.execution_log(job.job_id)] == ["step"]
