"""The run's disk fills up; when there is room again, the same command goes on."""

import pytest

from tests.faults.driver import DISK_FULL, WRITE_FAILS, Hit

pytestmark = pytest.mark.live

FULL = [
    ("after claim epoch", 0),
    ("before record intent forward_backward", 1),
    ("before record sent step", 2),
    ("before write manifest", 3),
    ("before record outcome step done", 4),
    ("before record finished", 6),
]
FAILED_ONCE = [
    ("before record segment", 0),
    ("before record sent forward_backward", 1),
    ("before record outcome step done", 2),
    ("before publish entry", 3),
    ("before record intent step", 4),
    ("before record sent save", 5),
]


@pytest.mark.parametrize(("action", "places"), [(DISK_FULL, FULL), (WRITE_FAILS, FAILED_ONCE)])
def test_a_run_goes_on_when_there_is_room_again(scene, action, places):
    for point, step in places:
        ended = scene.drive(Hit(point, step, action))
        assert ended.code == 1, f"{point}: {ended.err}"
        assert str(scene.root) in ended.err
    assert scene.finish()["segments"] == 1


def test_a_full_disk_is_named(scene):
    ended = scene.drive(Hit("before record intent step", 2, WRITE_FAILS))
    assert "No space left on device; free some space and try again" in ended.err
    scene.finish()
