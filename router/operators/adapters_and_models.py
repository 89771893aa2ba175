"""Operators' calls that load and unload LoRA adapters and models.

The router calls every scheduler of a model and combines the answers into one. Answers are messages
of `quire.v1.AdapterService` and `LoadingService`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

import structlog

from contract.errors import InvalidArgumentError, NotFoundError, QuireError
from quire.v1 import adapters_pb2, loading_pb2
from router.request.cells import Cells
from router.request.inference import Inference
from router.schedulers.loading import LoadingCalls
from rpc.security.operators import Operators
from rpc.security.tls import ClientTls
from rpc.tasks import BackgroundTasks

_ANNOUNCE_S: Final = 5.0
"""Longest wait until a scheduler announces on its stream what was loaded or unloaded."""

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")

log = structlog.get_logger()


async def _ask_each(
    schedulers: Sequence[_Asked], ask: Callable[[_Asked], Awaitable[_Answer]]
) -> list[_Answer | QuireError]:
    """Ask all schedulers concurrently; return each scheduler's answer or error, in order."""

    async def one(scheduler: _Asked) -> _Answer | QuireError:
        try:
            return await ask(scheduler)
        except QuireError as error:
            return error

    return await asyncio.gather(*map(one, schedulers))


async def _until_announced(cell: Inference, is_announced: Callable[[], bool]) -> None:
    """Wait until `is_announced` is true, but at most for `_ANNOUNCE_S`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ANNOUNCE_S):
            while not is_announced():
                await cell.schedulers.model_change()


class Operations:
    """The operators' calls. Every method first checks that `peer` is an operator.

    All methods may raise a scheduler's error; they raise `UnavailableError` if there is no
    scheduler. A change of adapters does not start if a scheduler has just disconnected, because the
    scheduler could return without the change. Once started, the change continues even if the caller
    leaves.

    Models are loaded through separate channels, because the router's link to a scheduler closes
    when the scheduler's model changes.
    """

    def __init__(self, cells: Cells, operators: Operators, tls: ClientTls | None = None) -> None:
        self._cells = cells
        self._operators = operators
        self._loading = LoadingCalls(tls)
        self._tasks = BackgroundTasks()

    # --- adapters -------------------------------------------------------------------------------

    async def load_adapter(
        self, name: str, directory: str, peer: str, model: str = ""
    ) -> adapters_pb2.LoadAdapterResponse:
        """Load an adapter at every scheduler of a model; from then on requests may name it.

        If one scheduler refuses, every scheduler that did not have the adapter before this call
        unloads it. Raises `InvalidArgumentError` if `name` is the name of a model, or of another
        model's adapter.
        """
        self._operators.check(peer, "loads LoRA adapters")
        log.info("an operator loads an adapter", name=name, directory=directory, peer=peer)
        cell = self._cells.only(model)
        for each in self._cells.all:
            if name == each.model.name:
                raise InvalidArgumentError("name", f"is {name!r}, which is the name of the model")
            if each is not cell and each.model.has_adapter(name):
                raise InvalidArgumentError(
                    "name", f"is {name!r}, which is an adapter of {each.model.name!r}"
                )
        return await self._tasks.run(self._load_adapter(cell, name, directory))

    async def _load_adapter(
        self, cell: Inference, name: str, directory: str
    ) -> adapters_pb2.LoadAdapterResponse:
        schedulers = cell.schedulers.calls_to_all()
        ends = await _ask_each(schedulers, lambda each: each.load_adapter(name, directory))
        errors = [end for end in ends if isinstance(end, QuireError)]
        loaded = [end for end in ends if not isinstance(end, QuireError)]
        if errors:
            new = {
                scheduler: end.adapter.digest
                for scheduler, end in zip(schedulers, ends, strict=True)
                if not isinstance(end, QuireError) and not end.was_there
            }
            await _ask_each([*new], lambda each: each.unload_adapter(name, new[each]))
            raise errors[0]
        adapter = loaded[0].adapter
        await _until_announced(cell, lambda: cell.model.has(adapter.name, adapter.digest))
        return adapters_pb2.LoadAdapterResponse(
            adapter=adapter, was_there=all(each.was_there for each in loaded)
        )

    async def unload_adapter(
        self, name: str, peer: str, digest: bytes = b"", model: str = ""
    ) -> None:
        """Unload an adapter at every scheduler; return once no request uses it.

        An empty `model` means the model that has the adapter.

        Raises `NotFoundError` if no scheduler has an adapter with this name and digest. An empty
        `digest` matches any contents.
        """
        self._operators.check(peer, "unloads LoRA adapters")
        log.info("an operator unloads an adapter", name=name, peer=peer)
        cell = self._cells.of(model or name)
        schedulers = cell.schedulers.calls_to_all()
        ends = await self._tasks.run(
            _ask_each(schedulers, lambda each: each.unload_adapter(name, digest))
        )
        errors = [end for end in ends if isinstance(end, QuireError)]
        if all(isinstance(error, NotFoundError) for error in errors) and len(errors) < len(ends):
            # Otherwise a later `load_adapter` could take the old announcement for its own.
            await _until_announced(
                cell,
                lambda: (
                    not (cell.model.has(name, digest) if digest else cell.model.has_adapter(name))
                ),
            )
            return
        raise next((e for e in errors if not isinstance(e, NotFoundError)), errors[0])

    async def list_adapters(
        self, peer: str, model: str = ""
    ) -> Sequence[adapters_pb2.LoadedAdapter]:
        """Return the adapters at the connected schedulers of a model, sorted by name.

        An empty `model` means all models.
        """
        self._operators.check(peer, "lists LoRA adapters")
        cells = self._cells.some(model)
        schedulers = [calls for cell in cells for calls in cell.schedulers.target_to_calls.values()]
        if not schedulers:
            raise cells[0].schedulers.unavailable()
        ends = await _ask_each(schedulers, lambda each: each.list_adapters())
        name_to_adapter: dict[str, adapters_pb2.LoadedAdapter] = {}
        for end in ends:
            if isinstance(end, QuireError):
                raise end
            for each in end:
                name_to_adapter.setdefault(each.adapter.name, each)
        return [name_to_adapter[name] for name in sorted(name_to_adapter)]

    # --- models ---------------------------------------------------------------------------------

    async def unload_models(
        self, worker: str, peer: str, model: str = ""
    ) -> Sequence[loading_pb2.UnloadedWorker]:
        """Unload the model of `worker` or, if `worker` is "", of all workers that have `model`."""
        self._operators.check(peer, "unloads models")
        log.info("an operator unloads models", worker=worker, model=model, peer=peer)
        return await self._loading.unload(self._targets(worker, model), worker)

    def _targets(self, worker: str, model: str) -> Mapping[str, bool]:
        """Return all known schedulers of a model, and whether each is connected.

        With a worker but no model, returns the schedulers of all models, because one of them has
        the worker.
        """
        cells = self._cells.all if worker and not model else [self._cells.only(model)]
        targets = {
            target: is_connected
            for cell in cells
            for target, is_connected in cell.schedulers.target_to_is_connected.items()
        }
        if not targets:
            raise cells[0].schedulers.unavailable()
        return targets

    async def load_models(
        self, worker: str, directory: str, peer: str, model: str = ""
    ) -> AsyncGenerator[loading_pb2.LoadResponse]:
        """Load a model at a worker, or at all workers of `model` if `worker` is empty.

        Yields progress.
        """
        self._operators.check(peer, "loads models")
        log.info(
            "an operator loads models", worker=worker, directory=directory, model=model, peer=peer
        )
        loads = self._loading.load(self._targets(worker, model), worker, directory)
        async with aclosing(loads):
            async for progress in loads:
                yield progress
