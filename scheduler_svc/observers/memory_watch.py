"""Tells a core how short its worker's memory is, and the log what becomes of it."""

import structlog

from contract.info import MemoryLevel
from scheduler_svc.core.pressed import PressedScheduler

log = structlog.get_logger()


class MemoryWatch:
    """Hears of one worker's memory; the level is an input of the core, so that it is recorded."""

    def __init__(self, worker: str, core: PressedScheduler) -> None:
        self._worker = worker
        self._core = core
        self._level = MemoryLevel.OK

    def hear(self, level: MemoryLevel) -> None:
        """Take the level as it is now; between two steps."""
        before, self._level = self._level, level
        if level is before:
            return
        self._core.set_memory_level(level)
        load = self._core.load()
        tell = log.info if level is MemoryLevel.OK else log.warning
        tell(
            "a worker's memory is enough again"
            if level is MemoryLevel.OK
            else "a worker's memory is short",
            worker=self._worker,
            level=level.name,
            before=before.name,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
        )
