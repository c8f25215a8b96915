"""One run has one driver, also when two claimed it at the same moment."""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Suspended

from demo.prefect_server import PrefectServer
from prefect_cortex_training.drive import CLAIM_S, _Driven
from prefect_cortex_training.labels import RunLabels
from prefect_cortex_training.waits import TRAINING, Wait

WAIT = Wait(TRAINING, "block", ("0123456789ab", "ba9876543210", "1"))
OURS, THEIRS = "host-a/1/aaaaaa", "host-b/2/bbbbbb"


@flow
def training() -> None: ...


async def driven() -> tuple[UUID, Any]:
    async with get_client() as client:
        state = Suspended(timeout_seconds=3600, pause_key=WAIT.key(1))
        run = await client.read_flow_run((await client.create_flow_run(training, state=state)).id)
    return run.id, lambda: _Driven(run, WAIT, logging.getLogger("a-test"))


async def test_a_run_that_is_driven_is_left_alone_until_its_driver_is_silent(on_server: PrefectServer) -> None:
    run, make = await driven()
    assert await make().claim(OURS)
    assert not await make().claim(THEIRS)
    long_ago = time.time() - CLAIM_S - 1
    await RunLabels(run).write({"driver.ba9876543210": f"{OURS} {long_ago:.0f}"})
    assert await make().claim(THEIRS)


async def test_of_two_that_both_began_the_one_that_is_not_named_goes(on_server: PrefectServer) -> None:
    run, make = await driven()
    one, other = make(), make()
    assert await one.claim(OURS)
    await RunLabels(run).write({"driver.ba9876543210": f"{THEIRS} {time.time():.0f}"})
    assert not await one.keep(OURS)
    assert await other.keep(THEIRS)
