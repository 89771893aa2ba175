"""The engines of all workers, and what can be read of those that are attached."""

from collections import Counter
from collections.abc import Mapping

from contract.errors import NotFoundError, UnavailableError
from scheduler_svc.core.compact.fragmentation import SpaceReport
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.session import Session


class Roster:
    """Engines in the order in which they came. Its owner adds and removes; others read."""

    def __init__(self) -> None:
        self._engines: tuple[Engine, ...] = ()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Of all workers, attached or not."""
        return self._engines

    def add(self, engine: Engine) -> None:
        """Take on one more."""
        self._engines = (*self._engines, engine)

    def remove(self, engine: Engine) -> None:
        """Forget one."""
        self._engines = tuple(each for each in self._engines if each is not engine)

    def engine(self, worker: str) -> Engine:
        """Return a worker's.

        Raises:
            NotFoundError: There is no such worker.
        """
        for engine in self._engines:
            if engine.target == worker:
                return engine
        known = ", ".join(engine.target for engine in self._engines)
        raise NotFoundError(f"worker {worker!r} is not one of this scheduler's: {known}")

    def chosen(self, worker: str) -> tuple[Engine, ...]:
        """Return the engine of `worker`, or all of them if that is empty.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: There is none at all.
        """
        if worker:
            return (self.engine(worker),)
        if not self._engines:
            raise UnavailableError("no worker is found")
        return self._engines

    def unloaded(self, worker: str = "") -> tuple[str, ...]:
        """Return which workers have no model, of `worker`, or of all if that is empty."""
        return tuple(
            engine.target
            for engine in self._engines
            if engine.is_unloaded and worker in ("", engine.target)
        )

    @property
    def is_unloaded(self) -> bool:
        """Whether nobody can run anything, because models are unloaded."""
        return not self.sessions and bool(self.unloaded())

    @property
    def sessions(self) -> dict[str, Session]:
        """Those of the workers that are attached, by worker."""
        return {
            engine.target: engine.session for engine in self._engines if engine.session is not None
        }

    def attached(self, worker: str) -> Mapping[str, Session]:
        """Return the session of `worker`, or all of them if that is empty.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: It is not attached.
        """
        if not worker:
            return self.sessions
        engine = self.engine(worker)
        if engine.session is None:
            raise UnavailableError(f"worker {worker} is not attached: {engine.loss}")
        return {worker: engine.session}

    def loads(self) -> Mapping[str, SchedulerLoad | None]:
        """Snapshot each worker's core; None: not attached."""
        return {
            engine.target: engine.session.load() if engine.session is not None else None
            for engine in self._engines
        }

    def spaces(self) -> Mapping[str, SpaceReport]:
        """Look at the blocks of each worker that is attached."""
        return {worker: session.space() for worker, session in self.sessions.items()}

    def queued_by_tenant(self) -> Counter[str]:
        """Count the sequences that wait at an attached worker, by tenant."""
        return sum((each.queued_by_tenant() for each in self.sessions.values()), Counter[str]())

    def oldest_step_ages_s(self) -> Mapping[str, float]:
        """Say of each attached worker how long its oldest step has been in flight."""
        return {worker: session.oldest_step_age_s() for worker, session in self.sessions.items()}

    def troubles(self) -> dict[str, str]:
        """Say of each worker that hangs or is lost what is wrong."""
        troubles = {}
        for engine in self._engines:
            trouble = engine.loss if engine.session is None else engine.session.trouble()
            if trouble is not None:
                troubles[engine.target] = trouble
        return troubles
