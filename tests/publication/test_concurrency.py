"""Writers on one root at the same time: of those that want one name, exactly one gets it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from cortex_training.publication import (
    FRAMEWORKS,
    Entry,
    PosixStore,
    PublicationLog,
    SaveGone,
    Store,
    Watch,
    open_store,
    prune,
)
from tests.publication.servers import put_save

WRITERS = 8
# Fresh interpreters: a fork of a test process with threads may hang.
SPAWN = multiprocessing.get_context("spawn")

Opening = tuple[str, str | None]


@pytest.fixture(params=["posix", "s3"])
def opening(request: pytest.FixtureRequest) -> Opening:
    """How another process opens a root of each kind."""
    store: Store = request.getfixturevalue(f"{request.param}_store")
    return store.root, request.getfixturevalue("creds") if request.param == "s3" else None


def open_root(opening: Opening) -> Store:
    root, creds = opening
    return PosixStore(root) if creds is None else open_store(root, creds, timeout_s=60)


def race_creates(opening: Opening, rounds: int, writer: int, wins: Any, start: Any) -> None:
    store = open_root(opening)
    start.wait()
    won = []
    for number in range(rounds):
        token = f"{writer}-{secrets.token_hex(4)}".encode()
        if store.create(f"journal/{number:020d}", token):
            won.append((number, token))
    wins.put((writer, won))


def claim_epochs(opening: Opening, rounds: int, writer: int, wins: Any, start: Any) -> None:
    log = PublicationLog(open_root(opening))
    start.wait()
    wins.put((writer, [(log.claim_epoch({"writer": writer}).number, b"") for _ in range(rounds)]))


def in_processes(work: Any, opening: Opening, rounds: int) -> dict[int, list[tuple[int, bytes]]]:
    wins, start = SPAWN.Queue(), SPAWN.Barrier(WRITERS)
    writers = [SPAWN.Process(target=work, args=(opening, rounds, number, wins, start)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    try:
        return dict(wins.get(timeout=240) for _ in writers)
    finally:
        for writer in writers:
            writer.join(20)
            if writer.is_alive():
                writer.kill()


def in_threads(work: Any, opening: Opening, rounds: int) -> dict[int, list[tuple[int, bytes]]]:
    """Each with a connection of its own; the server can't tell them from processes, and they start sooner."""
    wins: queue.Queue[tuple[int, list[tuple[int, bytes]]]] = queue.Queue()
    start = threading.Barrier(WRITERS)
    together([functools.partial(work, opening, rounds, number, wins, start) for number in range(WRITERS)])
    return dict(wins.get() for _ in range(WRITERS))


def check_one_winner_each(wins: dict[int, list[tuple[int, bytes]]], opening: Opening, rounds: int) -> None:
    owners = Counter(number for won in wins.values() for number, _ in won)
    assert owners == dict.fromkeys(range(rounds), 1)
    store = open_root(opening)
    for won in wins.values():
        for number, token in won:
            assert store.read(f"journal/{number:020d}") == token


def test_each_record_has_one_writer_of_eight_processes(posix_store: PosixStore) -> None:
    opening = (posix_store.root, None)
    check_one_winner_each(in_processes(race_creates, opening, 200), opening, 200)


def test_each_record_has_one_writer_on_s3(s3_root: str, creds: str) -> None:
    opening = (s3_root, creds)
    check_one_winner_each(in_threads(race_creates, opening, 25), opening, 25)


@pytest.mark.long
def test_each_record_has_one_writer_of_eight_processes_in_200_rounds_on_s3(s3_root: str, creds: str) -> None:
    opening = (s3_root, creds)
    check_one_winner_each(in_processes(race_creates, opening, 200), opening, 200)


def test_epochs_are_claimed_once_and_rise_for_every_driver(opening: Opening) -> None:
    rounds = 4
    wins = in_threads(claim_epochs, opening, rounds)
    numbers = {writer: [number for number, _ in won] for writer, won in wins.items()}
    assert all(claimed == sorted(set(claimed)) for claimed in numbers.values())
    everything = sorted(number for claimed in numbers.values() for number in claimed)
    assert everything == list(range(1, WRITERS * rounds + 1))


