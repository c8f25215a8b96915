"""The same night under every answer to what nobody outside knows of the service."""

import pytest

from tests.faults.driver import KILL, Hit
from tests.faults.harness import STEPS, Scene
from tests.faults.proxy import DROP_AFTER, DROP_BEFORE, FaultProxy
from tests.faults.test_network import SAVE, STEP

pytestmark = pytest.mark.long

ANSWERS = [
    "job-ids=ignored",
    "global-steps=continues",
    "global-steps=zero",
    "checkpoint-ids=global_step",
    "save-result=stage_path",
    "ended-job-polls=served",
    "load-gradients=clear",
    "request-order=shuffled",
    "chunk-groups=evict_completed",
]


@pytest.fixture
def assuming(tmp_path, start_local_service, material):
    """A function that makes a scene whose service gives the answer."""
    proxies = []

    def make(answer):
        service = start_local_service(assume=[answer])
        proxies.append(FaultProxy(service.base_url).__enter__())
        scene = Scene(tmp_path, service, proxies[-1], material)
        scene.restored = not answer.startswith("global-steps")
        return scene

    yield make
    for proxy in proxies:
        proxy.__exit__()


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_run_needs_no_particular_answer(assuming, answer):
    scene = assuming(answer)
    scene.proxy.add(STEP, DROP_BEFORE, skip=2)
    # It sees what the first lets pass: the last step is lost too, so that the last job makes one step only.
    scene.proxy.add(STEP, DROP_BEFORE, skip=STEPS - 1)
    scene.proxy.add(SAVE, DROP_AFTER)
    assert scene.drive(Hit("after record sent step", 4, KILL)).code == -9
    assert scene.finish()["segments"] == 3


def test_a_service_that_takes_one_batch_a_step_is_named(assuming):
    scene = assuming("accumulation=refuse")
    ended = scene.drive()
    assert ended.code == 1
    assert "failed 3 times" in ended.err
    assert "a forward-backward is already accumulated" in ended.err
