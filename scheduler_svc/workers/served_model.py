"""Which model a scheduler serves: that of its first worker, until no worker has it any more."""

import time
from dataclasses import replace
from typing import Final

import structlog

from contract.errors import UnavailableError
from contract.info import ModelInfo, WorkerInfo
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.roster import Roster

_GRACE_S: Final = 30.0
"""How long a worker that is lost, not unloaded, may be away before another model is served."""

log = structlog.get_logger()


class ServedModel:
    """What all workers must have."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._model: ModelInfo | None = None

    def accept(self, engine: Engine, info: WorkerInfo) -> bool:
        """Take a worker on; whether another model than before is served from now on.

        A worker that comes back with another one, since an operator had it unload and load, is
        taken on if nobody has the one before: neither is attached, nor was lost a moment ago.

        Raises:
            UnavailableError: It holds another model than this scheduler serves.
        """
        model = replace(info.model, max_model_len=0, adapters=())  # these alone may differ
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
        """Return who had the model and may soon be back with it."""
        since_s = time.monotonic() - _GRACE_S
        return [
            engine.target
            for engine in self._roster.engines
            if engine is not newcomer
            and not engine.was_unloaded
            and engine.lost_at_s is not None
            and engine.lost_at_s > since_s
        ]
