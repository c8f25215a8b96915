"""Bad nights: a run whose watch and prune are processes that get killed over and over while saves are written."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import pytest

from cortex_training.publication import Entry, PosixStore, PublicationLog, Store
from tests.publication.servers import put_save

KEEP = 2
SAVES_EACH = 5


def spawn(verb: str, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cortex_training.publication.command", verb, *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@dataclass
class Night:
    """One run on one root, and what happened to it."""

    store: Store
    flags: list[str]
    luck: random.Random
    printed: list[tuple[int, int]] = field(default_factory=list)
    killed: int = 0
    looks: int = 0
    faults: list[BaseException] = field(default_factory=list)

    @property
    def log(self) -> PublicationLog:
        return PublicationLog(self.store)

    def resolve(self) -> str:
        done = spawn("resolve", *self.flags)
        out, err = done.communicate(timeout=120)
        assert (done.returncode, err) == (0, "")
        return out.strip()

    def check(self, entry: Entry) -> None:
        """An entry that is the latest names a save that is whole."""
        self.looks += 1
        files = self.store.listing(entry.save).files
        assert files == ["optimizer.bin", "trainer_state.json", "weights.safetensors"], (entry, files)
        state = json.loads(self.store.read(f"{entry.save}/trainer_state.json"))
        assert state["global_step"] == entry.step
        assert len(state["log_history"]) == 500

    def look_until(self, done: threading.Event) -> None:
        """Whoever resumed at any of these moments would have found a whole save."""
        while not done.is_set():
            try:
                entries = self.log.entries()
                if entries:
                    self.check(entries[-1])
            except (AssertionError, FileNotFoundError) as fault:
                # Unless a prune took it because there are later ones by now.
                if self.log.latest() == entries[-1]:
                    self.faults.append(fault)
                    return

    def train(self, attempt: str, first: int) -> None:
        """Saves as a trainer writes them: files one after the other, the marker in pieces where that can be."""
        for step in range(first, first + SAVES_EACH):
            save = put_save(self.store, f"exec/{attempt}/checkpoint-{step}")
            self.store.write(f"{save}/optimizer.bin", b"moments")
            document = json.dumps({"global_step": step, "log_history": [{"loss": 1.5}] * 500}).encode()
            marker = f"{save}/trainer_state.json"
            if isinstance(self.store, PosixStore):
                with open(self.store.locate(marker), "wb", buffering=0) as file:
                    for start in range(0, len(document), 1000):
                        file.write(document[start : start + 1000])
                        time.sleep(0.001)
            else:
                self.store.write(marker, document)
            time.sleep(self.luck.uniform(0, 0.03))

    def kill_after(self, process: subprocess.Popen[str], lines: int) -> None:
        """Kill a process a moment after it wrote so many lines; right away when it has ended."""
        assert process.stdout is not None
        out = "".join(process.stdout.readline() for _ in range(lines))
        time.sleep(self.luck.uniform(0, 0.05))
        process.kill()
        out += process.communicate(timeout=60)[0]
        self.killed += process.returncode == -signal.SIGKILL
        self.read(out)

    def read(self, out: str) -> None:
        """Remember what was said to be published. A line that was cut off by a kill was not said."""
        for line in out.splitlines(keepends=True):
            if line.startswith("published ") and line.endswith("\n"):
                epoch, step = line.split()[1].split("-")[:2]
                self.printed.append((int(epoch), int(step)))


@pytest.fixture
def night(request: pytest.FixtureRequest) -> Night:
    store: Store = request.getfixturevalue(f"{request.param}_store")
    flags = ["-checkpoint", store.root]
    if request.param == "s3":
        flags += ["-creds", request.getfixturevalue("creds"), "-timeout", "60s"]
    return Night(store, flags, random.Random(request.param))


def watch_process(night: Night, epoch: int) -> subprocess.Popen[str]:
    where = ("-framework", "hf", "-interval", "0.02s", "-epoch", str(epoch), "-attempt", f"a-e{epoch}")
    return spawn("watch", *night.flags, *where)


@pytest.mark.parametrize(
    ("night", "executions"),
    [
        ("posix", 3),
        pytest.param("posix", 40, marks=pytest.mark.long),
        pytest.param("s3", 25, marks=pytest.mark.long),
    ],
    indirect=["night"],
)
def test_a_run_that_is_killed_again_and_again_goes_on_from_its_latest_save(night: Night, executions: int) -> None:
    step = 0
    latest = (0, 0)
    for epoch in range(1, executions + 1):
        found = night.resolve()
        entries = night.log.entries()
        assert found == (entries[-1].location if entries else "")
        if entries:
            step = entries[-1].step
            assert (entries[-1].epoch, step) >= max(latest, *night.printed), "what was published was lost"
            latest = (entries[-1].epoch, step)
        watch = watch_process(night, epoch)
        prune = spawn("prune", *night.flags, "-keep", str(KEEP))
        done = threading.Event()
        together = [
            threading.Thread(target=night.train, args=(f"a-e{epoch}", step + 1)),
            threading.Thread(target=night.kill_after, args=(prune, epoch % 3)),
            threading.Thread(target=night.look_until, args=(done,)),
        ]
        for thread in together:
            thread.start()
        night.kill_after(watch, night.luck.randint(0, SAVES_EACH))
        for thread in together[:2]:
            thread.join()
        done.set()
        together[2].join()
    assert night.faults == []

    # The last execution is left in peace.
    watch = watch_process(night, executions)
    night.train(f"a-e{executions}", step + 1 + SAVES_EACH)
    last = step + 2 * SAVES_EACH
    assert watch.stdout is not None
    while f"step {last}," not in (line := watch.stdout.readline()):
        assert line.startswith("published ")
    watch.send_signal(signal.SIGTERM)
    assert watch.communicate(timeout=120) == ("", "")
    assert watch.returncode == 0
    prune = spawn("prune", *night.flags, "-keep", str(KEEP))
    assert (prune.communicate(timeout=120)[1], prune.returncode) == ("", 0)
    assert [(entry.epoch, entry.step) for entry in night.log.entries()] == [(executions, last - 1), (executions, last)]
    for entry in night.log.entries():
        night.check(entry)
    print(f"\n{executions} executions, {night.killed} kills, {len(night.printed)} lines, {night.looks} looks")
