"""A root in a bucket that answers conditional writes with 409, throttles, and loses replies, while drivers die."""

import pytest

from tests.faults.driver import FREEZE, KILL, Hit
from tests.faults.harness import wait_until_frozen, wake
from tests.publication.conftest import bucket, faults, faulty_creds, s3_root, s3_server  # noqa: F401

pytestmark = pytest.mark.live

CONFLICT, THROTTLED, LOST = "status 409 ConditionalRequestConflict", "status 503 SlowDown", "drop after"

DEATHS = (("before record sent step", 2), ("after publish entry", 3), ("after record outcome step done", 5))


@pytest.fixture
def scene(scene, s3_server, bucket, s3_root, faulty_creds):  # noqa: F811
    scene.write_plan(root=s3_root, credentials=faulty_creds)

    def mirror():
        """The root as files, for the judge: it reads the objects past the fault proxy."""
        client, prefix = s3_server.client(), s3_root.removeprefix(f"s3://{bucket}/") + "/"
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for key in [item["Key"] for page in pages for item in page.get("Contents", ())]:
            path = scene.root / key.removeprefix(prefix)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())

    scene.fetch_root = mirror
    return scene


@pytest.mark.parametrize("action", [CONFLICT, LOST, THROTTLED])
@pytest.mark.parametrize("part", ["/journal/", "/pub/", "/epochs/"])
def test_a_store_that_falters_under_drivers_that_die_costs_nothing(scene, faults, part, action):  # noqa: F811
    for point, step in DEATHS:
        # What the last driver did not meet would add up to more refusals in a row than a driver has patience for.
        faults.faults.clear()
        faults.spoil("PUT", part, action, 2)
        assert scene.drive(Hit(point, step, KILL)).code == -9
    assert scene.finish()["segments"] == 1


def test_a_driver_that_wakes_up_behind_its_successor_changes_nothing(scene, faults):  # noqa: F811
    frozen = scene.start(Hit("permitted send step", 3, FREEZE))
    assert wait_until_frozen(frozen)
    faults.spoil("PUT", "/journal/", CONFLICT, 3)
    try:
        scene.finish()
    finally:
        wake(frozen)
        ended = scene.wait(frozen)
    assert "belongs to another driver" in ended.err
