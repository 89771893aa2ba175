"""Taking a running sequence's device blocks: what becomes of its KV, and of the sequence."""

from scheduler_svc.core.beams.live_searches import BeamGroups
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.tiers.host_room import HostRoom


class Preempting:
    """Has running sequences wait; whom, and when, the scheduler says."""

    def __init__(
        self,
        config: SchedulerConfig,
        rows: Rows,
        running: RunningSet,
        beams: BeamGroups,
        host_room: HostRoom,
        waiting: WaitingQueue,
    ) -> None:
        self.num_preemptions = 0
        self._block_size = config.block_size
        self._rows = rows
        self._running = running
        self._beams = beams
        self._host_room = host_room
        self._waiting = waiting

    def preempt(self, seq: Sequence, *, can_swap: bool = True, must_swap: bool = False) -> None:
        """Take a running sequence's device blocks; it waits, and its KV with it or not at all.

        Tokens of steps in flight are dropped: it will draw the same again. A search waits whole.
        """
        self.num_preemptions += 1
        if seq.group is not None:
            self._waiting.push(self._beams.preempt(seq.group))
            return
        assert seq.row is not None
        seq.token_ids = self._rows.tokens(seq.row).copy()
        num_computed = self._running.num_computed_tokens(seq)
        blocks = seq.block_ids[: -(-num_computed // self._block_size)]
        if seq.copy_from is not None:  # its own copy has not been made
            blocks[-1] = seq.copy_from
        is_loading = bool(seq.loading_block_ids)
        num_swapped_out = 0
        self._running.stop(seq)
        if not can_swap:
            self._host_room.release(seq)
        elif is_loading:  # as before: it comes from its own host blocks, or from cached ones
            num_computed = num_computed if seq.host_block_ids else 0
        elif num_computed and (
            must_swap or self._host_room.make_for_swap(len(blocks), num_computed)
        ):
            self._running.swap_out(seq, blocks, num_computed)
            num_swapped_out = len(blocks)
        self._running.note_preempted(seq, num_computed, num_swapped_out)
        seq.num_computed_tokens = num_computed
        seq.move(SeqStatus.SWAPPED if seq.host_block_ids else SeqStatus.WAITING)
        self._waiting.push(seq)
