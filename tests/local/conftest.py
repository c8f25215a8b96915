"""Fixtures of the local service's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cortex_training.local.control_client import ServiceControl
from cortex_training.local.models import model_folder
from tests.conftest import RunningService, start_service
from tests.local.api import Caller


@pytest.fixture
def caller(local_service: RunningService) -> Caller:
    """A caller of the session's service."""
    return Caller(local_service.url)


@pytest.fixture(scope="session")
def contrary_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service that answers every open question the other way, is short of room, and asks for a token.

    One for all tests that need one of these, because each process that trains loads torch for some seconds.
    """
    service = start_service(
        tmp_path_factory.mktemp("contrary_service"),
        gpus=4096,
        token="s3cret",
        assume=[
            "accumulation=refuse",
            "job-ids=ignored",
            "ended-job-polls=served",
            "save-result=stage_path",
            "load-gradients=clear",
            "global-steps=continues",
            "checkpoint-ids=global_step",
            "log-probability=refused",
        ],
        model=[f"acme/own={model_folder('tiny')}"],
        strict_models=True,
        export_seconds=2,
        result_chunk_bytes=10_000,
        max_partial_bytes=40_000,
    )
    yield service
    service.stop()


@pytest.fixture
def contrary(contrary_service: RunningService) -> Caller:
    """A caller of the contrary service, with its token."""
    caller = Caller(contrary_service.url)
    caller.session.headers["authorization"] = "Bearer s3cret"
    return caller


@pytest.fixture(scope="session")
def weathered_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service without models whose operations take no time, with a control port."""
    service = start_service(
        tmp_path_factory.mktemp("weathered_service"),
        gpus=4096,
        faults=[],
        simulate="0",
        execution_log_weights=True,
        result_chunk_bytes=10_000,
    )
    yield service
    service.stop()


@pytest.fixture
def control(weathered_service: RunningService) -> Iterator[ServiceControl]:
    """The weathered service's control port; its rules go with the test."""
    handle = weathered_service.control
    yield handle
    handle.clear()


@pytest.fixture
def weathered(weathered_service: RunningService, control: ServiceControl) -> Caller:
    """A caller of the weathered service, on a calm day."""
    return Caller(weathered_service.url)
