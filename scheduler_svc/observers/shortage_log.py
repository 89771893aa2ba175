"""Logs when a worker runs short of memory or of contiguous blocks, and when it recovers."""

from asyncio import Future
from collections.abc import Iterable

import structlog

from contract.errors import QuireError
from contract.info import MemoryLevel
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.compact.fragmentation import FragmentationLevel
from scheduler_svc.core.interface.config import SchedulerLoad

log = structlog.get_logger()


def log_memory_level(
    worker: str, level: MemoryLevel, before: MemoryLevel, load: SchedulerLoad
) -> None:
    """Log a change of a worker's memory level; `load` is the load after the change."""
    is_ok = level is MemoryLevel.OK
    write = log.info if is_ok else log.warning
    write(
        "a worker has enough memory again" if is_ok else "a worker's memory is short",
        worker=worker,
        level=level.name,
        before=before.name,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
    )


class SpaceWatch:
    """Logs the defragmentation reports of one core, and answers operators who wait for them."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._level = FragmentationLevel.LOW
        self._waiting: list[Future[DefragmentationReport]] = []

    def answer_next(self, done: Future[DefragmentationReport]) -> None:
        """Set the result of `done` to the report of the next defragmentation pass that ends."""
        self._waiting.append(done)

    def on_reports(self, reports: Iterable[DefragmentationReport]) -> None:
        """Log each completed pass, and the moment when fragmentation becomes high."""
        for report in reports:
            if report.has_moved:
                log.info(
                    "blocks were defragmented",
                    worker=self._worker,
                    rate_before=round(report.before.rate, 4),
                    rate_after=round(report.after.rate, 4),
                    num_moved_blocks=report.num_moved_blocks,
                )
                for done in self._take_waiting():
                    done.set_result(report)
            level, before = report.after.level, self._level
            self._level = level
            if level is FragmentationLevel.HIGH and before is not level:
                log.warning(
                    "free blocks are scattered",
                    worker=self._worker,
                    rate=round(report.after.rate, 4),
                    num_free_blocks=report.after.num_free_blocks,
                    longest_free_run=report.after.longest_free_run,
                )

    def on_lost(self, error: QuireError) -> None:
        """Fail the operators' calls that still wait for a defragmentation pass."""
        for done in self._take_waiting():
            done.set_exception(error)

    def _take_waiting(self) -> list[Future[DefragmentationReport]]:
        waiting, self._waiting = self._waiting, []
        return [done for done in waiting if not done.done()]  # the other calls were cancelled
