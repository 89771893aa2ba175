"""The `queue` span of each traced sequence: from its arrival until it leaves the queue."""

import time
from dataclasses import dataclass

from rpc.telemetry import extract, record_span
from scheduler_svc.core.plan import Admitted, Finished
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.holding import live_seq_keys


@dataclass(frozen=True, slots=True)
class _TracedSequence:
    request_id: str
    traceparent: str
    arrived_s: float
    """Wall clock: that it left the queue is heard of a step later."""


class QueueSpans:
    """Remembers the trace of each sequence that waits. An untraced one costs nothing."""

    def __init__(self) -> None:
        self._traced: dict[SourceId, dict[SeqKey, _TracedSequence]] = {}

    def submitted(self, request: Request) -> None:
        """Remember a request's trace."""
        if not request.traceparent:
            return
        traced = _TracedSequence(request.request_id, request.traceparent, time.time())
        self._traced.setdefault(request.source, {}).update(
            dict.fromkeys(live_seq_keys(request), traced)
        )

    def admitted(self, admitted: Admitted) -> None:
        """Write the span of a sequence that left the queue."""
        traced = self._traced.get(admitted.source, {}).pop(admitted.seq_key, None)
        if traced is None:
            return
        record_span(
            "queue",
            extract(traced.traceparent),
            traced.arrived_s,
            traced.arrived_s + admitted.queue_s,
            {
                "gen_ai.request.id": traced.request_id,
                "quire.seq_key": str(admitted.seq_key),  # uint64: more than an attribute's int64
                "quire.num_cached_tokens": admitted.num_cached_tokens,
            },
        )

    def finished(self, finished: Finished) -> None:
        """Forget a sequence that ended without leaving the queue."""
        self._traced.get(finished.source, {}).pop(finished.seq_key, None)

    def drop_source(self, source: SourceId) -> None:
        """Forget all sequences of a source."""
        self._traced.pop(source, None)
