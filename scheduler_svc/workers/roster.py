"""The engines of all workers, a function to ask all workers, and a check that models agree."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

import structlog

from contract.errors import InvalidArgumentError, NotFoundError, QuireError, UnavailableError
from contract.info import ModelInfo, WorkerInfo
from scheduler_svc.core.compact.fragmentation import SpaceReport
from scheduler_svc.core.interface.config import SchedulerLoad
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.session import Session

_GRACE_S: Final = 30.0
"""How long a lost worker may take to return before the others may switch to another model."""

log = structlog.get_logger()

_Worker = TypeVar("_Worker")
_Answer = TypeVar("_Answer")


class Roster:
    """The engines, in the order in which they were added. Only `Fleet` changes the roster."""

    def __init__(self) -> None:
        self.engines: tuple[Engine, ...] = ()
        """The engines of all workers, attached or not."""

    def add(self, engine: Engine) -> None:
        self.engines = (*self.engines, engine)

    def remove(self, engine: Engine) -> None:
        self.engines = tuple(each for each in self.engines if each is not engine)

    def engine(self, worker: str) -> Engine:
        """Return the engine of a worker.

        Raises:
            NotFoundError: There is no such worker.
        """
        for engine in self.engines:
            if engine.target == worker:
                return engine
        known = ", ".join(engine.target for engine in self.engines)
        raise NotFoundError(f"worker {worker!r} is not one of this scheduler's: {known}")

    def chosen(self, worker: str) -> tuple[Engine, ...]:
        """Return the engine of `worker`, or all engines if `worker` is empty.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: There is no worker at all.
        """
        if worker:
            return (self.engine(worker),)
        if not self.engines:
            raise UnavailableError("no worker is found")
        return self.engines

    def unloaded(self, worker: str = "") -> tuple[str, ...]:
        """Return the workers whose model is unloaded; if `worker` is not empty, only that one."""
        return tuple(
            engine.target
            for engine in self.engines
            if engine.is_unloaded and worker in ("", engine.target)
        )

    @property
    def is_unloaded(self) -> bool:
        """Whether no worker is attached, and the model of at least one is unloaded."""
        return not self.sessions and bool(self.unloaded())

    @property
    def sessions(self) -> dict[str, Session]:
        """The sessions of the attached workers, by worker."""
        return {
            engine.target: engine.session for engine in self.engines if engine.session is not None
        }

    def attached(self, worker: str) -> Mapping[str, Session]:
        """Return the session of `worker`, or all sessions if `worker` is empty.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: The worker is not attached.
        """
        return {worker: self.engine(worker).attached_session()} if worker else self.sessions

    def loads(self) -> Mapping[str, SchedulerLoad | None]:
        """Return the load of each worker, or None for a worker that is not attached."""
        return {
            engine.target: engine.session.load() if engine.session is not None else None
            for engine in self.engines
        }

    def spaces(self) -> Mapping[str, SpaceReport]:
        """Measure how well the blocks of each attached worker are used."""
        return {worker: session.space() for worker, session in self.sessions.items()}

    def queued_by_tenant(self) -> Counter[str]:
        """Count the sequences that wait at attached workers, by tenant."""
        return sum((each.queued_by_tenant() for each in self.sessions.values()), Counter[str]())

    def oldest_step_ages_s(self) -> Mapping[str, float]:
        """Return for each attached worker how long its oldest step has been in flight."""
        return {worker: session.oldest_step_age_s() for worker, session in self.sessions.items()}

    def troubles(self) -> dict[str, str]:
        """Describe what is wrong with each worker that hangs or is lost."""
        troubles = {}
        for engine in self.engines:
            trouble = engine.loss if engine.session is None else engine.session.trouble()
            if trouble is not None:
                troubles[engine.target] = trouble
        return troubles


async def ask_all(
    workers: Mapping[str, _Worker], ask: Callable[[_Worker], Awaitable[_Answer]]
) -> tuple[dict[str, _Answer], dict[str, BaseException]]:
    """Ask all workers at once, and wait for all of them.

    Returns:
        The answers and the errors by worker, in the order of `workers`. An error names its worker.
    """
    ends = await asyncio.gather(*map(ask, workers.values()), return_exceptions=True)
    answers: dict[str, _Answer] = {}
    errors: dict[str, BaseException] = {}
    for worker, end in zip(workers, ends, strict=True):
        if isinstance(end, BaseException):
            errors[worker] = said_by(worker, end)
        else:
            answers[worker] = end
    return answers, errors


def said_by(worker: str, error: BaseException) -> BaseException:
    """Return a QuireError with the worker's name in its message; return other errors unchanged."""
    if isinstance(error, InvalidArgumentError):
        return InvalidArgumentError(error.field, f"{error.problem} (says worker {worker})")
    return type(error)(f"worker {worker}: {error}") if isinstance(error, QuireError) else error


class RequiredModel:
    """Checks that all workers have the same model as the first worker that was attached.

    When no worker has this model any more, the service can switch to another model.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._model: ModelInfo | None = None

    def accept(self, engine: Engine, info: WorkerInfo) -> bool:
        """Accept a worker; return whether the service has switched to another model.

        After an operator has unloaded a worker's model, the worker may return with another model.
        The service then switches to this model, unless a worker with the service's present model
        is attached, or was lost less than `_GRACE_S` seconds ago and may return.

        Raises:
            UnavailableError: The worker's model differs from the service's, and the service cannot
                switch.
        """
        model = replace(info.model, max_model_len=0, adapters=())  # only these fields may differ
        before = self._model
        if model == before:
            return False
        if before is not None:
            problem = f"worker {engine.target} holds {model}; this scheduler serves {before}"
            if self._roster.sessions or not engine.was_unloaded:
                raise UnavailableError(problem)
            if awaited := self._awaited(engine):
                raise UnavailableError(f"{problem}, and waits for {', '.join(awaited)}")
        self._model = model
        if before is not None:
            log.warning("another model is served", model=str(model), before=str(before))
        return before is not None

    def _awaited(self, newcomer: Engine) -> list[str]:
        """Return the lost workers that may soon return with the model that is served now."""
        since_s = time.monotonic() - _GRACE_S
        return [
            engine.target
            for engine in self._roster.engines
            if engine is not newcomer
            and not engine.was_unloaded
            and engine.lost_at_s is not None
            and engine.lost_at_s > since_s
        ]
