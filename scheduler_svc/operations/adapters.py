"""Which LoRA adapters the service has: all its workers hold the same, and routers know which.

An adapter is *held* once every attached worker has it, and *offered* until it is to be unloaded. It
is *leaving* from then until no live request has it: a request that is preempted, moved, or comes
again after a loss must find it at any worker.

What the service holds is what any of its workers held when it was attached and the others could
load, too, and what was loaded since, but for what was unloaded here or was lost.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog

from contract.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    UnavailableError,
)
from contract.lora import LoadedAdapter, LoraAdapter
from rpc.tasks.shielded import Finishing
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_LOOK_S = 0.1
"""How often it is looked whether requests still have an adapter that leaves."""

log = structlog.get_logger()


class AdapterHolder(Protocol):
    """A worker that is attached: a `WorkerLink`, or the `Session` that has it."""

    async def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """Have it load an adapter; raises QuireError."""

    async def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Have it unload one, and no other of the name; raises QuireError."""


class Adapters:
    """The adapters of one scheduler's workers; what changes them goes one after another."""

    def __init__(
        self,
        roster: Roster,
        *,
        is_used: Callable[[LoraAdapter], bool],
        on_change: Callable[[Sequence[LoraAdapter]], None],
    ) -> None:
        """`is_used` says whether a live request has it; `on_change` is told what is offered."""
        self._roster = roster
        self._is_used = is_used
        self._on_change = on_change
        self._held: dict[str, LoraAdapter] = {}
        self._leaving: set[str] = set()
        self._unloaded: set[LoraAdapter] = set()
        self._lock = asyncio.Lock()
        self._finishing = Finishing()
        self.offered: tuple[LoraAdapter, ...] = ()
        """Those that new requests may have, in the order of their names."""

    @property
    def held(self) -> tuple[LoraAdapter, ...]:
        """Those that requests which have begun may have, in the order of their names."""
        return tuple(self._held[name] for name in sorted(self._held))

    def is_leaving(self, adapter: LoraAdapter) -> bool:
        """Say whether one that is held is to be unloaded."""
        return self._held.get(adapter.name) == adapter and adapter.name in self._leaving

    async def load(self, name: str, directory: str) -> LoadedAdapter:
        """Have every worker load an adapter, and offer it; it goes on if the caller leaves.

        Raises:
            UnavailableError: No worker is attached that stays, or one is lost.
            FailedPreconditionError: One of this name is leaving, or the workers found others each.
            QuireError: What a worker says. None has it then that had not before.
        """
        return await self._finishing.finish(self._load(name, directory))

    async def unload(self, name: str, digest: bytes = b"") -> None:
        """Offer an adapter no more; when no request has it, have every worker unload it.

        It goes on if the caller leaves.

        Raises:
            NotFoundError: There is none of this name; nor of this digest, unless that is empty.
            FailedPreconditionError: It is leaving already.
            QuireError: A worker would not let it go.
        """
        adapter = self._held.get(name)
        if adapter is None or digest not in (b"", adapter.digest):
            which = f" ({digest.hex()[:8]})" if digest else ""
            raise NotFoundError(f"LoRA adapter {name!r}{which} is not loaded")
        self._check_stays(name)
        self._leaving.add(name)
        self._tell()
        await self._finishing.finish(self._unload(adapter))

    async def settle(self, target: str, worker: AdapterHolder, has: Iterable[LoraAdapter]) -> None:
        """Let a worker that is being attached, and those that are, hold the same.

        Args:
            target: The worker's.
            worker: It.
            has: What it says that it holds.

        Raises:
            UnavailableError: It cannot be, and the worker is of no use.
        """
        try:
            async with self._lock:
                await self._settle(target, worker, has)
        except QuireError as error:
            raise UnavailableError(f"worker {target} does not fit: {error}") from error
        finally:
            self._tell()

    def forget(self) -> None:
        """Offer none: those that there are belong to a model that is served no more.

        What is under way for that one fails when it next comes to hold something.
        """
        self._held = {}
        self._leaving.clear()
        self._unloaded.clear()
        self._tell()

    def stop(self) -> None:
        """Give up what is under way; the sessions end."""
        self._finishing.stop()

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
        self._tell()
        log.info("adapter loaded", name=name, directory=directory, was_there=loaded.was_there)
        return loaded

    async def _unload(self, adapter: LoraAdapter) -> None:
        while True:
            if await self._unload_unused(adapter):
                break
            await asyncio.sleep(_LOOK_S)

    async def _unload_unused(self, adapter: LoraAdapter) -> bool:
        """Whether it is gone; if no request has it, the workers let it go."""
        async with self._lock:
            if not self.is_leaving(adapter):
                return True  # it was dropped; what has its name now is not what was to go
            if self._is_used(adapter):
                return False
            self._drop(adapter)
            self._tell()
            sessions = self._staying
            ends = await asyncio.gather(
                *(session.unload_adapter(adapter) for session in sessions.values()),
                return_exceptions=True,
            )
        for worker, end in zip(sessions, ends, strict=True):
            if isinstance(end, UnavailableError | NotFoundError):
                continue  # it is lost, and told when it is attached again; or has let it go
            if isinstance(end, BaseException):
                raise said_by(worker, end)
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
            if own != adapter and is_alone:  # its flags name a newer one
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
                # The only worker is worth more than an adapter that is there no more.
                log.error("adapter lost", name=name, reason=str(error))  # noqa: TRY400
                self._drop(held[name])
            self._check_same(held)
        # Last, so that the others are asked once: it will not be refused any more.
        for name in sorted(kept.keys() - held.keys()):
            await self._share(target, worker, kept[name])
            self._check_same(held)

    async def _share(self, target: str, worker: AdapterHolder, adapter: LoraAdapter) -> None:
        """Have the others load what only `worker` has; if one refuses, nobody has it."""
        held = self._held
        try:
            loaded = await self._load_at_all(adapter.name, adapter.directory)
            if loaded is not None and loaded.adapter != adapter:
                await _unload_at((each, loaded.adapter) for each in self._staying.values())
                raise FailedPreconditionError(
                    f"in {adapter.directory!r} the others found {loaded.adapter}"
                )
        except UnavailableError:
            raise  # one is lost, and the next try is without it
        except QuireError as error:
            log.error(  # noqa: TRY400
                "adapter of one worker alone", name=adapter.name, worker=target, reason=str(error)
            )
            await worker.unload_adapter(adapter)
        else:
            held[adapter.name] = adapter  # which nobody reads if they are forgotten meanwhile

    async def _load_same(self, worker: AdapterHolder, adapter: LoraAdapter) -> None:
        loaded = await worker.load_adapter(adapter.name, adapter.directory)
        if loaded.adapter != adapter:
            await worker.unload_adapter(loaded.adapter)
            raise FailedPreconditionError(
                f"in {adapter.directory!r} it found {loaded.adapter}; this scheduler serves"
                f" {adapter}"
            )

    async def _load_at_all(self, name: str, directory: str) -> LoadedAdapter | None:
        """Load at each worker that is attached and stays, or at none; None: there is none."""
        sessions = self._staying
        ends = await asyncio.gather(
            *(session.load_adapter(name, directory) for session in sessions.values()),
            return_exceptions=True,
        )
        by_worker = dict(zip(sessions, ends, strict=True))
        loaded = {w: end for w, end in by_worker.items() if isinstance(end, LoadedAdapter)}
        error: BaseException | None = None
        for worker, end in by_worker.items():
            if isinstance(end, BaseException):
                error = error or said_by(worker, end)
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
        """The sessions of the workers that are not about to end: those take nothing new.

        One whose model is to be unloaded is among them: if it stays, it holds what the others do.
        """
        sessions = self._roster.sessions.items()
        return {worker: session for worker, session in sessions if not session.is_ending}

    def _check_stays(self, name: str) -> None:
        if name in self._leaving:
            raise FailedPreconditionError(f"LoRA adapter {name!r} is being unloaded")

    def _check_same(self, held: Mapping[str, LoraAdapter]) -> None:
        """Look, after waiting, whether those are still what is held."""
        if held is not self._held:
            raise UnavailableError("another model is served now")

    def _drop(self, adapter: LoraAdapter) -> None:
        """Hold one no more; whoever comes with it unloads it."""
        del self._held[adapter.name]
        self._leaving.discard(adapter.name)
        self._unloaded.add(adapter)

    def _replace(self, held: LoraAdapter, adapter: LoraAdapter) -> None:
        """Hold another of the name; the one before may come back, unless it was leaving."""
        if self.is_leaving(held):
            self._unloaded.add(held)
        self._leaving.discard(held.name)
        self._held[held.name] = adapter

    def _tell(self) -> None:
        offered = tuple(each for each in self.held if each.name not in self._leaving)
        if offered != self.offered:
            self.offered = offered
            self._on_change(offered)


async def _unload_at(holdings: Iterable[tuple[AdapterHolder, LoraAdapter]]) -> None:
    """Have what some hold gone, as far as they can be reached: one that is lost settles again."""
    await asyncio.gather(
        *(worker.unload_adapter(adapter) for worker, adapter in holdings), return_exceptions=True
    )


def said_by(worker: str, error: BaseException) -> BaseException:
    """Name the worker in what it has refused."""
    if isinstance(error, InvalidArgumentError):
        return InvalidArgumentError(error.field, f"{error.problem} (says worker {worker})")
    return type(error)(f"worker {worker}: {error}") if isinstance(error, QuireError) else error
