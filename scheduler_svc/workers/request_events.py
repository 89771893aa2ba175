"""Distributes request events: to routers first, then to spans, metrics and the crash counter."""

from collections.abc import Callable, Sequence

from contract.errors import QuireError
from quire.v1 import worker_pb2
from scheduler_svc.core.interface.events import Finished, StepEvents
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.spans import SequenceSpans
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.wire.router import (
    OwnedVector,
    events_to_proto,
    finished_to_proto,
    held_logprobs_to_proto,
    prompt_logprobs_to_proto,
)
from scheduler_svc.workers.crash_counter import CrashCounter


class RequestEvents:
    """Distributes the request events of one session."""

    def __init__(
        self,
        streams: RouterStreams,
        spans: SequenceSpans,
        metrics: EngineMetrics,
        crashes: CrashCounter,
    ) -> None:
        self._streams = streams
        self._spans = spans
        self._metrics = metrics
        self._crashes = crashes

    def on_submitted(self, request: Request, num_crashes: int) -> None:
        """Called when the core has accepted a request."""
        self._spans.on_submitted(request)
        self._crashes.set(request, num_crashes)

    def on_refused(self, request: Request, error: QuireError) -> None:
        """Called when the core has refused a request."""
        self._streams.refuse(request, error)

    def on_ended(self, finished: tuple[Finished, ...]) -> None:
        """Called when sequences have ended outside of a step, such as by cancellation."""
        self._streams.deliver(finished_to_proto(finished))
        self._record_ends(finished)

    def on_adopted(self, events: StepEvents) -> None:
        """Called when a request gets tokens that the worker sampled for an earlier scheduler."""
        self._streams.deliver(events_to_proto(0, events, held_logprobs_to_proto(events)))
        for admitted in events.admitted:
            self._spans.on_admitted(admitted)
        self._record_ends(events.finished)

    def publish_prompt_logprobs(
        self,
        step_id: int,
        scores: Sequence[worker_pb2.PromptLogprobs],
        owner: Callable[[int], tuple[SourceId, SeqKey] | None],
    ) -> None:
        """Send a step's prompt log-probabilities to routers; `owner` maps rows to sequences."""
        self._streams.deliver(prompt_logprobs_to_proto(step_id, scores, owner))

    def publish(
        self,
        step_id: int,
        events: StepEvents,
        logprobs: Sequence[worker_pb2.SampledLogprob],
        vectors: Sequence[OwnedVector] = (),
    ) -> None:
        """Send a step's events to routers."""
        self._streams.deliver(events_to_proto(step_id, events, logprobs, vectors))

    def record(self, events: StepEvents, took_s: float) -> None:
        """Record a step's events in spans, metrics and the crash counter; called after `publish`.

        `took_s` is how long the session took to apply the step's result and to publish the events.
        """
        for admitted in events.admitted:
            self._metrics.queue_time.observe(admitted.queue_s)
            self._spans.on_admitted(admitted)
        self._record_ends(events.finished, took_s)

    def drop_source(self, source: SourceId) -> None:
        """Forget the sequences of `source`, a router's stream that has ended."""
        self._spans.drop_source(source)
        self._crashes.drop_source(source)

    def _record_ends(self, finished: tuple[Finished, ...], took_s: float = 0.0) -> None:
        for item in finished:
            self._spans.on_finished(item, took_s)
        self._crashes.on_finished(finished)