def together(work: Iterable[Any]) -> None:
    """Run functions at once; the first fault of any is raised."""
    faults: list[BaseException] = []

    def guarded(function: Any) -> None:
        try:
            function()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def test_two_publishers_of_one_entry(store: Store) -> None:
    log = PublicationLog(store)
    results: list[tuple[Entry, bool]] = []
    for step in range(10):
        save = put_save(store, f"exec/a/{step}")
        together([lambda save=save, step=step: results.append(log.publish(save, 1, step))] * 2)
    assert Counter(entry.step for entry, created in results if created) == dict.fromkeys(range(10), 1)
    assert len(results) == 20


def test_two_epochs_interleaving_never_go_back(store: Store) -> None:
    """An old driver that will not die keeps publishing; nobody ever resumes from it once the new one has published."""
    log = PublicationLog(store)
    old, new = log.claim_epoch().number, log.claim_epoch().number
    for step in range(1, 13):
        put_save(store, f"exec/old/{step}")
        put_save(store, f"exec/new/{step}")
    log.publish("exec/new/1", new, 1)
    seen: list[tuple[int, int]] = []
    done = threading.Event()

    def publish(name: str, epoch: int) -> None:
        for step in range(1, 13):
            log.publish(f"exec/{name}/{step}", epoch, step)

    def look() -> None:
        while not done.is_set():
            latest = log.latest()
            assert latest is not None
            seen.append((latest.epoch, latest.step))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        together([lambda: publish("old", old), lambda: publish("new", new)])
    finally:
        done.set()
        looker.join()
    assert seen == sorted(seen)
    assert {epoch for epoch, _ in seen} == {new}


def test_a_watch_and_a_prune_side_by_side(store: Store) -> None:
    """Saves appear, are published and pruned; whoever resolves finds a save that is there and whole."""
    log = PublicationLog(store)
    steps = 14
    stop = threading.Event()

    def train() -> None:
        for step in range(1, steps + 1):
            save = put_save(store, f"exec/a/checkpoint-{step}")
            store.write(f"{save}/trainer_state.json", b'{"global_step": %d}' % step)
            time.sleep(random.uniform(0, 0.01))
        stop.set()

    def watch() -> None:
        Watch(log, FRAMEWORKS["hf"], "exec/a", 1).run(stop.wait, lambda entry: None, interval_s=0.001)

    def restarted_watches() -> None:
        # Each forgets what it published, as a watch does that was killed, and offers doomed saves again.
        while not stop.is_set():
            Watch(log, FRAMEWORKS["hf"], "exec/a", 1).scan(lambda entry: None)

    def pruning() -> None:
        while not stop.is_set():
            prune(log, 2)

    def resolve() -> None:
        last = 0
        while not stop.is_set():
            latest = log.latest()
            if latest is not None:
                assert latest.step >= last
                last = latest.step

    together([train, watch, restarted_watches, pruning, resolve])
    Watch(log, FRAMEWORKS["hf"], "exec/a", 1).scan(lambda entry: None)
    prune(log, 2)
    entries = log.entries()
    assert [entry.step for entry in entries] == [steps - 1, steps]
    for entry in entries:
        assert store.listing(entry.save).files == ["trainer_state.json", "weights.safetensors"]


def test_publishers_against_a_prune_of_the_same_saves(store: Store) -> None:
    """Whatever the order, in the end every entry has its save."""
    log = PublicationLog(store)
    log.publish(put_save(store, "exec/z"), 99, 1)
    for round_number in range(12):
        save = put_save(store, f"exec/a/{round_number}")
        log.publish(save, 1, round_number)

        def again(save: str = save, step: int = round_number) -> None:
            with contextlib.suppress(SaveGone):
                log.publish(save, 2, step)

        together([again, lambda: prune(log, 1)])
        for entry in log.entries():
            assert store.holds_save(entry.save), entry
