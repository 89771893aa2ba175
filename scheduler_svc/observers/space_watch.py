"""Tells of a worker's block space: log lines, and answers to who asked for defragmentation."""

from asyncio import Future
from collections.abc import Iterable

import structlog

from contract.errors import QuireError
from scheduler_svc.core.compact.defragment import DefragmentationReport
from scheduler_svc.core.compact.fragmentation import FragmentationLevel

log = structlog.get_logger()


class SpaceWatch:
    """Hears what one core's defragmenter reports."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._level = FragmentationLevel.LOW
        self._waiting: list[Future[DefragmentationReport]] = []

    def answer_next(self, done: Future[DefragmentationReport]) -> None:
        """Set `done` when the next pass ends."""
        self._waiting.append(done)

    def hear(self, reports: Iterable[DefragmentationReport]) -> None:
        """Say what is worth saying."""
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

    def end(self, error: QuireError) -> None:
        """Fail who still waits."""
        for done in self._take_waiting():
            done.set_exception(error)

    def _take_waiting(self) -> list[Future[DefragmentationReport]]:
        waiting, self._waiting = self._waiting, []
        return [done for done in waiting if not done.done()]  # else who asked has gone
