"""What comes of one worker's requests: told to routers, and noted for spans, metrics and losses."""

from collections.abc import Callable, Sequence

from contract.errors import QuireError
from quire.v1 import worker_pb2
from scheduler_svc.core.events import Finished, News
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.spans import SequenceSpans
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.wire.router import (
    finished_to_proto,
    held_logprobs_to_proto,
    news_to_proto,
    prompt_logprobs_to_proto,
)
from scheduler_svc.workers.crash_counter import Losses


class RequestNews:
    """Who hears what; for a session, and in the order in which it happens."""

    def __init__(
        self,
        streams: RouterStreams,
        spans: SequenceSpans,
        metrics: EngineMetrics,
        losses: Losses,
    ) -> None:
        self._streams = streams
        self._spans = spans
        self._metrics = metrics
        self._losses = losses

    def submitted(self, request: Request) -> None:
        """Note that the core has taken a request."""
        self._spans.submitted(request)

    def refused(self, request: Request, error: QuireError) -> None:
        """Tell that it has not."""
        self._streams.refuse(request, error)

    def ended(self, finished: tuple[Finished, ...]) -> None:
        """Tell and note ends that no step brought about."""
        self._streams.deliver(finished_to_proto(finished))
        self._note_ends(finished)

    def adopted(self, news: News) -> None:
        """Tell and note what is known from the scheduler before."""
        self._streams.deliver(news_to_proto(0, news, held_logprobs_to_proto(news)))
        for admitted in news.admitted:
            self._spans.admitted(admitted)
        self._note_ends(news.finished)

    def scored(
        self,
        step_id: int,
        scores: Sequence[worker_pb2.PromptLogprobs],
        owner: Callable[[int], tuple[SourceId, SeqKey] | None],
    ) -> None:
        """Tell log-probabilities of prompts; `owner` says whose a row is."""
        self._streams.deliver(prompt_logprobs_to_proto(step_id, scores, owner))

    def told(self, step_id: int, news: News, logprobs: Sequence[worker_pb2.SampledLogprob]) -> None:
        """Tell what a step has brought."""
        self._streams.deliver(news_to_proto(step_id, news, logprobs))

    def noted(self, news: News, took_s: float) -> None:
        """Note it; to take it in and tell it took so long."""
        for admitted in news.admitted:
            self._metrics.queue_time.observe(admitted.queue_s)
            self._spans.admitted(admitted)
        self._note_ends(news.finished, took_s)

    def drop_source(self, source: SourceId) -> None:
        """Forget what was noted of a source that is gone."""
        self._spans.drop_source(source)
        self._losses.drop_source(source)

    def _note_ends(self, finished: tuple[Finished, ...], took_s: float = 0.0) -> None:
        for item in finished:
            self._spans.finished(item, took_s)
        self._losses.finished(finished)
