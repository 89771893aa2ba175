"""Preempts running sequences, and decides when, which, and how.

When and which: `make_room` runs at the start of each step. While more sequences run than the
worker's memory allows (`limits/memory_pressure.py`), or the running sequences need more blocks than
are available, it preempts the sequence that is last in the policy's order. If blocks are short,
there are two cases in which `make_room` drops pins before it preempts a sequence: if there is a
host tier, because the content of the pinned blocks can move there, and if only one sequence runs,
because its preemption would help no other running sequence. Two kinds of sequences are preempted at
other times: a sequence whose blocks could not be swapped in, and the running sequences of a request
that moves to another core.

How: a *swap* copies the sequence's computed blocks to host blocks, which the sequence holds until
it runs again; a *recompute* drops the blocks, and their tokens are computed again.
`preemption_mode` names one of the two, or lets the estimated time decide (`tiers/costs.py`); a swap
also needs room on the host (`tiers/host_room.py`). Beam searches and pooling requests are always
recomputed. If a sequence is preempted while its blocks are still being swapped in, nothing is
copied, because its KV is still on the host. With recurrent layers, a swap copies only up to the
last full block with a recurrent state (a *checkpoint*); the tokens after the checkpoint are
computed again. The tokens that steps in flight sample for the sequence are dropped, and drawn again
later with the same result.
"""

from collections.abc import Callable

from contract.step import StepId
from scheduler_svc.core.beams.live_searches import BeamGroups
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.limits.memory_pressure import Pressure
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.kv_groups import KvGroups
from scheduler_svc.core.space.pins import Pins
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.tiers.host_room import HostRoom


class Preemption:
    """Takes rows and device blocks from running sequences and queues the sequences again."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        groups: KvGroups,
        pool: BlockPool[DeviceBlockId],
        pins: Pins,
        rows: Rows,
        steps: StepsInFlight,
        running: RunningSet,
        beams: BeamGroups,
        host_room: HostRoom,
        queue: WaitingQueue,
        pressure: Pressure,
    ) -> None:
        self.num_preemptions = 0
        self.num_for_memory = 0
        """Number of preemptions because more sequences ran than the worker's memory allowed."""
        self.num_recomputed_tokens = 0
        """Number of tokens whose KV a swap-out dropped, because they follow the last checkpoint."""
        self.observer: Callable[[Sequence, bool], Callable[[], None]] | None = None
        """Only for replays, which report each preemption (`journal/replay.py`).

        The observer is called before a preemption, with the arguments `seq` and `can_swap` of
        `preempt`. It returns a function, which `preempt` calls after the preemption.
        """
        self._groups = groups
        self._is_plain = groups.is_plain  # read in every step
        self._can_swap_for_memory = not config.host_is_device_memory
        self._pool = pool
        self._pins = pins
        self._rows = rows
        self._steps = steps
        self._running = running
        self._beams = beams
        self._host_room = host_room
        self._queue = queue
        self._pressure = pressure

    # --- when and which -------------------------------------------------------------------------

    def make_room(self, step: StepId) -> bool:
        """Preempt sequences until the others can get the blocks that they need at `step`.

        First preempt sequences until no more run than the worker's memory allows. While the pool
        shrinks, fewer blocks are available: see `BlockPool.num_available`.

        Returns:
            Whether enough blocks are available. If not, more blocks become free when the results of
            steps in flight arrive.
        """
        while self.has_too_many:
            self.num_for_memory += 1
            self.preempt(self._last(), can_swap=self._can_swap_for_memory)
        if not self._is_plain:
            self._running.give_back(step)
        while self.num_blocks_due(step) > self._pool.num_available:
            if self._steps.hold_blocks:
                return False
            if not self._running:  # only pins or unclaimed rows hold the blocks
                if not self._pins.give_up(1):
                    # Nothing runs, so nothing needs a block. `num_available` is negative, since the
                    # pool shrinks and unclaimed rows hold blocks beyond its new end.
                    break
            elif not self._gives_up_pins or not self._pins.give_up(1):
                self.preempt(self._last())
        return True

    @property
    def _gives_up_pins(self) -> bool:
        return self._running.is_alone or self._pins.go_down

    @property
    def has_too_many(self) -> bool:
        """Whether more rows are in use or reserved for beams than the worker's memory allows.

        False while only one sequence, or only one beam search, runs: it may always run.
        """
        most = self._pressure.max_running
        if most is None or len(self._running) + self._beams.num_spares <= most:
            return False
        return not self._running.is_alone

    def num_blocks_due(self, step: StepId) -> int:
        """Return how many new blocks the running sequences need at `step`."""
        return self._running.num_blocks_due(step) + self._beams.num_blocks_due

    def _last(self) -> Sequence:
        return max(self._running, key=self._queue.sort_key)

    # --- how ------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence, *, can_swap: bool = True, must_swap: bool = False) -> None:
        """Take the row and the device blocks of a running sequence, and queue the sequence again.

        A beam is never preempted alone, but together with all other beams of its search.

        Args:
            seq: The sequence; for a search, any one of its beams.
            can_swap: Whether the sequence's KV may be moved to the host; otherwise its tokens are
                recomputed.
            must_swap: Swap regardless of the cost; the caller has checked that the host has room.
        """
        done = None if self.observer is None else self.observer(seq, can_swap)
        self.num_preemptions += 1
        self.take_out(seq, can_swap=can_swap, must_swap=must_swap)
        if done is not None:
            done()

    def take_out(self, seq: Sequence, *, can_swap: bool = True, must_swap: bool = False) -> None:
        """Do as `preempt`, but count no preemption. A move to another core calls this."""
        if seq.group is not None:
            self._queue.push(self._beams.preempt(seq.group))
        else:
            self._preempt_one(seq, can_swap=can_swap, must_swap=must_swap)

    def _preempt_one(self, seq: Sequence, *, can_swap: bool, must_swap: bool) -> None:
        assert seq.row is not None
        token_ids = self._rows.tokens(seq.row).copy()
        num_computed = self._running.num_computed_tokens(seq)
        table = seq.block_ids
        if seq.copy_from:  # the copy has not been made yet
            table = [*table[: -len(seq.copy_from)], *seq.copy_from]
        blocks = [table[place] for place in self._groups.kept(num_computed)]
        is_loading = bool(seq.loading_block_ids)
        num_swapped_out = 0
        self._running.stop(seq)
        seq.token_ids = token_ids
        num_kept = num_computed
        if self._groups.has_states:
            # Steps in flight advance a recurrent state beyond the known tokens.
            blocks, num_kept = self._running.last_checkpoint(seq, num_computed)
        if not can_swap or seq.request.pools:
            self._host_room.release(seq)
        elif is_loading:  # its KV is in host blocks of its own, or in cached host blocks
            num_computed = num_computed if seq.host_block_ids else 0
        elif num_kept and (must_swap or self._host_room.make_for_swap(len(blocks), num_kept)):
            self._running.swap_out(seq, blocks, num_kept)
            self.num_recomputed_tokens += num_computed - num_kept
            num_swapped_out = len(blocks)
        self._running.trace_preempted(seq, num_computed, num_swapped_out)
        seq.num_computed_tokens = num_kept if num_swapped_out else num_computed
        seq.set_status(SeqStatus.SWAPPED if seq.host_block_ids else SeqStatus.WAITING)
        self._queue.push(seq)
