"""The LoRA adapters of the service: all workers hold the same adapters, and routers offer them.

An adapter is *held* once every attached worker has it, and *offered* to new requests until an
operator unloads it. An adapter that an operator unloads is *leaving* at first: all workers keep it
until no live request uses it. All workers hold each adapter, because a request that is preempted,
moved, or submitted again after a loss may continue at any worker.

The service holds the adapters that operators loaded. The service also holds an adapter that a
worker had when this worker was attached, except in two cases: another worker could not load the
adapter, or an operator has unloaded the adapter at this scheduler.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog

from contract.errors import (
    FailedPreconditionError,
    NotFoundError,
    QuireError,
    UnavailableError,
)
from contract.lora import LoadedAdapter, LoraAdapter
from rpc.tasks import BackgroundTasks
from scheduler_svc.core.handover.takeover import REUNION_S
from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.reports.load import has_live_with
from scheduler_svc.domain import ADAPTERS_SALT, adapter_salt
from scheduler_svc.workers.placement import UnplacedRequests
from scheduler_svc.workers.roster import Roster, ask_all
from scheduler_svc.workers.session import Session

_POLL_S = 0.1
"""How often to check whether requests still use a leaving adapter."""

log = structlog.get_logger()


class AdapterHolder(Protocol):
    """A worker that can load adapters: a `WorkerLink` that is being attached, or a `Session`."""

    async def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """Load an adapter; raise QuireError if the worker cannot."""

    async def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Unload exactly this adapter; raise QuireError if the worker cannot."""


class AdapterUse:
    """Tells whether requests use an adapter, including requests that may soon be resubmitted."""

    def __init__(self, roster: Roster, unplaced: UnplacedRequests) -> None:
        self._roster = roster
        self._unplaced = unplaced
        self._expected_since: float | None = None

    def expect(self) -> None:
        """Expect routers to resubmit live requests, which this scheduler does not know yet.

        Called when a router's stream has ended, and when a worker is attached after a time without
        any worker.
        """
        self._expected_since = asyncio.get_running_loop().time()

    def is_used(self, adapter: LoraAdapter) -> bool:
        """Return whether a request uses an adapter, or may use it.

        Every adapter counts as used while requests are expected (`expect`), because these requests
        may use any adapter. The same holds while a worker has requests of an earlier scheduler that
        no router has resubmitted yet.
        """
        now, since = asyncio.get_running_loop().time(), self._expected_since
        if since is not None and now < since + REUNION_S:
            return True
        salt = adapter_salt(adapter)
        return self._unplaced.has_with(salt) or any(
            session.call(lambda core: bool(core.takeover.unclaimed) or has_live_with(core, salt))
            for session in self._roster.sessions.values()
        )


def check_adapter(request: Request, held: Iterable[LoraAdapter]) -> None:
    """Check that the service holds a request's adapter, if the request has one.

    Raises:
        NotFoundError: The service no longer holds the adapter: the workers that had it were lost,
            and it could not be loaded again.
    """
    if request.cache_salt.startswith(ADAPTERS_SALT) and not any(
        request.cache_salt.startswith(adapter_salt(each)) for each in held
    ):
        raise NotFoundError(f"LoRA adapter of {request.request_id!r} is not served any more")


