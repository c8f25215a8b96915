"""GPUs counted by a global concurrency limit of the Prefect server: a lease on slots, for as long as a job lives.

Prefect's own ``with concurrency(...)`` gives the slots back when the flow run is suspended, which is when the GPUs
work. So the lease is the flow run's: its id is in a label, and whoever looks after the run renews it. That is a thread
of the process while one executes the flow, `watch` and `drive` while none does. When nobody does, the lease runs out by
itself; who comes then takes the slots again, once they are free.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_logger

from cortex_training.errors import ConfigurationError, DeadlineExceeded
from cortex_training.identity import new_token
from prefect_cortex_training.labels import Label, RunLabels, labels_of

LEASE_S = 300.0
"""How long the slots of a crashed run stay taken, at most; the server adds up to 15 s."""

RENEW_EVERY_S = 60.0
LONGEST_WAIT_S = 86_400.0
_LOOK_EVERY_S = 15.0
_RELEASED = "released"

Logger = logging.Logger | logging.LoggerAdapter[Any]

_keepers: dict[UUID, threading.Thread] = {}


@dataclass(frozen=True)
class _Slots:
    """What a label says is held: a lease on so many slots of a limit."""

    lease: UUID
    gpus: int
    limit: str

    def __str__(self) -> str:
        return f"{self.lease} {self.gpus} {self.limit}"

    @classmethod
    def of(cls, label: Label) -> _Slots:
        lease, gpus, limit = str(label).split(" ", 2)
        return cls(UUID(lease), int(gpus), limit)


async def hold_gpus(labels: RunLabels, holder: str, limit: str, gpus: int, logger: Logger) -> None:
    """Return once the flow run has a lease on `gpus` slots of the limit called `limit`, and keep it renewed.

    `holder` is the job or training run that they are for: a rerun finds its lease and goes on with it. Raises
    ConfigurationError for a limit that does not exist or has fewer slots, DeadlineExceeded after a day of waiting.
    """
    if gpus < 1:
        raise ConfigurationError.of("gpu_limit", limit, "it counts the GPUs of sub-jobs, and there are none here")
    async with get_client() as prefect:
        known = _leases(await labels.read(), holder)
        if not any([await _renewed(prefect, lease) for lease in known]):
            lease = await _acquire(prefect, limit, gpus, logger)
            await _note(prefect, labels, holder, known, _Slots(lease, gpus, limit))
            logger.info("%d slots of %s are taken", gpus, limit)
    _keep_renewed(labels.flow_run_id)


async def _note(prefect: PrefectClient, labels: RunLabels, holder: str, known: list[UUID], new: _Slots) -> None:
    """Write down that the flow run has `new` slots for `holder`, in the place of the leases `known`, which are gone."""
    written = await labels.write({f"lease.{holder}.{new_token()[:8]}": str(new)})
    # Two processes that execute or look after one flow run need one lease: both leave it at the smallest.
    rivals = sorted(set(_leases(written, holder)) - set(known))[1:]
    for surplus in rivals:
        await _release(prefect, surplus)
    gone = {*known, *rivals}
    keys = [key for key in _keys(written, holder) if _Slots.of(written[key]).lease in gone]
    if keys:
        await labels.write(dict.fromkeys(keys, _RELEASED))


async def release_gpus(labels: RunLabels, holder: str | None = None) -> None:
    """Give back what the flow run holds, all of it or what it holds for `holder`. A lease that is gone is no error."""
    written = await labels.read()
    keys = _keys(written, holder)
    if not keys:
        return
    async with get_client() as prefect:
        for key in keys:
            await _release(prefect, _Slots.of(written[key]).lease)
    await labels.write(dict.fromkeys(keys, _RELEASED))


class LeaseRenewer:
    """Renews the leases of flow runs that it is shown again and again, each once a minute."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._renewed: dict[UUID, float] = {}

    async def look_after(self, prefect: PrefectClient, runs: Iterable[FlowRun]) -> None:
        now = time.monotonic()
        self._renewed = {lease: at for lease, at in self._renewed.items() if now - at < RENEW_EVERY_S}
        for run in runs:
            written = labels_of(run)
            for holder in sorted({key.split(".")[1] for key in _keys(written)}):
                leases = _leases(written, holder)
                due = [lease for lease in leases if lease not in self._renewed]
                if not due:
                    continue
                self._renewed |= dict.fromkeys(due, now)
                try:
                    if not any([await _renewed(prefect, lease) for lease in leases]):
                        await self._take_again(prefect, RunLabels(run.id), holder)
                except ConfigurationError as error:
                    self._logger.warning("flow run %s: its lease has run out: %s", run.id, error)
                except httpx.HTTPError as error:
                    self._logger.warning("flow run %s: its lease could not be renewed: %s", run.id, error)
                    for lease in due:
                        del self._renewed[lease]

    async def _take_again(self, prefect: PrefectClient, labels: RunLabels, holder: str) -> None:
        """Take the slots of a lease that ran out, if they are free: the job is there, and uses its GPUs."""
        written = await labels.read()
        known = [_Slots.of(written[key]) for key in _keys(written, holder)]
        if not known:
            return  # given back since the run was read
        gpus, limit = known[0].gpus, known[0].limit
        what = f"flow run {labels.flow_run_id}: its lease on {gpus} slots of {limit} has run out"
        lease = await _try_to_acquire(prefect, limit, gpus)
        if isinstance(lease, UUID):
            await _note(prefect, labels, holder, [slots.lease for slots in known], _Slots(lease, gpus, limit))
            self._logger.warning("%s, and they were taken again", what)
        else:
            self._logger.warning("%s, and they are not free: more GPUs are in use than the limit allows", what)


