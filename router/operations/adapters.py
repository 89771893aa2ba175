"""Has the schedulers load and unload LoRA adapters, for operators."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import structlog

from contract.errors import InvalidArgumentError, NotFoundError, QuireError
from router.domain import HeldAdapter, LoadedAdapter
from router.schedulers.pool import Schedulers
from router.schedulers.questions import SchedulerQuestions
from router.schedulers.served_model import ServedModel
from rpc.security.operators import Operators
from rpc.tasks import BackgroundTasks

_NEWS_S: Final = 5.0
"""How long a scheduler's news of what it has answered may take."""

_T = TypeVar("_T")

log = structlog.get_logger()


class Adapters:
    """Every method takes the `peer` that calls, as `Operators.check` wants it, and raises as that.

    And `UnavailableError` while there is no scheduler, and what the schedulers refuse. What changes
    them is not begun while one of them is away, and goes on if the caller leaves.
    """

    def __init__(self, schedulers: Schedulers, model: ServedModel, operators: Operators) -> None:
        self._schedulers = schedulers
        self._model = model
        self._operators = operators
        self._finishing = BackgroundTasks()

    async def load(self, name: str, directory: str, peer: str) -> LoadedAdapter:
        """Have every scheduler load an adapter; from then on requests may name it.

        If one refuses, none has it that had not before. Raises `InvalidArgumentError` for a name
        that is the model's.
        """
        self._operators.check(peer, "loads LoRA adapters")
        log.info("told to load an adapter", name=name, directory=directory, peer=peer)
        if name == self._model.name:
            raise InvalidArgumentError(
                "name", f"is {name!r}, which is what requests call the model"
            )
        schedulers = self._schedulers.all_questions()
        return await self._finishing.run(self._load(schedulers, name, directory))

    async def unload(self, name: str, peer: str, digest: bytes = b"") -> None:
        """Have every scheduler unload an adapter; returns when no request has it any more.

        Raises `NotFoundError` if none has one of that name, and digest, unless that is empty.
        """
        self._operators.check(peer, "unloads LoRA adapters")
        log.info("told to unload an adapter", name=name, peer=peer)
        schedulers = self._schedulers.all_questions()
        ends = await self._finishing.run(
            _ask(schedulers, lambda each: each.unload_adapter(name, digest))
        )
        errors = [end for end in ends if isinstance(end, QuireError)]
        if all(isinstance(error, NotFoundError) for error in errors) and len(errors) < len(ends):
            return
        raise next((e for e in errors if not isinstance(e, NotFoundError)), errors[0])

    async def held(self, peer: str) -> Sequence[HeldAdapter]:
        """Which the schedulers have; each name once, in order."""
        self._operators.check(peer, "tells of LoRA adapters")
        ends = await _ask(self._schedulers.questions, lambda each: each.adapters())
        name_to_adapter: dict[str, HeldAdapter] = {}
        for end in ends:
            if isinstance(end, QuireError):
                raise end
            for each in end:
                name_to_adapter.setdefault(each.adapter.name, each)
        return [name_to_adapter[name] for name in sorted(name_to_adapter)]

    async def _load(
        self, schedulers: Sequence[SchedulerQuestions], name: str, directory: str
    ) -> LoadedAdapter:
        ends = await _ask(schedulers, lambda each: each.load_adapter(name, directory))
        loaded = [end for end in ends if isinstance(end, LoadedAdapter)]
        if len(loaded) < len(ends):
            new = {
                scheduler: end.adapter.digest
                for scheduler, end in zip(schedulers, ends, strict=True)
                if isinstance(end, LoadedAdapter) and not end.was_there
            }
            await _ask([*new], lambda each: each.unload_adapter(name, new[each]))
            raise next(end for end in ends if isinstance(end, QuireError))
        adapter = loaded[0].adapter
        with contextlib.suppress(TimeoutError):  # its news are on another stream
            async with asyncio.timeout(_NEWS_S):
                while not self._model.has(adapter):
                    await self._schedulers.model_change()
        return LoadedAdapter(adapter, was_there=all(each.was_there for each in loaded))


async def _ask(
    schedulers: Sequence[SchedulerQuestions], ask: Callable[[SchedulerQuestions], Awaitable[_T]]
) -> list[_T | QuireError]:
    """What each has answered, or refused."""

    async def one(scheduler: SchedulerQuestions) -> _T | QuireError:
        try:
            return await ask(scheduler)
        except QuireError as error:
            return error

    return await asyncio.gather(*map(one, schedulers))
