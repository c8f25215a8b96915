"""``prefect-cortex-training`` refuses what it can't do, naming it, before it asks any server."""

from __future__ import annotations

import pytest

from prefect_cortex_training.command import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "watch"),
        (["watch", "--every", "0"], "'0' is not a number of seconds above 0"),
        (["watch", "--crashed-after", "soon"], "'soon' is not a number of seconds above 0"),
        (["drive", "--every", "inf"], "'inf' is not a number of seconds above 0"),
        (["drive", "--max-runs", "many"], "many"),
        (["drive", "--max-runs", "0"], "'0' is not a whole number above 0"),
    ],
)
def test_arguments_are_checked(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_rules_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--once", "--cancel-on", "cancelled,paused"]) == 2
    assert "cancel_on = 'paused': use cancelled, failed, crashed, completed" in capsys.readouterr().err