class Adapters:
    """The LoRA adapters of one scheduler's workers; changes happen one after another."""

    def __init__(
        self,
        roster: Roster,
        *,
        is_used: Callable[[LoraAdapter], bool],
        on_change: Callable[[Sequence[LoraAdapter]], None],
        kept: Iterable[LoraAdapter] = (),
        keep: Callable[[Sequence[LoraAdapter]], None] = lambda _: None,
    ) -> None:
        """`is_used` tells whether requests use an adapter.

        `on_change` is called with all offered adapters whenever an adapter is added to them, or
        taken from them.

        `kept` are the adapters that operators loaded at an earlier scheduler. `keep` gets the
        offered adapters that operators loaded, and stores them for the next start.
        """
        self._roster = roster
        self._is_used = is_used
        self._on_change = on_change
        self._held: dict[str, LoraAdapter] = {each.name: each for each in kept}
        self._by_operators = set(self._held.values())
        self._kept = self.held
        self._keep = keep
        self._leaving: set[str] = set()
        self._unloaded: set[LoraAdapter] = set()
        self._lock = asyncio.Lock()
        self._background = BackgroundTasks()
        self.offered: tuple[LoraAdapter, ...] = ()
        """The adapters that new requests may have, sorted by name."""

    @property
    def held(self) -> tuple[LoraAdapter, ...]:
        """The adapters that live requests may have, sorted by name."""
        return tuple(self._held[name] for name in sorted(self._held))

    def is_leaving(self, adapter: LoraAdapter) -> bool:
        """Return whether a held adapter is being unloaded."""
        return self._held.get(adapter.name) == adapter and adapter.name in self._leaving

    async def load(self, name: str, directory: str) -> LoadedAdapter:
        """Load an adapter at every worker, and offer it.

        Loading continues even if the caller is cancelled.

        Raises:
            UnavailableError: No worker is attached, or a worker is lost.
            FailedPreconditionError: An adapter of this name is leaving, or the workers found
                different contents in the directory.
            QuireError: A worker cannot load the adapter. Workers that did not have the adapter
                before have unloaded it again.
        """
        return await self._background.run(self._load(name, directory))

    async def unload(self, name: str, digest: bytes = b"") -> None:
        """Stop offering an adapter; unload it at every worker as soon as no request uses it.

        Unloading continues even if the caller is cancelled.

        Raises:
            NotFoundError: No adapter has this name and, unless `digest` is empty, this digest.
            FailedPreconditionError: The adapter is leaving already.
            QuireError: A worker cannot unload the adapter.
        """
        adapter = self._held.get(name)
        if adapter is None or digest not in (b"", adapter.digest):
            which = f" ({digest.hex()[:8]})" if digest else ""
            raise NotFoundError(f"LoRA adapter {name!r}{which} is not loaded")
        self._check_stays(name)
        self._leaving.add(name)
        self._publish()
        await self._background.run(self._unload(adapter))

    async def settle(self, target: str, worker: AdapterHolder, has: Iterable[LoraAdapter]) -> None:
        """Let a worker that is being attached hold the same adapters as the attached workers.

        Args:
            target: The new worker's address.
            worker: The new worker.
            has: The adapters that the new worker holds.

        Raises:
            UnavailableError: The workers cannot hold the same adapters, so the new worker cannot be
                used.
        """
        try:
            async with self._lock:
                await self._settle(target, worker, has)
        except QuireError as error:
            raise UnavailableError(f"worker {target} cannot join: {error}") from error
        finally:
            self._publish()

    def forget(self) -> None:
        """Forget all adapters: they belong to a model that is no longer served.

        Calls of `load` and `settle` that are in progress fail.
        """
        self._held = {}
        self._leaving.clear()
        self._unloaded.clear()
        self._publish()

    def stop(self) -> None:
        """Cancel the calls in progress; called when the sessions end."""
        self._background.stop()

    async def _load(self, name: str, directory: str) -> LoadedAdapter:
        async with self._lock:
            self._check_stays(name)
            held = self._held
            loaded = await self._load_at_all(name, directory)
            if loaded is None:
                raise UnavailableError("no worker is attached")
            self._check_same(held)
            self._held[name] = loaded.adapter
            self._unloaded.discard(loaded.adapter)
            self._by_operators.add(loaded.adapter)
        self._publish()
        log.info("adapter loaded", name=name, directory=directory, was_there=loaded.was_there)
        return loaded

    async def _unload(self, adapter: LoraAdapter) -> None:
        while True:
            if await self._unload_unused(adapter):
                break
            await asyncio.sleep(_POLL_S)

    async def _unload_unused(self, adapter: LoraAdapter) -> bool:
        """Unload an adapter if no request uses it; return whether it is gone."""
        async with self._lock:
            if not self.is_leaving(adapter):
                return True  # the adapter was dropped; another one may have its name now
            if self._is_used(adapter):
                return False
            self._drop(adapter)
            self._publish()
            _, errors = await ask_all(self._staying, lambda each: each.unload_adapter(adapter))
        for error in errors.values():
            # A lost worker unloads the adapter when it is attached again.
            if not isinstance(error, UnavailableError | NotFoundError):
                raise error
        log.info("adapter unloaded", name=adapter.name)
        return True

    async def _settle(self, target: str, worker: AdapterHolder, has: Iterable[LoraAdapter]) -> None:
        is_alone = not self._roster.sessions
        held = self._held
        kept: dict[str, LoraAdapter] = {}
        for adapter in has:
            if adapter in self._unloaded:
                await worker.unload_adapter(adapter)
                self._check_same(held)
                continue
            kept[adapter.name] = adapter
            own = held.get(adapter.name, adapter)
            if own != adapter and is_alone:  # the flags of the worker name a newer version
                self._replace(own, adapter)
            elif own != adapter:
                raise FailedPreconditionError(f"it holds {adapter}; this scheduler serves {own}")
        for name in sorted(held.keys() - kept.keys()):
            try:
                await self._load_same(worker, held[name])
            except QuireError as error:
                if not is_alone or isinstance(error, UnavailableError):
                    raise
                self._check_same(held)
                # Losing an adapter that no longer exists is better than losing the only worker.
                log.error("adapter lost", name=name, reason=str(error))  # noqa: TRY400
                self._drop(held[name])
            self._check_same(held)
        # Comes last, when this worker can no longer be refused, so that the others load only once.
        for name in sorted(kept.keys() - held.keys()):
            await self._share(target, worker, kept[name])
            self._check_same(held)

    async def _share(self, target: str, worker: AdapterHolder, adapter: LoraAdapter) -> None:
        """Load an adapter of `worker` at the other workers.

        If another worker cannot load the adapter, unload the adapter at `worker`.
        """
        held = self._held
        try:
            loaded = await self._load_at_all(adapter.name, adapter.directory)
            if loaded is not None and loaded.adapter != adapter:
                await _unload_at((each, loaded.adapter) for each in self._staying.values())
                raise FailedPreconditionError(
                    f"in {adapter.directory!r} the others found {loaded.adapter}"
                )
        except UnavailableError:
            raise  # a worker is lost; the next attempt leaves it out
        except QuireError as error:
            log.error(  # noqa: TRY400
                "an adapter is unloaded, because the other workers cannot load it",
                name=adapter.name,
                worker=target,
                reason=str(error),
            )
            await worker.unload_adapter(adapter)
        else:
            held[adapter.name] = adapter  # changes nothing if all adapters were forgotten by now

    async def _load_same(self, worker: AdapterHolder, adapter: LoraAdapter) -> None:
        loaded = await worker.load_adapter(adapter.name, adapter.directory)
        if loaded.adapter != adapter:
            await worker.unload_adapter(loaded.adapter)
            raise FailedPreconditionError(
                f"in {adapter.directory!r} it found {loaded.adapter}; this scheduler serves"
                f" {adapter}"
            )

    async def _load_at_all(self, name: str, directory: str) -> LoadedAdapter | None:
        """Load an adapter at every worker in `_staying`; return None if `_staying` is empty.

        If a worker cannot load the adapter, each worker that did not have it before unloads it.
        """
        sessions = self._staying
        loaded, errors = await ask_all(sessions, lambda each: each.load_adapter(name, directory))
        error = next(iter(errors.values()), None)
        if len({each.adapter for each in loaded.values()}) > 1:
            found = ", ".join(f"{each.adapter} at {worker}" for worker, each in loaded.items())
            error = error or FailedPreconditionError(f"directory {directory!r} differs: {found}")
        if error is not None:
            new = [(w, each.adapter) for w, each in loaded.items() if not each.was_there]
            await _unload_at((sessions[worker], adapter) for worker, adapter in new)
            raise error
        if not loaded:
            return None
        return LoadedAdapter(
            next(iter(loaded.values())).adapter, all(each.was_there for each in loaded.values())
        )

    @property
    def _staying(self) -> dict[str, Session]:
        """The sessions of the workers that are not about to end.

        Workers whose model is being unloaded are included, because the model may stay after all.
        """
        sessions = self._roster.sessions.items()
        return {worker: session for worker, session in sessions if not session.is_ending}

    def _check_stays(self, name: str) -> None:
        if name in self._leaving:
            raise FailedPreconditionError(f"LoRA adapter {name!r} is being unloaded")

    def _check_same(self, held: Mapping[str, LoraAdapter]) -> None:
        """Raise UnavailableError if `forget` was called after `held` was read from `_held`.

        Called after each await.
        """
        if held is not self._held:
            raise UnavailableError("another model is served now")

    def _drop(self, adapter: LoraAdapter) -> None:
        """Stop holding an adapter; a worker that returns with this adapter must unload it."""
        del self._held[adapter.name]
        self._leaving.discard(adapter.name)
        self._unloaded.add(adapter)

    def _replace(self, held: LoraAdapter, adapter: LoraAdapter) -> None:
        """Hold `adapter` instead of `held`, which has the same name."""
        if self.is_leaving(held):
            self._unloaded.add(held)
        self._leaving.discard(held.name)
        self._held[held.name] = adapter

    def _publish(self) -> None:
        offered = tuple(each for each in self.held if each.name not in self._leaving)
        if offered != self.offered:
            self.offered = offered
            self._on_change(offered)
        kept = tuple(each for each in offered if each in self._by_operators)
        if kept != self._kept:
            self._kept = kept
            self._by_operators = set(kept)
            self._keep(kept)


async def _unload_at(holdings: Iterable[tuple[AdapterHolder, LoraAdapter]]) -> None:
    """Unload adapters, and ignore failures.

    If a worker cannot be reached, `Adapters.settle` decides about the worker's adapters when the
    worker is attached again.
    """
    await asyncio.gather(
        *(worker.unload_adapter(adapter) for worker, adapter in holdings), return_exceptions=True
    )
