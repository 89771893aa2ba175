"""Loads the model of a request, in place of the model that was used least recently.

Unloading a model loses no request: the model's scheduler keeps the requests with their tokens, and
they continue after the model's next load. Until then, these requests count as demand for the model.
So if more models are busy than may be loaded at once, the models take turns, and each model stays
loaded for a minimum time.

Requests of the lowest priority, such as lines of batches, are patient: a model that is busy with
other requests is not unloaded for a patient request.

With `idle_unload_s`, a model that has had no request for this time is unloaded, even if no other
model needs its place. The model's next request loads it again.

Only one router may load models on demand at the same schedulers. Two routers might load two models
at once, and the device may have memory for only one of them.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

import structlog

from contract.errors import QuireError, TooBusyError, UnavailableError
from contract.request import MAX_PRIORITY
from quire.v1.common_pb2 import Load
from router.request.inference import Inference
from router.schedulers.loading import LoadingCalls
from rpc.security.tls import ClientTls

TICK_S: Final = 0.1
_CONNECT_S: Final = 10.0
"""If a model is loaded, but the router has not connected to the model's scheduler after this time,
the calls that wait for the model fail."""
_RETRY_S: Final = 5.0
"""Pause after a failed attempt to load a model."""
_AWAY_RETRY_S: Final = 0.5
"""Pause after an attempt that failed because a process could not be reached. The process may be
starting."""

log = structlog.get_logger()


def is_patient(priority: int) -> bool:
    """Whether requests of this priority are patient: only those of the lowest priority are."""
    return priority == -MAX_PRIORITY


class OnDemand:
    """Decides which models are loaded; `run` loads and unloads them."""

    def __init__(
        self,
        cells: Sequence[Inference],
        *,
        max_loaded: int,
        min_loaded_s: float,
        max_waiting: int,
        idle_unload_s: float | None = None,
        tls: ClientTls | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        """At most `max_waiting` calls wait; if `idle_unload_s` is None, idle models stay loaded."""
        self._cells = {cell: _Demand() for cell in cells}
        self._loading = LoadingCalls(tls)
        self._max_loaded = max_loaded
        self._min_loaded_s = min_loaded_s
        self._max_waiting = max_waiting
        self._idle_unload_s = idle_unload_s
        self._tick_s = tick_s
        self._is_draining = False
        self._has_begun = False
        """Whether a model has been loaded or requested; until then `run` loads the first model."""

    async def wait_until_loaded(self, cell: Inference, *, is_patient: bool = False) -> None:
        """Wait until requests can be submitted to a cell.

        Raises:
            TooBusyError: Too many calls are waiting.
            UnavailableError: The router drains, or the model cannot be loaded; the message says
                why.
        """
        self._has_begun = True
        demand = self._cells[cell]
        demand.used_at = asyncio.get_running_loop().time()
        if cell.schedulers.is_loaded:
            return
        if self._is_draining:
            raise _draining()
        num_waiting = sum(len(each.waiters) for each in self._cells.values())
        if num_waiting >= self._max_waiting:
            raise TooBusyError(f"{num_waiting} requests wait for models that are not loaded")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        demand.waiters[waiter] = is_patient
        try:
            await waiter
        finally:
            del demand.waiters[waiter]

    async def load_of(self, cell: Inference) -> Load | None:
        """Return the total load of a cell's schedulers; None: no scheduler answers.

        Schedulers to which the router is not connected are asked, too.
        """
        return await self._loading.sum_of_loads(cell.schedulers.target_to_is_connected)

    def drain(self) -> None:
        """Refuse the waiting calls; accepted requests still get their models."""
        self._is_draining = True
        for demand in self._cells.values():
            demand.fail(_draining())

    async def run(self) -> None:
        """Load the models that requests need, and unload idle ones. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._tick_s)
            wanted = self._look()
            if wanted is not None:
                try:
                    await self._make_room_and_load(wanted)
                except QuireError as error:
                    demand = self._cells[wanted]
                    if demand.waiters:
                        log.warning("cannot load a model", model=wanted.name, reason=str(error))
                    demand.retry_at = asyncio.get_running_loop().time() + (
                        _AWAY_RETRY_S if isinstance(error, UnavailableError) else _RETRY_S
                    )
                    demand.fail(UnavailableError(f"model {wanted.name!r}: {error}"))
            elif (torn := self._torn()) is not None:
                await self._load_rest(torn)
            elif (idle := self._idle()) is not None:
                await self._unload_idle(idle)

    def _look(self) -> Inference | None:
        """Record which models are loaded and in use; return the model to load next, if any."""
        now = asyncio.get_running_loop().time()
        # A router cannot connect to a scheduler that has had no model since its start. Without a
        # scheduler the router is not ready, so it might never get a request that loads a model. So
        # the first model is loaded without a request.
        is_any_ready = any(cell.schedulers.is_ready for cell in self._cells)
        for cell, demand in self._cells.items():
            has_live = cell.schedulers.num_live_seqs > 0
            if has_live:
                demand.used_at = now
            if cell.schedulers.is_loaded:
                demand.loaded_at = now if demand.loaded_at is None else demand.loaded_at
                demand.seen_at = demand.seen_at or now
                demand.wanted_at = None
                demand.succeed()
                self._has_begun = True
                continue
            demand.loaded_at = None
            is_first = cell is next(iter(self._cells))
            if not (
                demand.waiters or has_live or (is_first and not (self._has_begun and is_any_ready))
            ):
                demand.wanted_at = None
            elif demand.wanted_at is None:
                demand.wanted_at = now
        wanted = [
            (not self._is_urgent(cell), demand.wanted_at, cell)
            for cell, demand in self._cells.items()
            if demand.wanted_at is not None and now >= demand.retry_at
        ]
        return min(wanted, key=lambda each: each[:2])[2] if wanted else None

    def _idle(self) -> Inference | None:
        """Return a loaded model that has had no request for `idle_unload_s`."""
        # A router that drains does not know the requests of the router that replaces it.
        if self._idle_unload_s is None or self._is_draining:
            return None
        now = asyncio.get_running_loop().time()
        for cell, demand in self._cells.items():
            since = max(demand.used_at, demand.loaded_at or now)
            if now - since >= self._idle_unload_s and not cell.schedulers.num_live_seqs:
                return cell
        return None

    async def _unload_idle(self, cell: Inference) -> None:
        load, demand = await self.load_of(cell), self._cells[cell]
        if load is None or load.num_requests_running or load.num_requests_waiting:
            # Another router, such as one that drains, still has requests there.
            demand.used_at = asyncio.get_running_loop().time()
            return
        if self._idle() is not cell:
            return  # a request has just come
        log.info("unloading an idle model", model=cell.name, idle_s=self._idle_unload_s)
        demand.left_at = asyncio.get_running_loop().time()
        try:
            await self._loading.unload(cell.schedulers.target_to_is_connected)
        except QuireError as error:
            log.warning("cannot unload an idle model", model=cell.name, reason=str(error))
            demand.used_at = asyncio.get_running_loop().time()
        else:
            demand.loaded_at = demand.seen_at = None

    def _torn(self) -> Inference | None:
        """Return a model that is in use, although some of its workers may have unloaded it.

        When such a model was idle, the router told all its workers to unload it. Some workers could
        not unload the model, or have restarted with the model, and requests use it there again.
        """
        now = asyncio.get_running_loop().time()
        for cell, demand in self._cells.items():
            is_used = demand.left_at is not None and demand.used_at >= demand.left_at
            if is_used and cell.schedulers.is_loaded and now >= demand.retry_at:
                return cell
        return None

    async def _load_rest(self, cell: Inference) -> None:
        """Load a cell's model at those of the cell's workers that do not have the model."""
        load, demand = await self.load_of(cell), self._cells[cell]
        if load is None or not load.num_workers:
            return  # `_look` will notice
        if not load.num_unloaded_workers:
            demand.left_at = None
            return
        try:
            await self._load(cell)
        except QuireError as error:
            log.warning("some workers lack the model", model=cell.name, reason=str(error))
            demand.retry_at = asyncio.get_running_loop().time() + _RETRY_S

    def _is_urgent(self, cell: Inference) -> bool:
        """Whether a cell has a waiting or running request that is not patient."""
        if not all(self._cells[cell].waiters.values()):
            return True
        return any(
            each.model == cell.name
            and not (each.live is not None and is_patient(each.live.record.priority))
            for each in cell.shared.admission.admitted
        )

    async def _make_room_and_load(self, wanted: Inference) -> None:
        """Load a model, after unloading other models if too many are loaded.

        Does nothing if there is no room, and all loaded models must stay loaded for now.

        Raises:
            QuireError: The model cannot be loaded, or another model cannot be unloaded.
        """
        loads = dict(
            zip(
                self._cells,
                await asyncio.gather(*map(self.load_of, self._cells)),
                strict=True,
            )
        )
        load, demand, is_urgent = loads[wanted], self._cells[wanted], self._is_urgent(wanted)
        now = asyncio.get_running_loop().time()
        if load is None or not (load.num_workers or load.num_unloaded_workers):
            raise wanted.schedulers.unavailable()
        if load.num_workers:  # `_look` will notice
            if demand.wanted_at is not None and now > demand.wanted_at + _CONNECT_S:
                raise wanted.schedulers.unavailable()
            return
        # A worker keeps its model while its scheduler is away.
        away = {cell for cell, each in self._cells.items() if loads[cell] is None and each.seen_at}
        loaded = [
            cell
            for cell, each in loads.items()
            if cell in away or (each is not None and each.num_workers)
        ]
        for cell, each in self._cells.items():
            each.seen_at = (each.seen_at or now) if cell in loaded else None
        while len(loaded) >= self._max_loaded:
            free = [
                cell
                for cell in loaded
                if cell not in away and (is_urgent or not self._is_urgent(cell))
            ]
            victim = self._least_recently_used(free, now)
            if victim is None:
                if len(away) >= self._max_loaded:
                    names = ", ".join(sorted(repr(cell.name) for cell in away))
                    raise UnavailableError(f"schedulers of loaded models are away: {names}")
                return
            log.info("unloading a model to make room", model=victim.name, wanted=wanted.name)
            await self._loading.unload(victim.schedulers.target_to_is_connected)
            self._cells[victim].seen_at = None
            loaded.remove(victim)
        log.info("loading a model on demand", model=wanted.name)
        await self._load(wanted)

    async def _load(self, cell: Inference) -> None:
        loading = self._loading.load(cell.schedulers.target_to_is_connected)
        async with aclosing(loading):
            async for _ in loading:
                pass
        self._cells[cell].left_at = None

    def _least_recently_used(self, loaded: Sequence[Inference], now: float) -> Inference | None:
        """Return the model to unload; None: all models must stay loaded for now."""
        free = [
            cell
            for cell in loaded
            if now >= (self._cells[cell].stays_since or now) + self._min_loaded_s
        ]
        return min(free, key=self._last_use, default=None)

    def _last_use(self, cell: Inference) -> tuple[float, float]:
        """Return a sort key: the time of the model's last use, then the time of its loading.

        Models in use all have the same time of last use, so the time of loading orders them.
        """
        demand = self._cells[cell]
        return demand.used_at, demand.stays_since or 0.0


class _Demand:
    """The state of a model, and the calls that wait for it. Times are on the event loop's clock."""

    def __init__(self) -> None:
        self.waiters: dict[asyncio.Future[None], bool] = {}
        """The waiting calls, and whether each is patient."""
        self.used_at = 0.0
        self.wanted_at: float | None = None
        self.loaded_at: float | None = None
        """The time since which a connected scheduler has had a worker with the model; None: no
        connected scheduler has such a worker."""
        self.seen_at: float | None = None
        """The time since which the model's schedulers, connected or not, have reported a worker
        with the model; None: they report no such worker."""
        self.retry_at = 0.0
        self.left_at: float | None = None
        """When the model was last unloaded as idle; None: never, or since then all its workers
        have loaded the model again."""

    @property
    def stays_since(self) -> float | None:
        return self.loaded_at or self.seen_at

    def succeed(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: QuireError) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


def _draining() -> UnavailableError:
    return UnavailableError("the router is draining; send the request to another one")
