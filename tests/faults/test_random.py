"""Nights with several misfortunes at once, drawn from a seed; ``FAULT_SCHEDULES=100 FAULT_SEED=1`` says which."""

import os
import random
import signal
import time
from dataclasses import replace

import pytest
import requests

from tests.faults.driver import DISK_FULL, FREEZE, KILL, POWER, TERMINATE, WRITE_FAILS, Hit, Orders
from tests.faults.harness import wait_until_frozen, wake
from tests.faults.oracle import ENDED, Wrong
from tests.faults.points import MAY_STILL_COME, POINTS, RECOVERY_POINTS, STEPS_OF
from tests.faults.proxy import ANSWER, DROP_AFTER, DROP_BEFORE, LATE, TWICE
from tests.faults.test_network import BATCH, CANCEL, CREATE, POLL, SAVE, STEP, cancel_a_batch

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

FIRST_SEED = int(os.environ.get("FAULT_SEED", "1"))
SENDS = "^POST .*/(forward-backward|step|save|weight-sync)$"
# Batches and weight syncs renew their window, so a driver that wakes up there is stopped by its renewal, too.
HELD_BY_THE_WINDOW = ["before send step", "before send save"]
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("FAULT_SCHEDULES", "100")))


class Night:
    """What a seed means: what happens to each driver, to the network, to the job and to the service's workers."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.chance = chance
        self.hits = [self._hit() for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 4]))]
        self.rules = [self._rule() for _ in range(chance.choice([0, 0, 1, 2, 3, 4]))]
        self.cancels_a_batch = chance.random() < 0.1
        self.loses_the_job_after = chance.randrange(4) if chance.random() < 0.15 else None
        self.weather = [self._weather() for _ in range(chance.choice([0, 0, 0, 1, 1, 2]))]
        self.sends_chunks = chance.random() < 0.15
        # Drawn apart, so that everything else stays what the seed has always meant.
        self.power = random.Random(f"power {seed}")
        self.loses_power = self.power.random() < 0.3
        if self.loses_power:
            self.hits = [self._with_power(hit) for hit in self.hits]
        self.keeps_some = self.power.random() < 0.5
        sleep = random.Random(f"sleep {seed}")
        if sleep.random() < 0.1:
            # Few of the places drawn above are one where nothing but the window holds a driver back that wakes up.
            point = sleep.choice(HELD_BY_THE_WINDOW)
            self.hits.insert(0, Hit(point, sleep.choice(STEPS_OF[point]), FREEZE))
        if self.doubled:
            # A step that the network repeats and a next one that it loses make up for each other in the only thing
            # that tells how many there were, the service's count.
            self.rules = [rule for rule in self.rules if not may_lose_a_step(rule)]
            self.hits = [hit for hit in self.hits if hit.point not in MAY_STILL_COME]

    @property
    def doubled(self):
        return sum(fields["times"] for pattern, action, fields in self.rules if (pattern, action) == (STEP, TWICE))

    def _hit(self):
        point = self.chance.choice([*POINTS, *RECOVERY_POINTS])
        step = self.chance.choice(STEPS_OF.get(point, range(1, 6)))
        action = self.chance.choice([KILL] * 8 + [TERMINATE] * 3 + [FREEZE] * 3 + [DISK_FULL, WRITE_FAILS])
        return Hit(point, step, action, self.chance.choice([1, 1, 1, 2]))

    def _with_power(self, hit):
        """A driver that dies takes the power with it, as a rule, and half of its writes are struck in the middle."""
        stage, _, what = hit.point.partition(" ")
        if stage in ("before", "after") and not what.startswith("send ") and self.power.random() < 0.5:
            hit = replace(hit, point=f"placed {what}")
        return replace(hit, action=POWER) if hit.action == KILL and self.power.random() < 0.7 else hit

    def _rule(self):
        pattern = self.chance.choice([STEP, STEP, BATCH, BATCH, SAVE, SAVE, CREATE, POLL, CANCEL])
        action = self.chance.choice([DROP_BEFORE, DROP_AFTER, TWICE, LATE, ANSWER])
        fields = {
            "skip": self.chance.randrange(2 if pattern in (CREATE, CANCEL) else 6),
            "times": self.chance.choice([1, 1, 2]),
            "status": self.chance.choice([429, 502, 503]),
            "delay_s": self.chance.choice([0.2, 1.0, 3.0]),
        }
        return pattern, action, fields

    def _weather(self):
        """A rule of the service's own. What it has to say is true: a batch that it calls failed left no gradient."""
        fail_batch = {"action": "fail-request", "on": "forward-backward", "error": "out of memory"}
        fail_step = {"action": "fail-request", "on": "step", "when": self.chance.choice(["before", "executed"])}
        where = {"on": self.chance.choice(["forward-backward", "step", "save"]), "when": "executed"}
        fail_job = {"action": "fail-job", **where, "state": self.chance.choice(["failed", "terminated"])}
        slow = {"action": "slow-operation", "on": where["on"], "seconds": self.chance.choice([0.5, 1.5])}
        forget = {"action": "forget-groups", "on": "forward-backward", "groups": "partial"}
        slow_cancel = {"action": "slow-cancel", "on": "step", "seconds": 1}
        # Longer than any driver is away: a restart that nobody is there to see can't be told from none.
        restart = {"action": "restart-worker", "on": "forward-backward", "when": "executed", "seconds": 600}
        restart |= {"loses": self.chance.choice(["gradients", "groups", "both"])}
        restart |= {"requests": self.chance.choice(["kept", "failed"])}
        chosen = self.chance.choice([fail_batch, fail_step, fail_job, slow, forget, slow_cancel, restart, restart])
        return {**chosen, "skip": self.chance.randrange(8)}

    def __repr__(self):
        happens = f"batch={self.cancels_a_batch} job={self.loses_the_job_after} chunks={self.sends_chunks}"
        if self.loses_power:
            happens += f" keeps_some={self.keeps_some}"
        return f"{self.hits} {self.rules} {self.weather} {happens}"


