"""One way out of the triggerer for all waits on one endpoint.

A thousand waits with a client each would be a thousand TLS contexts, connection look-ups and connection pools, and a
thousand clocks that do not know of each other. Waits of one event loop and one endpoint share a `PollHub` instead:
one session, one look-up, one rate budget. It asks for states only, never for results: replies are capped, and what is
larger is left to the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from airflow_cortex_training.connection import ConnectionSettings, Target
from airflow_cortex_training.hooks.cortex_training import LOOK_TIMEOUTS_S, CortexTrainingHook
from cortex_training.errors import ApiError, AuthError, RateLimitedError, ServiceError
from cortex_training.protocol.durations import Durations
from cortex_training.protocol.exchange import retry_after_s
from cortex_training.protocol.memory import Bounded

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

REQUESTS_PER_S = 50.0
BURST = 20
IN_FLIGHT = 16
LINGER_S = 30.0
_LONGEST_PAUSE_S = 300.0


@contextlib.asynccontextmanager
async def open_hub(target: Target) -> AsyncIterator[PollHub]:
    """The hub of this event loop for `target`. Raises `ConfigurationError` when its connection is unusable."""
    registry = _registry()
    hub = await registry.acquire(target)
    try:
        yield hub
    finally:
        registry.release(hub)


class RateBudget:
    """Spreads requests: at most `per_s` a second after a burst, and none before a pause is over."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / per_s
        self._slack_s = burst / per_s
        self._next = 0.0

    async def take(self) -> None:
        now = time.monotonic()
        at = max(self._next, now - self._slack_s)
        self._next = at + self._interval_s
        if at > now:
            await asyncio.sleep(at - now)

    def pause(self, seconds: float) -> None:
        """Nothing leaves for `seconds`; then waits leave one by one, at the usual rate."""
        self._next = max(self._next, time.monotonic() + min(seconds, _LONGEST_PAUSE_S))


class PollHub:
    """Reads of one endpoint, for all waits that share it. Made by `open_hub`."""

    def __init__(self, target: Target, settings: ConnectionSettings) -> None:
        from airflow_cortex_training.triggers.session import open_session

        self.target = target
        self.settings = settings
        self.users = 0
        self._budget = RateBudget(REQUESTS_PER_S, BURST)
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)
        self._durations: Bounded[tuple[str, str], Durations] = Bounded(512)
        self._renewing = asyncio.Lock()
        self._session = open_session(IN_FLIGHT)
        self._client: AsyncCortexTrainingClient | None = None

    def durations_of(self, job_id: str, operation: str) -> Durations:
        """What this process knows of how long such requests take on this job."""
        return self._durations.get_or_put((job_id, operation), Durations())

    async def job(self, job_id: str) -> dict[str, Any]:
        """The job as the service shows it, asked for once. Raises `ApiError`, `TransportError` or `ReplyTooLarge`."""
        return dict(await self._read(lambda client: client.get_job(job_id)))

    async def request_status(self, job_id: str, request_id: str) -> dict[str, Any]:
        """The state of a request, with at most one of its events. Raises as `job` does."""
        return dict(await self._read(lambda client: client.get_request_status(job_id, request_id, max_events=1)))

    async def capacity(self, hardware: str | None) -> dict[str, Any]:
        """GPUs of the account. Raises as `job` does."""
        return dict(await self._read(lambda client: client.get_capacity(hardware)))

    async def close(self) -> None:
        await self._session.close()

    async def _read(self, call: Callable[[AsyncCortexTrainingClient], Awaitable[Any]]) -> Any:
        """One read; a second one when the credential was refused and the connection holds another one by now."""
        settings, client = self.settings, await self._current_client()
        try:
            return await self._paced(call, client)
        except AuthError as refusal:
            if refusal.status != 401 or await self._renewed(settings) == settings:
                raise
        return await self._paced(call, await self._current_client())

    async def _paced(
        self,
        call: Callable[[AsyncCortexTrainingClient], Awaitable[Any]],
        client: AsyncCortexTrainingClient,
    ) -> Any:
        # The budget first: whoever waits for it must not hold a place that somebody else could use.
        await self._budget.take()
        async with self._in_flight:
            try:
                return await call(client)
            except (RateLimitedError, ServiceError) as refusal:
                if refusal.status in (429, 503):
                    self._budget.pause(_pause_s(refusal))
                raise

    async def _renewed(self, refused: ConnectionSettings) -> ConnectionSettings:
        """The connection as it is now; read once however many waits were refused at the same moment."""
        async with self._renewing:
            if self.settings == refused:
                self.settings = await CortexTrainingHook.for_target(self.target).asettings()
                self._client = None
            return self.settings

    async def _current_client(self) -> AsyncCortexTrainingClient:
        """Made at the first read: a reused OAuth login asks for a token then, and a wait outlives its failure."""
        if self._client is not None:
            return self._client
        from cortex_training.aio import AsyncCortexTrainingClient

        async with self._renewing:
            if self._client is None:
                arguments = await asyncio.to_thread(self.settings.client_arguments)
                # No retries of its own: whoever waits looks again anyway, at its own pace, within the budget of all.
                self._client = AsyncCortexTrainingClient(
                    **arguments, session=self._session, max_retries=0, request_timeout=LOOK_TIMEOUTS_S
                )
            return self._client


