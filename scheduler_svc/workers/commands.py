"""Queues commands for a worker's core, and applies them between two steps."""

import time
from collections import deque

from contract.errors import DeadlineExceededError, InvalidArgumentError, QuireError, TooBusyError
from scheduler_svc.core.interface.errors import (
    DeadlineError,
    QueueFullError,
    RequestRefusedError,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.domain import (
    CancelSequences,
    Command,
    DefragmentBlocks,
    DropSource,
    SubmitRequest,
    UnpinPrompt,
    end_with_error,
    num_live_seqs,
)
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.rate_meter import RateMeter
from scheduler_svc.observers.shortage_log import SpaceWatch
from scheduler_svc.workers.request_events import RequestEvents


class PostedCommands:
    """The posted commands of one session, in the order of posting."""

    def __init__(
        self,
        core: Scheduler,
        meter: RateMeter,
        events: RequestEvents,
        space_watch: SpaceWatch,
        metrics: EngineMetrics,
    ) -> None:
        self.num_seqs = 0
        """Number of sequences in posted requests that have not been submitted to the core."""
        self.num_tokens = 0
        """Estimated number of tokens to compute for the sequences in `num_seqs`."""
        self._core = core
        self._meter = meter
        self._events = events
        self._space_watch = space_watch
        self._metrics = metrics
        self._commands: deque[Command] = deque()

    def post(self, command: Command, num_tokens: int) -> None:
        """Queue a command; for a `SubmitRequest`, `num_tokens` estimates the tokens to compute."""
        if isinstance(command, SubmitRequest):
            self.num_seqs += num_live_seqs(command.request)
            self.num_tokens += num_tokens
        self._commands.append(command)

    def apply(self) -> None:
        """Apply all queued commands to the core, and publish the resulting events."""
        self.num_seqs = self.num_tokens = 0
        while self._commands:
            match self._commands.popleft():
                case SubmitRequest() as command:
                    self._submit(command)
                case CancelSequences(source, seq_keys):
                    self._events.on_ended(self._core.cancel(source, seq_keys))
                case UnpinPrompt(tenant, request_id):
                    self._core.unpin(tenant, request_id)
                case DefragmentBlocks(done):
                    self._core.defragment()
                    self._space_watch.answer_next(done)
                case DropSource(source):
                    self._core.cancel_source(source)
                    # A request of this source may have been posted just before this command.
                    self._events.drop_source(source)

    def _submit(self, command: SubmitRequest) -> None:
        request = command.request
        try:
            now = time.monotonic()
            if not command.was_accepted:
                self._core.check_deadline(request, now, self._meter.rates)
            self._core.submit(request, now)
        except RequestRefusedError as error:
            if isinstance(error, DeadlineError):
                self._metrics.refused_late.inc()
            if command.was_accepted:  # the former worker was lost, and this one is smaller
                self._events.on_ended(end_with_error(request, str(error)))
            else:
                self._events.on_refused(request, _refusal_from_core(error))
            return
        self._events.on_submitted(request, command.num_crashes)
        if (adopted := self._core.takeover.take_adopted()) is not None:
            self._events.on_adopted(adopted)


def _refusal_from_core(error: RequestRefusedError) -> QuireError:
    """Convert a core's refusal to an error with the matching gRPC status."""
    match error:
        case QueueFullError():
            return TooBusyError(str(error))
        case DeadlineError():
            return DeadlineExceededError(str(error))
        case _:
            return InvalidArgumentError("request", f"cannot be served: {error}")
