"""The demo's service lets its own token in, and shows it to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex_training import CortexTrainingClient
from cortex_training.errors import AuthError
from cortex_training.local.control_client import ControlError
from demo.local_service import LocalService


def test_the_token_is_needed_and_is_no_argument_of_the_process(tmp_path: Path) -> None:
    service = LocalService(tmp_path).start()
    try:
        arguments = Path(f"/proc/{service.pid}/cmdline").read_text()
        with CortexTrainingClient.from_pat(service.base_url, service.token, "LOCAL", "PUBLIC") as client:
            assert client.list_jobs() == []
        with (
            CortexTrainingClient.from_pat(service.base_url, "another", "LOCAL", "PUBLIC") as stranger,
            pytest.raises(AuthError),
        ):
            stranger.list_jobs()
    finally:
        service.stop()
    assert "serve" in arguments
    assert service.token not in arguments


def test_it_can_have_weather_and_no_model(tmp_path: Path) -> None:
    service = LocalService(tmp_path, faults=[{"action": "answer", "status": 429, "on": "list-jobs"}], simulate="0")
    service.start()
    try:
        with CortexTrainingClient.from_pat(service.base_url, service.token, "LOCAL", "PUBLIC") as client:
            assert client.list_jobs() == []
        assert service.control.rules()["rule-1"]["seen"] == 2
    finally:
        service.stop()


def test_without_weather_there_is_no_control(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="--faults"):
        _ = LocalService(tmp_path).control
