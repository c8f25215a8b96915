"""Drivers that die: the command line's process is killed, and the same command goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from cortex_training.publication.log import PublicationLog
from cortex_training.training import status
from tests.faults.proxy import HOLD

SEED = int(os.environ.get("FAULT_SEED", "20261129"))


class Driver:
    """``cortex-training train PLAN.json`` in a process of its own."""

    def __init__(self, runs, folder, **changes):
        self.runs = runs
        self.plan_file = folder / "plan.json"
        self.plan_file.write_text(json.dumps(runs.plan(**{"steps": 10, "save_every_steps": 3, **changes}).to_dict()))

    def start(self):
        command = [
            *(sys.executable, "-c", "import sys; from cortex_training.cli import main; sys.exit(main())"),
            *("--base-url", self.runs.base_url, "--database", self.runs.service.database),
            *("--schema", self.runs.service.schema, "train", str(self.plan_file)),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, timeout_s=120):
        out, err = self.start().communicate(timeout=timeout_s)
        assert out, err
        return json.loads(out)


@pytest.fixture
def driver(runs, tmp_path):
    return Driver(runs, tmp_path)


def steps_executed(runs):
    return [r["global_steps"] for job in status(runs.root).state.job_ids for r in runs.executed("step", job)]


def test_a_driver_killed_while_a_steps_answer_is_held_back_loses_and_repeats_nothing(runs, driver, proxy):
    for _ in range(2):
        rule = proxy.add(r"^POST .*/step$", HOLD, skip=1)
        process = driver.start()
        assert rule.holding.wait(60), "the step was never sent"
        process.kill()
        process.communicate()
        rule.released.set()
    result = driver.finish()
    assert result["steps"] == 10
    assert result["segments"] == 1
    assert steps_executed(runs) == list(range(1, 11))
    assert PublicationLog(runs.root).latest().step == 10


@pytest.mark.live
def test_a_driver_killed_at_random_moments_ends_with_every_step_once(runs, driver, proxy):
    proxy.add(r"/(forward-backward|step)$", "forward", times=10**6, before=lambda: time.sleep(0.05))
    moments = random.Random(SEED)
    for _ in range(5):
        process = driver.start()
        try:
            process.wait(moments.uniform(0.8, 2.5))
        except subprocess.TimeoutExpired:
            process.send_signal(moments.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            process.wait(30)
        process.communicate()
    result = driver.finish()
    assert result["steps"] == 10
    # A new segment starts from the very save that settled the doubt, so no step is lost or made twice in any case.
    assert steps_executed(runs) == list(range(1, 11)), f"seed {SEED}"


@pytest.mark.live
def test_a_driver_that_is_asked_to_stop_releases_the_run_and_says_so(runs, driver, proxy):
    rule = proxy.add(r"^POST .*/step$", HOLD, skip=2)
    process = driver.start()
    assert rule.holding.wait(60)
    process.send_signal(signal.SIGTERM)
    rule.released.set()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "the same plan on this root goes on" in err
    assert driver.finish()["segments"] == 1
    assert steps_executed(runs) == list(range(1, 11))


@pytest.mark.live
def test_a_frozen_driver_that_wakes_up_late_is_stopped_by_its_successor(runs, driver, proxy):
    rule = proxy.add(r"^POST .*/step$", HOLD, skip=1)
    frozen = driver.start()
    assert rule.holding.wait(60)
    frozen.send_signal(signal.SIGSTOP)
    rule.released.set()
    try:
        result = driver.finish()
    finally:
        frozen.send_signal(signal.SIGCONT)
        _, err = frozen.communicate(timeout=60)
    assert frozen.returncode == 1
    assert "belongs to another driver" in err
    assert result["steps"] == 10
    assert steps_executed(runs) == list(range(1, 11))
