"""Changes the number of device blocks while the core runs.

To grow the pool, the worker allocates memory first; then the caller calls `resize`. To shrink it:

    shrink      takes all blocks beyond the pool's new end out of use. Free blocks are retired at
                once. Cached blocks are evicted; one step can demote only some of them, and the
                others are lost. The defragmenter moves the held blocks to numbers below the end; if
                there is no room for them, sequences are preempted first.
    is_shrunk   becomes true after three events: no block beyond the end is held any more; a plan
                tells the worker which rows were released; and this plan and all earlier ones have
                results. Then the worker frees the blocks beyond the end.
    resize      is called with the new size if the worker has freed the blocks. Otherwise it is
                called with the old size, and the blocks are in use again.
"""

from itertools import chain

from contract.step import StepId
from scheduler_svc.core.compact.defragment import Defragmenter
from scheduler_svc.core.handover.moves import Moves
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import RequestTooLongError, ResizeRefusedError
from scheduler_svc.core.limits.acceptance import check_length
from scheduler_svc.core.live_sequences import LiveSequences
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.labels import NewLabels
from scheduler_svc.core.space.pins import Pins
from scheduler_svc.core.steps_in_flight import StepsInFlight


class Resizing:
    """Checks, begins and completes changes of the device pool's size."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        pool: BlockPool[DeviceBlockId],
        pins: Pins,
        steps: StepsInFlight,
        labels: NewLabels,
        defragmenter: Defragmenter,
        live: LiveSequences,
        moves: Moves,
    ) -> None:
        self.is_shrinking = False
        """Whether `shrink` has been called, but `resize` not yet."""
        self._config = config
        self._pool = pool
        self._pins = pins
        self._steps = steps
        self._labels = labels
        self._defragmenter = defragmenter
        self._live = live
        self._moves = moves
        self._last_step: StepId | None = None
        """The last step that may touch blocks beyond the pool's new end; None: not known yet."""

    def check(self, num_blocks: int) -> None:
        """Check a new pool size against the limits and the live requests; change nothing.

        Raises:
            ResizeRefusedError: The message names the limit.
        """
        config = self._config
        if (most := config.max_num_blocks) is None:
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; it is fixed at {self._pool.num_blocks} by the worker"
            )
        if self.is_shrinking:
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; a resize to {self._pool.num_usable} is in progress"
            )
        if num_blocks > most:
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; the worker has reserved room for at most {most}"
            )
        if num_blocks < (least := config.min_num_blocks):
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; it must be at least {least}, which is enough for one"
                f" sequence of max_model_len, {config.max_model_len}, or the smaller initial size"
            )
        live = (seq.request for seq in self._live)
        for request in chain(live, self._moves.arriving_requests):
            try:
                check_length(request, num_blocks, config)
            except RequestTooLongError as error:
                raise ResizeRefusedError(
                    f"num_blocks is {num_blocks}; request {request.request_id!r}, which is live,"
                    f" needs more: {error}"
                ) from None

    def shrink(self, num_blocks: int) -> None:
        """Start to shrink the device pool to `num_blocks`; `is_shrunk` is true once it has shrunk.

        The blocks numbered `num_blocks` and above are retired.

        Raises:
            ResizeRefusedError: `check` refuses the size; nothing has changed.
        """
        self.check(num_blocks)
        self.is_shrinking, self._last_step = True, None
        self._pool.retire_from(num_blocks)
        self._pins.keep_within_share()
        self._defragmenter.evacuate()

    @property
    def is_shrunk(self) -> bool:
        """Whether no step can touch the blocks beyond the pool's new end any more."""
        last = self._last_step
        return last is not None and self._steps.last_answered >= last

    @property
    def num_leaving_blocks(self) -> int:
        """Number of blocks beyond the pool's new end that are still held."""
        return self._pool.num_leaving

    def resize(self, num_blocks: int) -> None:
        """Set the number of device blocks that the worker has; lower it only after `is_shrunk`.

        Blocks below `num_blocks` that `shrink` took out of use can be allocated again.
        """
        self.is_shrinking, self._last_step = False, None
        self._pool.resize(num_blocks)
        self._defragmenter.on_resized()

    def on_planned(self) -> None:
        """Record which step was sent last, as soon as no block beyond the new end is held.

        Call this method after each plan. No later plan names these blocks.
        """
        if self._last_step is None and not self._pool.num_leaving:
            self._labels.forget({*range(self._pool.num_usable, self._pool.num_blocks)})
            self._last_step = self._steps.last
