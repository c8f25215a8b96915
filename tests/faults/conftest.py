"""A run to hurt: its dataset and reference are made once, its service is shared unless a test kills it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex_training.local.models import model_folder
from tests.conftest import RunningService, ServiceFactory, start_service
from tests.faults.harness import Material, Scene
from tests.faults.proxy import FaultProxy


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("material"), model_folder("tiny"))


@pytest.fixture(scope="session")
def hurt_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for all nights that don't kill it; its weather is made by its control port."""
    service = start_service(tmp_path_factory.mktemp("hurt_service"), gpus=4096, faults=[], execution_log_weights=True)
    yield service
    service.stop()


@pytest.fixture
def next_scene(
    tmp_path: Path, hurt_service: RunningService, material: Material
) -> Callable[[], contextlib.AbstractContextManager[Scene]]:
    """A function that opens a scene on a root of its own; one at a time, because the weather is everybody's."""
    numbers = itertools.count()

    @contextlib.contextmanager
    def opened() -> Iterator[Scene]:
        folder = tmp_path / f"scene-{next(numbers)}"
        folder.mkdir()
        try:
            with FaultProxy(hurt_service.base_url) as proxy:
                yield Scene(folder, hurt_service, proxy, material)
        finally:
            hurt_service.control.clear()

    return opened


@pytest.fixture
def scene(next_scene: Callable[[], contextlib.AbstractContextManager[Scene]]) -> Iterator[Scene]:
    with next_scene() as scene:
        yield scene


@pytest.fixture
def own_scene(
    tmp_path: Path, start_local_service: ServiceFactory, material: Material
) -> Iterator[Callable[..., Scene]]:
    """A function that makes a scene with a service of its own, started with the options given.

    Called again, it starts another service in the place of the first, with its data unless told otherwise.
    """
    scenes: list[Scene] = []

    def make(**options: Any) -> Scene:
        service = start_local_service(**{"faults": [], "execution_log_weights": True, **options})
        if not scenes:
            scenes.append(Scene(tmp_path, service, FaultProxy(service.base_url).__enter__(), material))
        scenes[0].service, scenes[0].proxy.upstream = service, service.base_url
        return scenes[0]

    yield make
    for scene in scenes:
        scene.proxy.__exit__()
