"""Both transports against a real server that misbehaves."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from cortex_training import wire
from cortex_training.errors import (
    ApiError,
    AuthError,
    ChunkGroupRestartError,
    ConfigurationError,
    ConflictError,
    DeadlineExceeded,
    NotFoundError,
    OutcomeUnknown,
    ProtocolError,
    RateLimitedError,
    SendRefused,
    ServiceError,
    TransportError,
)

FRAME = wire.dumps({"args": (), "kwargs": {"input_ids": np.arange(1000, dtype=np.int64)}})

AT_MOST_ONCE = {
    "step": lambda client, **options: client.step("j", 1e-4, **options),
    "save": lambda client, **options: client.save("j", **options),
    "load": lambda client, **options: client.load("j", "cp_1", **options),
    "generate": lambda client, **options: client.generate("j", ["hello"], **options),
    "generate-stream": lambda client, **options: client.generate_stream("j", ["hello"], **options),
    "forward": lambda client, **options: client.forward("j", {"x": 1}, **options),
}
IDEMPOTENT = {
    "forward-backward": lambda client, **options: client.forward_backward("j", FRAME, **options),
    "weight-sync": lambda client, **options: client.weight_sync("j", "j:training:0", ["j:sampling:0"], **options),
    "cancel": lambda client: client.cancel_job("j"),
    "export": lambda client: client.export_checkpoint("j", "cp_1"),
    "get": lambda client: client.get_job("j"),
    "list": lambda client: client.list_jobs(),
}


@pytest.fixture
def says(scripted: Any) -> Any:
    return scripted


@pytest.fixture
def closed_port() -> int:
    """A port of this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("name", AT_MOST_ONCE)
def test_a_reply_lost_after_execution_is_never_answered_by_executing_again(
    client: Any, weather: Any, says: Any, name: str
) -> None:
    weather.sequence(says.Drop(), says.Reply(body={"request_id": "second"}))
    with pytest.raises(OutcomeUnknown) as caught:
        AT_MOST_ONCE[name](client)
    assert len(weather.seen) == 1
    assert caught.value.operation == name
    assert caught.value.job_id == "j"


@pytest.mark.parametrize("name", AT_MOST_ONCE)
@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_an_ambiguous_answer_is_never_answered_by_executing_again(
    client: Any, weather: Any, says: Any, name: str, status: int
) -> None:
    weather.sequence(says.Reply(status, {"message": "upstream error"}))
    with pytest.raises(OutcomeUnknown, match=str(status)):
        AT_MOST_ONCE[name](client)
    assert len(weather.seen) == 1


@pytest.mark.parametrize("name", IDEMPOTENT)
def test_what_can_be_repeated_survives_drops_and_storms(client: Any, weather: Any, says: Any, name: str) -> None:
    weather.sequence(says.Drop(), says.Reply(503), says.Reply(502), says.Reply(body={"request_id": "r", "jobs": []}))
    IDEMPOTENT[name](client)
    assert len(weather.seen) == 4
    assert len({seen.body for seen in weather.seen}) == 1


@pytest.mark.parametrize("name", AT_MOST_ONCE)
def test_a_step_that_was_turned_away_is_sent_again(client: Any, weather: Any, says: Any, name: str) -> None:
    weather.sequence(
        says.Reply(429, {"message": "slow down"}, {"Retry-After": "0"}),
        says.Reply(503, {"message": "request was throttled"}),
        says.Reply(body={"request_id": "r"}),
    )
    assert "r" in str(AT_MOST_ONCE[name](client))
    assert len(weather.seen) == 3


def test_a_service_that_cannot_be_reached_provably_got_nothing(clients: Any, closed_port: int) -> None:
    client = clients(f"http://127.0.0.1:{closed_port}", retry_budget_s=0.3)
    with pytest.raises(TransportError) as caught:
        client.step("j")
    assert caught.value.sent is False


