"""Nights with several misfortunes at once, drawn from a seed; ``FAULT_SCHEDULES=100 FAULT_SEED=1`` says which."""

import os
import random

import pytest
import requests

from tests.faults.driver import DISK_FULL, FREEZE, KILL, TERMINATE, WRITE_FAILS, Hit
from tests.faults.harness import wait_until_frozen, wake
from tests.faults.oracle import ENDED
from tests.faults.points import POINTS, RECOVERY_POINTS, STEPS_OF
from tests.faults.proxy import ANSWER, DROP_AFTER, DROP_BEFORE, LATE, TWICE
from tests.faults.test_network import BATCH, CANCEL, CREATE, POLL, SAVE, STEP, cancel_a_batch

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

FIRST_SEED = int(os.environ.get("FAULT_SEED", "1"))
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

    @property
    def doubled(self):
        return sum(fields["times"] for pattern, action, fields in self.rules if (pattern, action) == (STEP, TWICE))

    def _hit(self):
        point = self.chance.choice([*POINTS, *RECOVERY_POINTS])
        step = self.chance.choice(STEPS_OF.get(point, range(1, 6)))
        action = self.chance.choice([KILL] * 8 + [TERMINATE] * 3 + [FREEZE] * 3 + [DISK_FULL, WRITE_FAILS])
        return Hit(point, step, action, self.chance.choice([1, 1, 1, 2]))

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
        return f"{self.hits} {self.rules} {self.weather} {happens}"


def lose_the_job(scene):
    segments = scene.evidence.segments if (scene.root / "journal").exists() else []
    if segments:
        url = f"{scene.service.url}/{segments[-1].job_id}"
        if requests.get(url, timeout=30).json().get("status") not in (None, *ENDED):
            requests.post(f"{url}:cancel", timeout=30)


def live_through(scene, seed):
    """Let the night of a seed come over a run, and finish it; the judge looks after every driver."""
    night = Night(seed)
    print(f"seed {seed}: {night}")
    scene.doubled = night.doubled
    for pattern, action, fields in night.rules:
        scene.proxy.add(pattern, action, **fields)
    if night.weather:
        scene.control.add_all(night.weather)
    if night.sends_chunks:
        scene.chunk_payload_bytes = 3000
    if night.cancels_a_batch:
        cancel_a_batch(scene, skip=night.chance.randrange(8))
    frozen = []
    try:
        for number, hit in enumerate(night.hits):
            process = scene.start(hit)
            if hit.action == FREEZE and wait_until_frozen(process):
                frozen.append(process)
            else:
                scene.wait(process)
            if number == night.loses_the_job_after:
                lose_the_job(scene)
            if frozen and night.chance.random() < 0.4:
                wake(frozen[-1])
                scene.wait(frozen.pop())
        scene.finish()
        for process in frozen:
            wake(process)
            scene.wait(process)
    finally:
        for process in frozen:
            process.kill()
    scene.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_night_ends_with_the_undisturbed_weights(scene, seed):
    live_through(scene, seed)
