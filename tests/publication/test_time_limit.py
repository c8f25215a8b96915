"""``-timeout`` ends work wherever it is, also where every single read comes in time."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cortex_training.publication import PublicationLog, Store, StoreError, prune
from cortex_training.publication.command import main
from cortex_training.publication.time_limit import OutOfTime, time_limit
from tests.publication.servers import FaultProxy, S3Server, put_save, serving, trickle, write_secret


@pytest.fixture
def rung() -> Iterator[tuple[list[float], Callable[[], None]]]:
    """What makes a running limit of minutes pass within moments, and the seconds it had left then."""
    left: list[float] = []

    def ring() -> None:
        left.append(signal.setitimer(signal.ITIMER_REAL, 0.1)[0])

    before = signal.setitimer(signal.ITIMER_REAL, 0)
    yield left, ring
    signal.setitimer(signal.ITIMER_REAL, *before)


def published_save(store: Store, step: int = 1) -> str:
    save = put_save(store, f"exec/a/checkpoint-{step}")
    store.write(f"{save}/trainer_state.json", json.dumps({"global_step": step}).encode())
    PublicationLog(store).publish(save, 1, step)
    return save


@pytest.mark.parametrize(
    ("argv", "method", "part", "said"),
    [
        (["resolve"], "GET", "list-type=2", "store: resolve s3://"),
        (["prune", "-keep", "1"], "DELETE", "/pub/", "store: prune s3://"),
        (["publish", "-epoch", "2", "{save}", "7"], "PUT", "/pub/", "store: publish s3://"),
        (["watch", "-framework", "hf", "-epoch", "2", "-attempt", "a"], "GET", "trainer_state", "store: watch s3://"),
        (["probe"], "GET", ".cortex-probe-", "store: probe: read: "),
        (["resolve", "-probe"], "GET", ".cortex-probe-", "store: probe: read: "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_reply_that_trickles_in_is_ended(
    s3_server: S3Server,
    s3_store: Store,
    faults: FaultProxy,
    faulty_creds: str,
    rung: tuple[list[float], Callable[[], None]],
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    method: str,
    part: str,
    said: str,
) -> None:
    save = published_save(s3_store)
    published_save(s3_store, 2)
    left, faults.trickling = rung
    faults.spoil(method, part, "trickle")
    verb, *rest = (text.format(save=s3_store.locate(save)) for text in argv)
    status = main([verb, "-checkpoint", s3_store.root, "-creds", faulty_creds, "-timeout", "10m", *rest])
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert f"publish: {said}" in err
    assert len(left) == 1
    assert 0 < left[0] <= 600
    if verb == "probe":
        bucket = s3_store.root.split("/")[2]
        keys = [item["Key"] for item in s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]]
        assert [key for key in keys if "probe" in key] == []


class TricklingVault(BaseHTTPRequestHandler):
    trickling: Callable[[], None]

    def do_POST(self) -> None:
        trickle(self, type(self).trickling)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    "verb", [["resolve"], ["watch", "-framework", "hf", "-attempt", "a"]], ids=["resolve", "watch"]
)
def test_so_is_a_login(
    tmp_path: Path,
    rung: tuple[list[float], Callable[[], None]],
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
) -> None:
    left, ring = rung
    write_secret(tmp_path / "approle", role_id="r", secret_id="hush-hush")
    with serving(type("Handler", (TricklingVault,), {"trickling": staticmethod(ring)})) as port:
        source = f"vault:http://127.0.0.1:{port}/s3?auth=approle&approle={tmp_path}/approle"
        name, *rest = verb
        assert main([name, "-checkpoint", "s3://bucket/x", "-creds", source, "-timeout", "10m", *rest]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"publish: credentials: {source}: no answer from the sources within 600 s" in err
    assert len(left) == 1
    assert 0 < left[0] <= 600


def test_nothing_is_sent_after_the_limit(faults: FaultProxy, faulty_store: Store) -> None:
    """A prune is many requests, none of which need fail for the limit to be over."""
    log = PublicationLog(faulty_store.until(time.monotonic() - 1))
    for operation in (log.latest, lambda: log.publish("exec/a/1", 1, 1), lambda: prune(log)):
        with pytest.raises(StoreError, match="not sent, as the time limit has passed"):
            operation()
    assert faults.seen == []


def test_a_limit_comes_again_when_it_got_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex_training.publication.time_limit._AGAIN_S", 0.01)
    rings = 0
    with pytest.raises(OutOfTime), time_limit(0.01):  # noqa: PT012
        while rings < 3:
            try:
                time.sleep(60)
            except OutOfTime:
                rings += 1
        time.sleep(60)
    assert rings == 3


@pytest.fixture
def outer_timer() -> Iterator[None]:
    """A timer somebody else set: a test runner's, here an hour."""
    before = signal.setitimer(signal.ITIMER_REAL, 3600)
    yield
    signal.setitimer(signal.ITIMER_REAL, *before)


def test_a_timer_that_was_set_before_goes_on(outer_timer: None) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with time_limit(60):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        with time_limit(math.inf):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 60
    assert signal.getsignal(signal.SIGALRM) == handler


def test_in_another_thread_there_is_none() -> None:
    done: list[bool] = []

    def work() -> None:
        with time_limit(1e-6):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