def test_a_host_that_does_not_exist_provably_got_nothing(clients: Any) -> None:
    client = clients("http://no-such-host.invalid", retry_budget_s=0.0)
    with pytest.raises(TransportError) as caught:
        client.step("j")
    assert caught.value.sent is False


def test_a_server_without_tls_provably_got_nothing(clients: Any, weather: Any) -> None:
    client = clients(weather.url.replace("http://", "https://"), retry_budget_s=0.0)
    with pytest.raises(TransportError) as caught:
        client.step("j")
    assert caught.value.sent is False
    assert weather.seen == []


def test_a_service_that_comes_back_is_reached(clients: Any, closed_port: int, says: Any) -> None:
    client = clients(f"http://127.0.0.1:{closed_port}", retry_budget_s=20.0)

    def come_back() -> None:
        time.sleep(0.6)
        server = says.Weather(port=closed_port)
        server.sequence(says.Reply(body={"request_id": "r"}))
        servers.append(server)

    servers: list[Any] = []
    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        assert client.step("j") == "r"
    finally:
        thread.join()
        servers[0].stop()


def test_a_hanging_service_does_not_block_a_wait_beyond_its_deadline(clients: Any, weather: Any, says: Any) -> None:
    client = clients(weather.url)
    weather.sequence(says.Hang())
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.poll_request("j", "r", timeout_s=1.0)
    assert time.monotonic() - began < 20


def test_a_hanging_service_times_out_a_single_call(clients: Any, weather: Any, says: Any) -> None:
    client = clients(weather.url, request_timeout=(2.0, 0.4), retry_budget_s=0.0)
    weather.sequence(says.Hang())
    with pytest.raises(OutcomeUnknown):
        client.step("j")
    with pytest.raises(TransportError) as caught:
        client.get_job("j")
    assert caught.value.sent is None


def test_an_answer_that_trickles_for_ever_is_cut_off(clients: Any, weather: Any, says: Any) -> None:
    client = clients(weather.url)
    weather.sequence(says.Trickle())
    with pytest.raises(DeadlineExceeded):
        client.poll_request("j", "r", timeout_s=1.0)


