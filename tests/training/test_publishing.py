"""When a driver looks into the publication log, and what it puts there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cortex_training.publication.log import PublicationLog
from cortex_training.publication.store import PosixStore
from cortex_training.training import operations


class CountingLog(PublicationLog):
    listed = 0

    def entries(self) -> Any:
        self.listed += 1
        return super().entries()


def driver_of(root: Path) -> Any:
    """As much of a driver as publishing needs, with one save whose loss is known."""
    store = PosixStore(str(root))
    saved = {"checkpoint_id": "cp", "global_steps": 2, "save": "exec/run-e1/cp"}
    return SimpleNamespace(
        log=CountingLog(store),
        store=store,
        plan=SimpleNamespace(checkpoint_type="resumable", keep_publications=3),
        epoch=1,
        published=None,
        tell=lambda *_, **__: None,
        segment=SimpleNamespace(
            offset_is_certain=True,
            job_id="job",
            number=0,
            saves=lambda: [SimpleNamespace(step=2, result=saved)],
            weights_are_finite=lambda step: True,
            loss=lambda step: 1.5,
        ),
    )


@pytest.mark.parametrize("known", [False, True], ids=["new", "published-by-another-driver"])
async def test_the_log_is_not_listed_again_for_a_save_that_is_known_to_be_published(
    tmp_path: Path, known: bool
) -> None:
    if known:
        await operations.publish_verified(driver_of(tmp_path))
    driver = driver_of(tmp_path)
    await operations.publish_verified(driver)
    before = driver.log.listed
    assert before > 0
    for _ in range(10):
        await operations.publish_verified(driver)
    assert driver.log.listed == before
    assert [entry.save for entry in PublicationLog(driver.store).entries()] == ["exec/run-e1/cp"]
