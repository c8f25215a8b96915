"""Fixtures of the local service's tests."""

from __future__ import annotations

import pytest

from tests.conftest import RunningService
from tests.local.api import Caller


@pytest.fixture
def caller(local_service: RunningService) -> Caller:
    """A caller of the session's service."""
    return Caller(local_service.url)
