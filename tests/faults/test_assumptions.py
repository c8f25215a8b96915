"""The same night under every answer to what nobody outside knows of the service."""

import pytest

from cortex_training.local.assumptions import answers
from tests.faults.driver import KILL, Hit
from tests.faults.harness import STEPS
from tests.faults.proxy import DROP_AFTER, DROP_BEFORE
from tests.faults.test_network import SAVE, STEP

pytestmark = pytest.mark.long

# The first answer of each question is the default, which every other test runs on. Several batches a step are what the
# harness's plan is about.
ANSWERS = [
    f"{question.replace('_', '-')}={answer}"
    for question, (_, *others) in answers().items()
    for answer in others
    if question != "accumulation"
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_run_needs_no_particular_answer(own_scene, answer):
    scene = own_scene(assume=[answer])
    scene.restored = not answer.startswith("global-steps")
    scene.proxy.add(STEP, DROP_BEFORE, skip=2)
    # It sees what the first lets pass: the last step is lost too, so that the last job makes one step only.
    scene.proxy.add(STEP, DROP_BEFORE, skip=STEPS - 1)
    scene.proxy.add(SAVE, DROP_AFTER)
    assert scene.drive(Hit("after record sent step", 4, KILL)).code == -9
    assert scene.finish()["segments"] == 3


def test_a_service_that_takes_one_batch_a_step_is_named(own_scene):
    scene = own_scene(assume=["accumulation=refuse"])
    ended = scene.drive()
    assert ended.code == 1
    assert "failed 3 times" in ended.err
    assert "a forward-backward is already accumulated" in ended.err