def _keep_renewed(flow_run_id: UUID) -> None:
    """Renew what the flow run holds from a thread of this process, until the run has left it."""
    thread = _keepers.get(flow_run_id)
    if thread is None or not thread.is_alive():
        # The context holds the settings that say where the server is.
        context = contextvars.copy_context()
        thread = _keepers[flow_run_id] = threading.Thread(
            target=lambda: context.run(asyncio.run, _keep(flow_run_id)), name="cortex-training-lease", daemon=True
        )
        thread.start()


async def _keep(flow_run_id: UUID) -> None:
    logger = get_logger("prefect_cortex_training")
    renewer = LeaseRenewer(logger)
    while True:
        await asyncio.sleep(RENEW_EVERY_S)
        try:
            async with get_client() as prefect:
                run = await prefect.read_flow_run(flow_run_id)
                if run.state is not None and run.state.is_final():
                    await release_gpus(RunLabels(flow_run_id))
                    return
                # Scheduled is a run of this process that waits for its next try.
                if run.state is None or run.state.is_paused() or not _leases(labels_of(run)):
                    return
                await renewer.look_after(prefect, [run])
        except Exception as error:
            logger.warning("flow run %s: its lease could not be renewed: %s", flow_run_id, error)


async def _acquire(prefect: PrefectClient, limit: str, gpus: int, logger: Logger) -> UUID:
    until = time.monotonic() + LONGEST_WAIT_S
    told = False
    while not isinstance(lease := await _try_to_acquire(prefect, limit, gpus), UUID):
        if time.monotonic() > until:
            raise DeadlineExceeded(
                f"{gpus} slots of {limit} were not free within {LONGEST_WAIT_S:g} s", timeout_s=LONGEST_WAIT_S
            )
        if not told:
            logger.info("waiting for %d slots of %s", gpus, limit)
            told = True
        await asyncio.sleep(min(lease, _LOOK_EVERY_S))
    return lease


async def _try_to_acquire(prefect: PrefectClient, limit: str, gpus: int) -> UUID | float:
    """A lease on slots, or in how many seconds to ask again."""
    try:
        answer = await prefect.increment_concurrency_slots_with_lease(
            names=[limit], slots=gpus, mode="concurrency", lease_duration=LEASE_S
        )
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.LOCKED:
            _refuse(limit, gpus, error)
        return float(error.response.headers.get("Retry-After", _LOOK_EVERY_S))
    body = answer.json()
    lease = UUID(str(body["lease_id"]))
    if not body["limits"]:
        await _release(prefect, lease)
        raise ConfigurationError.of(
            "gpu_limit",
            limit,
            f"the Prefect server has no such limit; `prefect gcl create {limit} --limit GPUS`",
        )
    return lease


def _refuse(limit: str, gpus: int, error: httpx.HTTPStatusError) -> NoReturn:
    if error.response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
        raise ConfigurationError.of(
            "gpu_limit",
            limit,
            f"the Prefect server refuses {gpus} slots of it ({error.response.text.strip()}); `prefect gcl inspect "
            f"{limit}` shows how many it has",
        ) from error
    raise error


async def _renewed(prefect: PrefectClient, lease: UUID) -> bool:
    """Renew a lease; False when it has run out."""
    try:
        await prefect.renew_concurrency_lease(lease, lease_duration=LEASE_S)
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (httpx.codes.GONE, httpx.codes.NOT_FOUND):
            return False
        raise
    return True


async def _release(prefect: PrefectClient, lease: UUID) -> None:
    # One that has run out was given back by the server.
    await prefect.release_concurrency_slots_with_lease(lease)


def _keys(labels: Mapping[str, Label], holder: str | None = None) -> list[str]:
    """Keys of the labels that say what is held, for `holder` or for all."""
    prefix = "lease." if holder is None else f"lease.{holder}."
    return [key for key, value in labels.items() if key.startswith(prefix) and value != _RELEASED]


def _leases(labels: Mapping[str, Label], holder: str | None = None) -> list[UUID]:
    return [_Slots.of(labels[key]).lease for key in _keys(labels, holder)]