def test_an_answer_cut_off_in_the_middle_is_a_lost_answer(client: Any, weather: Any, says: Any) -> None:
    cut = says.Reply(body={"request_id": "r"}, truncated=True)
    weather.sequence(cut)
    with pytest.raises(OutcomeUnknown):
        client.step("j")
    weather.sequence(cut, says.Reply(body={"status": "running"}))
    assert client.get_job("j") == {"status": "running"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_never_followed(client: Any, weather: Any, says: Any, status: int) -> None:
    weather.sequence(says.Reply(status, b"", {"Location": f"{weather.url}/elsewhere"}))
    with pytest.raises(ApiError, match="Redirects are never followed") as caught:
        client.step("j")
    assert caught.value.status == status
    assert [seen.method for seen in weather.seen] == ["POST"]


def test_html_in_place_of_an_answer_is_a_protocol_error(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(200, b"<html>Please sign in</html>", {"Content-Type": "text/html"}))
    with pytest.raises(ProtocolError, match="Please sign in"):
        client.get_job("j")
    with pytest.raises(OutcomeUnknown):
        client.step("j")


def test_a_rate_limit_beyond_the_budget_is_an_error_without_waiting(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(429, {"message": "quota"}, {"Retry-After": "120"}))
    with pytest.raises(RateLimitedError, match="quota"):
        client.step("j")
    assert len(weather.seen) == 1


@pytest.mark.parametrize("call", ["get_job", "cancel_job", "step", "list_checkpoints"])
def test_a_mistyped_id_fails_at_once(client: Any, weather: Any, says: Any, call: str) -> None:
    weather.sequence(says.Reply(404, {"message": "no such job"}, {"x-snowflake-request-id": "req-9"}))
    with pytest.raises(NotFoundError) as caught:
        getattr(client, call)("mistyped")
    assert len(weather.seen) == 1
    assert caught.value.request_id == "req-9"
    assert caught.value.response.status_code == 404


def test_a_terminal_conflict_is_an_error_at_once(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(409, {"message": "job is terminated"}))
    with pytest.raises(ConflictError, match="job is terminated"):
        client.cancel_job("j")
    assert len(weather.seen) == 1


def test_a_storm_that_does_not_end_is_an_error_after_the_budget(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(503, {"message": "storm"}))
    with pytest.raises(ServiceError, match="storm"):
        client.get_job("j")
    assert 2 < len(weather.seen) < 15


def test_a_frame_larger_than_the_limit_goes_in_chunks_under_one_id(client: Any, weather: Any, says: Any) -> None:
    frame = wire.dumps({"args": (), "kwargs": {"x": np.zeros(62 * 1024 * 1024, dtype=np.uint8)}})
    weather.script = lambda seen: says.Reply(body={"request_id": "r"} if _chunk(seen)["chunk_idx"] else {"ok": 1})
    asked: list[int] = []
    assert client.forward_backward("j", frame, chunk_group_id="g", permit=lambda: asked.append(1)) == "r"
    assert [_chunk(seen)["chunk_idx"] for seen in weather.seen] == [0, 1]
    assert wire.decode_byte_chunks([seen.body for seen in weather.seen], kind="request") == frame
    assert len(asked) == 2


def _chunk(seen: Any) -> dict[str, Any]:
    return wire.read_byte_chunk_metadata(seen.body) or {}


def test_a_restart_of_the_workers_replays_the_same_bytes_once(client: Any, weather: Any, says: Any) -> None:
    restart = says.Reply(409, {"detail": {"code": "chunk_group_restart_required", "message": "from chunk 0"}})
    weather.sequence(restart, says.Reply(body={"request_id": "r"}))
    assert client.forward_backward("j", FRAME, chunk_group_id="g") == "r"
    assert weather.seen[0].body == weather.seen[1].body
    weather.sequence(restart)
    with pytest.raises(ChunkGroupRestartError):
        client.forward_backward("j", FRAME, chunk_group_id="g")


@pytest.mark.parametrize("name", ["step", "save", "load", "generate", "forward", "forward-backward", "weight-sync"])
def test_a_refused_permit_means_that_nothing_reached_the_service(
    client: Any, weather: Any, says: Any, name: str
) -> None:
    def refuse() -> None:
        raise SendRefused("another driver owns the run")

    weather.sequence(says.Reply(body={"request_id": "r"}))
    with pytest.raises(SendRefused, match="another driver"):
        {**AT_MOST_ONCE, **IDEMPOTENT}[name](client, permit=refuse)
    assert weather.seen == []


def test_a_permit_may_raise_what_it_likes(client: Any, weather: Any) -> None:
    for refusal in (DeadlineExceeded("the sending window is over"), ConnectionError("mine"), KeyError("mine")):

        def refuse(refusal: Exception = refusal) -> None:
            raise refusal

        with pytest.raises(type(refusal)) as caught:
            client.step("j", permit=refuse)
        assert caught.value is refusal
    assert weather.seen == []


def test_a_permit_is_asked_once_per_attempt_and_only_when_there_is_a_connection(
    clients: Any, client: Any, weather: Any, says: Any, closed_port: int
) -> None:
    asked: list[int] = []
    weather.sequence(says.Reply(429, {}, {"Retry-After": "0"}), says.Reply(body={"request_id": "r"}))
    client.step("j", permit=lambda: asked.append(1))
    assert len(asked) == 2
    with pytest.raises(TransportError):
        clients(f"http://127.0.0.1:{closed_port}", retry_budget_s=0.0).step("j", permit=lambda: asked.append(1))
    assert len(asked) == 2


def test_a_connection_works_on_after_a_refused_permit(client: Any, weather: Any, says: Any) -> None:
    def refuse() -> None:
        raise SendRefused("no")

    weather.sequence(says.Reply(body={"request_id": "r"}))
    assert client.step("j") == "r"
    with pytest.raises(SendRefused):
        client.step("j", permit=refuse)
    assert client.step("j") == "r"
    assert len(weather.seen) == 2


def test_an_id_stays_one_path_segment_on_the_wire(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"jobs": []}))
    for job_id in ("a?x=1", "a#b", "../x", "a%2Fb", "a b", "j:training:0"):
        client.get_job(job_id)
    assert [seen.path for seen in weather.seen] == [
        "/a%3Fx%3D1",
        "/a%23b",
        "/..%2Fx",
        "/a%252Fb",
        "/a%20b",
        "/j%3Atraining%3A0",
    ]
    client.list_jobs("a&b=c+d")
    assert weather.seen[-1].query == {"status": ["a&b=c+d"]}