def may_lose_a_step(rule):
    pattern, action, _ = rule
    return pattern == STEP and action in (DROP_BEFORE, LATE, ANSWER)


def lose_the_job(scene):
    segments = scene.evidence.segments if (scene.root / "journal").exists() else []
    if segments:
        url = f"{scene.service.url}/{segments[-1].job_id}"
        if requests.get(url, timeout=30).json().get("status") not in (None, *ENDED):
            requests.post(f"{url}:cancel", timeout=30)


class Sleeper:
    """A driver that was frozen at a crash point."""

    def __init__(self, scene, hit, process):
        self.scene, self.hit, self.process = scene, hit, process
        self.since = time.monotonic()
        self.known = len(self._records())

    def wake_up(self):
        """Let it end; one that lost the run, and its permission with it, must not send what it was about to send."""
        lost_permission = self._lost_permission()
        sent = self.scene.proxy.count(SENDS)
        wake(self.process)
        self.scene.wait(self.process)
        if lost_permission and self.scene.proxy.count(SENDS) != sent:
            raise Wrong(f"a driver that slept at {self.hit.point!r} while another took the run over sent it afterwards")

    def _lost_permission(self):
        records = self._records()
        superseded = any(record["type"] == "takeover" for record in records[self.known :])
        intents = [record for record in records[: self.known] if record["type"] == "intent"]
        window_s = intents[-1].get("window_s", Orders.window_s) if intents else 0.0
        asked_later = self.hit.point.startswith(("placed record intent", "after record intent", "before send"))
        return superseded and asked_later and time.monotonic() - self.since > window_s

    def _records(self):
        return self.scene.evidence.records if (self.scene.root / "journal").exists() else []


def live_through(scene, seed):
    """Let the night of a seed come over a run, and finish it; the judge looks after every driver."""
    night = Night(seed)
    print(f"seed {seed}: {night}")
    scene.doubled = night.doubled
    for pattern, action, fields in night.rules:
        scene.proxy.add(pattern, action, **fields)
    if night.weather:
        scene.control.add_all(night.weather)
    if night.loses_power:
        scene.watch_the_disk(night.power if night.keeps_some else None)
    if night.sends_chunks:
        scene.chunk_payload_bytes = 3000
    if night.cancels_a_batch:
        cancel_a_batch(scene, skip=night.chance.randrange(8))
    started, asleep = [], []
    try:
        for number, hit in enumerate(night.hits):
            process = scene.start(hit)
            started.append(process)
            if hit.action == FREEZE and wait_until_frozen(process, scene.patience_s):
                asleep.append(Sleeper(scene, hit, process))
            elif scene.wait(process).code == -signal.SIGKILL and hit.action == POWER:
                while asleep:
                    asleep.pop().process.kill()
            if number == night.loses_the_job_after:
                lose_the_job(scene)
            if asleep and night.chance.random() < 0.4:
                asleep.pop().wake_up()
        scene.finish()
        while asleep:
            asleep.pop(0).wake_up()
    finally:
        for process in started:
            process.kill()
    scene.finish()


@pytest.mark.parametrize("seed", [849, 884])
def test_no_night_repeats_a_step_and_may_lose_the_next(seed):
    night = Night(seed)
    assert night.doubled
    assert not any(may_lose_a_step(rule) for rule in night.rules)
    assert not any(hit.point in MAY_STILL_COME for hit in night.hits)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_night_ends_with_the_undisturbed_weights(scene, seed):
    live_through(scene, seed)
