"""A scheduler core that makes do with less while its worker's memory is short.

What that means in numbers is `pressure.Pressure`'s. Nothing is refused or lost: who may not start
waits in its place, and who is preempted draws the same later, as after any preemption.
"""

from contract.info import MemoryLevel
from contract.step import Plan, StepId
from scheduler_svc.core.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.pressure import Pressure
from scheduler_svc.core.reports.load import read_load
from scheduler_svc.core.scheduler import Scheduler


class PressedScheduler(Scheduler):
    """The sequences and blocks of one worker, whose memory others may take, too."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._pressure = Pressure()
        self._num_memory_preemptions = 0

    def set_memory_level(self, level: MemoryLevel) -> None:
        """Learn how short the worker's memory is; the next step is planned by it."""
        self._pressure.change(level, self._num_taken_rows)

    def load(self) -> SchedulerLoad:
        """See `Scheduler`."""
        return read_load(self, self._pressure.level, self._num_memory_preemptions)

    def schedule(
        self,
        now: float,
        max_paced_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Plan | None:
        """See `Scheduler`; the bounds of pressure hold besides."""
        self._pressure.look(now, self._num_taken_rows)
        bound = self._pressure.max_prompt_tokens(self.config.max_num_batched_tokens)
        bounds = [each for each in (max_prompt_tokens, bound) if each is not None]
        return super().schedule(now, max_paced_tokens, min(bounds, default=None))

    @property
    def has_too_many(self) -> bool:
        """Whether somebody must be preempted for the sake of the worker's memory."""
        most = self._pressure.max_running
        if most is None or len(self._running) + self._beams.num_spares <= most:
            return False
        return bool(self._running) and not self._running.is_alone

    # --- parts of a step ------------------------------------------------------------------------

    def _make_room(self, step: StepId) -> bool:
        """See `Scheduler`; first in the worker's memory.

        Nobody goes to the host if that is the same memory.
        """
        while self.has_too_many:
            can_swap = not self.config.host_is_device_memory
            self._num_memory_preemptions += 1
            self._preempt(self._running.last(self._rank), can_swap=can_swap)
        return super()._make_room(step)

    def _has_room(self, num_blocks: int, num_rows: int = 1) -> bool:
        """See `Scheduler`; who starts when nothing runs needs no other leave."""
        most = self._pressure.max_running
        if most is not None and self._running and self._num_taken_rows + num_rows > most:
            return False
        return super()._has_room(num_blocks, num_rows)

    @property
    def _num_taken_rows(self) -> int:
        """Of sequences that run, of beams that are to, and of those that may be claimed."""
        return len(self._running) + self._rows.num_reserved