def test_requests_look_as_the_service_expects(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"request_id": "r"}))
    client.step("j")
    client.cancel_job("j")
    client.forward_backward("j", FRAME)
    step, cancel, batch = weather.seen
    assert step.headers["content-type"] == "application/json"
    assert step.headers["user-agent"].startswith("cortex-training-client/")
    assert step.headers["accept"] == "application/json"
    assert step.headers["content-length"] == "2"
    assert "transfer-encoding" not in step.headers
    assert cancel.headers["content-length"] == "0"
    assert batch.headers["content-type"] == "application/octet-stream"
    assert "authorization" not in step.headers


def test_a_large_compressed_answer_is_read_whole(client: Any, weather: Any, says: Any) -> None:
    import gzip

    body = gzip.compress(json.dumps({"status": "running", "padding": "x" * 3_000_000}).encode())
    weather.sequence(says.Reply(200, body, {"Content-Encoding": "gzip"}))
    assert len(client.get_job("j")["padding"]) == 3_000_000


def test_connections_are_kept_and_closed_ones_opened_anew(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"status": "running"}))
    client.get_job("j")
    client.get_job("j")
    assert len({seen.connection for seen in weather.seen}) == 1
    weather.hang_up()
    weather.sequence(says.Reply(body={"request_id": "r"}))
    assert client.step("j") == "r"


def test_bad_settings_are_refused_by_name(clients: Any) -> None:
    for options in (
        {"poll_interval": 0},
        {"poll_interval": float("nan")},
        {"poll_timeout": 0},
        {"poll_backoff_multiplier": 0.5},
        {"poll_interval": 2.0, "poll_max_interval": 1.0},
        {"pool_maxsize": 0},
        {"max_retries": -1},
        {"retry_budget_s": -1},
        {"request_timeout": 0},
        {"request_timeout": True},
        {"request_timeout": "30"},
        {"request_timeout": (1, 2, 3)},
        {"request_timeout": (1, float("inf"))},
        {"verify_ssl": "/path/to/ca.pem"},
        {"ca_bundle": "/does/not/exist.pem"},
        {"proxy": "socks5://x"},
        {"token_prompts": "numpy"},
    ):
        with pytest.raises(ConfigurationError) as caught:
            clients("http://127.0.0.1:1", **options)
        assert caught.value.field in options or next(iter(options)) in str(caught.value)


@pytest.mark.parametrize(
    "base_url",
    ["", "127.0.0.1", "ftp://host", "http://", "http://user:secret@host", "http://host?x=1", "http://host:port", None],
)
def test_a_bad_address_is_refused_without_showing_its_secret(clients: Any, base_url: Any) -> None:
    with pytest.raises(ConfigurationError, match="base_url") as caught:
        clients(base_url)
    assert "secret" not in str(caught.value)


def test_a_wrong_credential_is_an_error_that_does_not_show_it(clients: Any, weather: Any, says: Any) -> None:
    weather.script = lambda seen: says.Reply(401, {"code": "390144", "message": f"bad {seen.headers['authorization']}"})
    client = clients.from_pat(weather.url)
    with pytest.raises(AuthError) as caught:
        client.get_job("j")
    assert caught.value.code == "390144"
    assert "secret-token-value" not in f"{caught.value}{caught.value.__dict__}{caught.value.response.text}"
    assert "network policy" in str(caught.value)
    assert len(weather.seen) == 1
