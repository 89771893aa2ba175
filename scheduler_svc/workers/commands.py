"""What others have a worker's core do: queued as they post it, applied between two steps."""

import time
from collections import deque

from scheduler_svc.core.errors import DeadlineError, RequestRefusedError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.domain import (
    CancelSequences,
    Command,
    DefragmentBlocks,
    DropSource,
    SubmitRequest,
)
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.rate_meter import RateMeter
from scheduler_svc.observers.space_watch import SpaceWatch
from scheduler_svc.routers.refusal import refusal_from_core
from scheduler_svc.routers.request_events import RequestNews
from scheduler_svc.workers.crash_counter import Losses
from scheduler_svc.workers.request_ends import end_with_error, num_live_seqs


class PostedCommands:
    """A session's; the order is that of posting."""

    def __init__(
        self,
        core: Scheduler,
        meter: RateMeter,
        *,
        news: RequestNews,
        losses: Losses,
        space_watch: SpaceWatch,
        metrics: EngineMetrics,
    ) -> None:
        self.num_seqs = 0
        """Sequences of requests that are posted and not applied."""
        self.num_tokens = 0
        """Tokens there are to compute for them, as far as is known."""
        self._core = core
        self._meter = meter
        self._news = news
        self._losses = losses
        self._space_watch = space_watch
        self._metrics = metrics
        self._commands: deque[Command] = deque()

    def post(self, command: Command, num_tokens: int) -> None:
        """Queue a command; `num_tokens` counts if it is a request."""
        if isinstance(command, SubmitRequest):
            self.num_seqs += num_live_seqs(command.request)
            self.num_tokens += num_tokens
        self._commands.append(command)

    def apply(self) -> None:
        """Apply all, and tell what comes of it."""
        self.num_seqs = self.num_tokens = 0
        while self._commands:
            match self._commands.popleft():
                case SubmitRequest() as command:
                    self._submit(command)
                case CancelSequences(source, seq_keys):
                    self._news.ended(self._core.cancel(source, seq_keys))
                case DefragmentBlocks(done):
                    self._core.defragment()
                    self._space_watch.answer_next(done)
                case DropSource(source):
                    self._core.cancel_source(source)
                    # Not before: a request of it may have been posted just ahead of this command.
                    self._news.drop_source(source)

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
            if not command.was_accepted:
                self._news.refused(request, refusal_from_core(error))
                return
            # Its worker is lost, and this one has less room.
            self._news.ended(end_with_error(request, str(error)))
        else:
            self._news.submitted(request)
            self._losses.note(request, command.num_losses)
            # Tokens that the worker had sampled for the scheduler before.
            if (news := self._core.take_adopted()) is not None:
                self._news.adopted(news)
