"""A run to hurt: its dataset and reference are made once, its service is shared unless a test kills it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cortex_training.local.models import model_folder
from tests.faults.harness import Material, Scene
from tests.faults.proxy import FaultProxy


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("material"), model_folder("tiny"))


@pytest.fixture
def scene(tmp_path, local_service, material) -> Iterator[Scene]:
    with FaultProxy(local_service.base_url) as proxy:
        yield Scene(tmp_path, local_service, proxy, material)
