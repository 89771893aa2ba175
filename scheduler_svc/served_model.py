"""Which model a scheduler serves: that of its first worker, until no worker has it any more."""

from dataclasses import replace

import structlog

from rpc.errors import UnavailableError
from scheduler_svc.domain import ModelInfo, WorkerInfo
from scheduler_svc.engine import Engine
from scheduler_svc.roster import Roster

log = structlog.get_logger()


class ServedModel:
    """What all workers must have."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._model: ModelInfo | None = None

    def accept(self, engine: Engine, info: WorkerInfo) -> bool:
        """Take a worker on; whether another model than before is served from now on.

        A worker that comes back with another one, since an operator had it unload and load, is
        taken on if nobody is attached that has the one before.

        Raises:
            UnavailableError: It holds another model than this scheduler serves.
        """
        model = replace(info.model, max_model_len=0, adapters=())  # these alone may differ
        before = self._model
        if model == before:
            return False
        if before is not None and (self._roster.sessions or not engine.was_unloaded):
            raise UnavailableError(
                f"worker {engine.target} holds {model}; this scheduler serves {before}"
            )
        self._model = model
        if before is not None:
            log.warning("another model is served", model=str(model), before=str(before))
        return before is not None