class _Registry:
    """The hubs of one event loop."""

    def __init__(self) -> None:
        self._lookups: dict[Target, asyncio.Task[ConnectionSettings]] = {}
        self._hubs: dict[tuple[str, ...], PollHub] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def acquire(self, target: Target) -> PollHub:
        # In a thread: the first import takes longer than an event loop with a thousand waits should stand still.
        await asyncio.to_thread(_import_transport)
        settings = await self._settings(target)
        hub = self._hubs.get(settings.endpoint_key)
        if hub is None:
            hub = self._hubs[settings.endpoint_key] = PollHub(target, settings)
        hub.users += 1
        return hub

    def release(self, hub: PollHub) -> None:
        hub.users -= 1
        if hub.users == 0:
            closing = asyncio.ensure_future(self._close_idle(hub))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _settings(self, target: Target) -> ConnectionSettings:
        """One look-up for all who ask while it is under way or its hub is in use."""
        lookup = self._lookups.get(target)
        if lookup is None:
            lookup = asyncio.ensure_future(CortexTrainingHook.for_target(target).asettings())
            self._lookups[target] = lookup
        try:
            # Shielded: the first who asks may be cancelled, the others still want the answer.
            return await asyncio.shield(lookup)
        except BaseException:
            if lookup.done() and (lookup.cancelled() or lookup.exception()):
                self._lookups.pop(target, None)
            raise

    async def _close_idle(self, hub: PollHub) -> None:
        try:
            await asyncio.sleep(LINGER_S)
        finally:
            if hub.users == 0:
                for key, known in list(self._hubs.items()):
                    if known is hub:
                        del self._hubs[key]
                        # Whoever comes next reads the connection again.
                        self._lookups = {
                            target: lookup for target, lookup in self._lookups.items() if _key_of(lookup) != key
                        }
                await hub.close()


_registries: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Registry] = weakref.WeakKeyDictionary()


def _import_transport() -> None:
    import cortex_training.aio  # noqa: F401


def _registry() -> _Registry:
    return _registries.setdefault(asyncio.get_running_loop(), _Registry())


def _key_of(lookup: asyncio.Task[ConnectionSettings]) -> tuple[str, ...] | None:
    if lookup.done() and not lookup.cancelled() and lookup.exception() is None:
        return lookup.result().endpoint_key
    return None


def _pause_s(refusal: ApiError) -> float:
    """What ``Retry-After`` asks for; 1 second when the service said nothing readable."""
    headers = refusal.response.headers if refusal.response is not None else {}
    asked_s = retry_after_s(headers, time.time())
    return 1.0 if asked_s is None else asked_s
