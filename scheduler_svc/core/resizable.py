"""Another number of device blocks: what it may be, and when a worker can be told of fewer.

To grow, the worker is asked first, and then the core learns what has come. To shrink:

    begin     blocks from the new end on are taken out of use. Free ones are so at once; what was
              cached in them is demoted as far as a step has room for it. Held ones are moved below
              by the defragmenter, and where there is no room below, sequences are preempted first.
    settled   nobody holds one; the worker has been told of all rows that are gone, and all steps
              are answered that may have touched one. Now it can be told to give them back.
    end       it has: they are gone. Or it has not: they are in use again.
"""

from collections.abc import Iterable

from scheduler_svc.core.acceptance import check_length
from scheduler_svc.core.block_pool import BlockPool, DeviceBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.defragmenter import Defragmenter
from scheduler_svc.core.errors import RequestTooLongError, ResizeRefusedError
from scheduler_svc.core.new_labels import NewLabels
from scheduler_svc.core.pins import Pins
from scheduler_svc.core.plan import StepId
from scheduler_svc.core.request import Request
from scheduler_svc.core.steps_in_flight import StepsInFlight


class Resizing:
    """What is under way of it, if anything is."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool[DeviceBlockId],
        steps: StepsInFlight,
        pins: Pins,
        defragmenter: Defragmenter,
        labels: NewLabels,
    ) -> None:
        self._config = config
        self._pool = pool
        self._steps = steps
        self._pins = pins
        self._defragmenter = defragmenter
        self._labels = labels
        self._is_shrinking = False
        self._last_step: StepId | None = None
        """The last that may have touched what goes; None: there may be more."""

    def check(self, num_blocks: int, live: Iterable[Request]) -> None:
        """Check that there may be so many blocks, for what is live, too.

        Raises:
            ResizeRefusedError: Naming the limit.
        """
        config = self._config
        if (most := config.max_num_blocks) is None:
            raise ResizeRefusedError(
                f"num_blocks is {num_blocks}; it is fixed at {self._pool.num_blocks} by the worker"
            )
        if self._is_shrinking:
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
        for request in live:
            try:
                check_length(request, num_blocks, config)
            except RequestTooLongError as error:
                raise ResizeRefusedError(
                    f"num_blocks is {num_blocks}; request {request.request_id!r}, which is live,"
                    f" needs more: {error}"
                ) from None

    def begin(self, num_blocks: int) -> None:
        """Take the blocks from `num_blocks` on out of use."""
        self._is_shrinking, self._last_step = True, None
        self._pool.retire_from(num_blocks)
        self._pins.keep_within_share()
        self._defragmenter.evacuate()

    def settle(self) -> None:
        """Look whether nobody holds what goes; when all that was to be told has been sent."""
        if not self._is_shrinking or self._last_step is not None:
            return
        if not self._pool.num_leaving:
            self._labels.forget({*range(self._pool.num_usable, self._pool.num_blocks)})
            self._last_step = self._steps.last

    @property
    def is_settled(self) -> bool:
        """Whether the worker can be told to give back the blocks that go."""
        last = self._last_step
        return last is not None and self._steps.last_answered >= last

    def end(self, num_blocks: int) -> None:
        """Learn how many there are."""
        self._is_shrinking, self._last_step = False, None
        self._pool.resize(num_blocks)
        self._defragmenter.resized()
