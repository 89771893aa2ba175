"""Changes the number of device blocks while the core serves.

To grow, the worker is asked first, and then the core takes what has come (`resize`). To shrink:

    shrink      blocks from the new end on are taken out of use. Free ones are so at once; what was
                cached in them is demoted as far as a step has room for it. Held ones are moved
                below by the defragmenter, and where there is no room below, sequences are preempted
                first.
    is_shrunk   none is held; the worker has been sent all rows that are gone, and all steps
                are answered that may have touched one. Now it may give them back.
    resize      it has: they are gone. Or it has not: they are in use again.
"""

from itertools import chain

from contract.step import StepId
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.cache.pins import Pins
from scheduler_svc.core.compact.defragment import Defragmenter
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import RequestTooLongError, ResizeRefusedError
from scheduler_svc.core.handover.labels import NewLabels
from scheduler_svc.core.handover.moves import Moves
from scheduler_svc.core.limits import check_length
from scheduler_svc.core.live_sequences import LiveSequences
from scheduler_svc.core.steps_in_flight import StepsInFlight


class Resizing:
    """Checks, begins and ends changes of the device pool's size."""

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
        """From `shrink` to `resize`."""
        self._config = config
        self._pool = pool
        self._pins = pins
        self._steps = steps
        self._labels = labels
        self._defragmenter = defragmenter
        self._live = live
        self._moves = moves
        self._last_step: StepId | None = None
        """The last that may have touched what goes; None: there may be more."""

    def check(self, num_blocks: int) -> None:
        """Check that there may be so many device blocks, for what is live, too; changes nothing.

        Raises:
            ResizeRefusedError: Naming the limit.
        """
        config = self._config
        if (most := config.max_num_blocks) is None:
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; it is fixed at {self._pool.num_blocks} by the worker"
            )
        if self.is_shrinking:
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; it is about to become {self._pool.num_usable}"
            )
        if num_blocks > most:
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; the worker has reserved room for at most {most}"
            )
        if num_blocks < (least := config.min_num_blocks):
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; it must be at least {least}: so many has a sequence"
                f" of max_model_len, {config.max_model_len}, or so few had the pool at first"
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
        """Begin to take the blocks from `num_blocks` on out of use; `is_shrunk` says when they are.

        Raises:
            ResizeRefusedError: As `check`; nothing has changed.
        """
        self.check(num_blocks)
        self.is_shrinking, self._last_step = True, None
        self._pool.retire_from(num_blocks)
        self._pins.keep_within_share()
        self._defragmenter.evacuate()

    @property
    def is_shrunk(self) -> bool:
        """Whether no step touches the blocks any more that `shrink` takes out of use."""
        last = self._last_step
        return last is not None and self._steps.last_answered >= last

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that `shrink` takes out of use and that are still held."""
        return self._pool.num_leaving

    def resize(self, num_blocks: int) -> None:
        """Take the number of device blocks that the worker has; fewer only after `shrink`.

        What `shrink` has taken out of use, and is still there, is in use again.
        """
        self.is_shrinking, self._last_step = False, None
        self._pool.resize(num_blocks)
        self._defragmenter.on_resized()

    def on_planned(self) -> None:
        """After each plan while it shrinks: note the last step if none of the blocks is held.

        By then the worker has been sent all changes that name them.
        """
        if self._last_step is None and not self._pool.num_leaving:
            self._labels.forget({*range(self._pool.num_usable, self._pool.num_blocks)})
            self._last_step = self._steps.last
