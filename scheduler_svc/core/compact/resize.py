"""A scheduler core whose worker's pool can have another size while it serves.

To grow, the worker is asked first, and then the core learns what has come. To shrink:

    shrink      blocks from the new end on are taken out of use. Free ones are so at once; what was
                cached in them is demoted as far as a step has room for it. Held ones are moved
                below by the defragmenter, and where there is no room below, sequences are preempted
                first.
    is_shrunk   nobody holds one; the worker has been told of all rows that are gone, and all steps
                are answered that may have touched one. Now it can be told to give them back.
    resize      it has: they are gone. Or it has not: they are in use again.
"""

from contract.step import StepId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import RequestTooLongError, ResizeRefusedError
from scheduler_svc.core.limits import check_length, max_request_len
from scheduler_svc.core.pressed import PressedScheduler
from scheduler_svc.core.request import Request


class ResizableScheduler(PressedScheduler):
    """The sequences of one worker, and its blocks, of which there may be more or fewer."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._is_shrinking = False
        self._last_step: StepId | None = None
        """The last that may have touched what goes; None: there may be more."""

    @property
    def max_request_len(self) -> int:
        """Most tokens of one sequence: so many that it can always finish when it runs alone."""
        return max_request_len(self._pool.num_usable, self.config)

    def check_resize(self, num_blocks: int) -> None:
        """Check that there may be so many device blocks, for what is live, too; nothing changes.

        Raises:
            ResizeRefusedError: Naming the limit.
        """
        config = self.config
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
        for request in self._requests_to_finish():
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
            ResizeRefusedError: As `check_resize`; nothing has changed.
        """
        self.check_resize(num_blocks)
        self._is_shrinking, self._last_step = True, None
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
        """Blocks that `shrink` takes out of use and somebody still holds."""
        return self._pool.num_leaving

    def resize(self, num_blocks: int) -> None:
        """Learn how many device blocks the worker has: more, fewer after `shrink`, or as many.

        What `shrink` has taken out of use, and is still there, is in use again.
        """
        self._is_shrinking, self._last_step = False, None
        self._pool.resize(num_blocks)
        self._defragmenter.resized()

    def _step_planned(self) -> None:
        """Look whether nobody holds what goes; all that was to be told has been sent."""
        if not self._is_shrinking or self._last_step is not None:
            return
        if not self._pool.num_leaving:
            self._labels.forget({*range(self._pool.num_usable, self._pool.num_blocks)})
            self._last_step = self._steps.last

    def _requests_to_finish(self) -> list[Request]:
        """The requests that are to finish here."""
        return [seq.request for seq in self._live]
