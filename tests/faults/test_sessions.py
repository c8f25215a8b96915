"""Session tokens that end under a run: real ones, of a login through the Snowflake connector."""

import pytest

from tests.local.connector import write_profile

pytestmark = pytest.mark.live


@pytest.fixture
def signed_in(own_scene, tmp_path):
    """A scene whose drivers log in, each with a session of its own."""
    scene = own_scene(snowflake=True)
    home = write_profile(tmp_path / "snowflake", scene.service)
    scene.environment = {"SNOWFLAKE_HOME": str(home)}
    scene.connection = ["--connection", "local"]
    return scene


def test_a_session_that_expires_anywhere_is_renewed_and_nothing_is_made_twice(signed_in):
    calls = (("forward-backward", 2), ("step", 1), ("save", 0), ("poll", 5), ("list-checkpoints", 2), ("cancel-job", 0))
    rules = [signed_in.control.add("expire-token", on=on, skip=skip, code="390112", requests=0) for on, skip in calls]
    assert signed_in.finish()["segments"] == 1
    assert all(signed_in.control.fired(rule) == 1 for rule in rules)


def test_a_session_that_is_revoked_is_renewed_too(signed_in):
    rule = signed_in.control.add("expire-token", on="step", skip=2, code="390114", requests=0)
    assert signed_in.finish()["segments"] == 1
    assert signed_in.control.fired(rule) == 1
