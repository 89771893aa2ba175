"""Records the scheduler's spans of traced sequences, in the traces of their requests.

A sequence has these spans:

    queue        lasts from its arrival until it first leaves the queue
    admission    covers planning, encoding and sending the step that announces it to a worker
    preempted    lasts from the loss of its device blocks until it gets blocks again, or ends
    kv_transfer  covers a move of its blocks to the host or back. The move to the host lasts until
                 the result of the step that copies the blocks. The move back lasts from when the
                 sequence gets device blocks until the step in which the sequence computes again
    finish       covers applying the result that ends it, and sending the end to its router

The worker adds spans of the steps that it computes (`gpu_worker/step/spans.py`). The attribute
`quire.step_id` joins the spans of scheduler and worker.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from rpc.observe import telemetry
from scheduler_svc.core.interface.events import Admitted, Finished, Preempted, Started
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.domain import live_seq_keys
from scheduler_svc.observers.steps import AnsweredStep, SentStep

Attributes = Mapping[str, AttributeValue]

_NAMES = {"preempted": "preempted", "swap_in": "kv_transfer", "swap_out": "kv_transfer"}
"""The name of each kind of span that may last for several steps. A sequence has at most one open
span of each kind."""


@dataclass(frozen=True, slots=True)
class _Open:
    start_s: float
    attributes: Attributes


class TracedSequence:
    """A sequence whose trace is recorded; times are wall-clock seconds."""

    def __init__(self, request_id: str, seq_key: SeqKey, context: Context, now_s: float) -> None:
        self.arrived_s = now_s
        self._context = context
        self._names = {
            "gen_ai.request.id": request_id,
            # The key is text, because a uint64 does not fit an attribute's int64.
            "quire.seq_key": str(seq_key),
        }
        self._open: dict[str, _Open] = {}

    def record(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        attributes = {**self._names, **attributes}
        telemetry.record_span(name, self._context, start_s, end_s, attributes)

    def begin(self, what: str, start_s: float, attributes: Attributes) -> None:
        """Begin a span of the kind `what`; end and record an open span of this kind first."""
        self.end(what, start_s)
        self._open[what] = _Open(start_s, attributes)

    def end(self, what: str, end_s: float) -> None:
        """End and record the open span of the kind `what`, if there is one."""
        if (span := self._open.pop(what, None)) is not None:
            self.record(_NAMES[what], span.start_s, end_s, span.attributes)

    def end_all(self, end_s: float) -> None:
        """End all open spans."""
        for what in tuple(self._open):
            self.end(what, end_s)


class SequenceSpans:
    """The live traced sequences of all workers; sequences without a trace cost nothing."""

    def __init__(self) -> None:
        self._traced: dict[SourceId, dict[SeqKey, TracedSequence]] = {}

    def find(self, owner: tuple[SourceId, SeqKey] | None) -> TracedSequence | None:
        """Return the live traced sequence with this source and key; None: there is none."""
        if owner is None or not self._traced:
            return None
        source, seq_key = owner
        return self._traced.get(source, {}).get(seq_key)

    def on_submitted(self, request: Request) -> None:
        """Called when a core has accepted a request.

        If the request's worker is lost, this is called again when the next core has accepted it.
        """
        if (context := telemetry.sampled_context(request.traceparent)) is None:
            return
        now_s = time.time()
        of_source = self._traced.setdefault(request.source, {})
        for key in live_seq_keys(request):
            if (before := of_source.get(key)) is not None:  # the sequence's earlier worker was lost
                before.end_all(now_s)
            of_source[key] = TracedSequence(request.request_id, key, context, now_s)

    def on_admitted(self, admitted: Admitted) -> None:
        """Called when a core reports that a sequence has left the queue."""
        if (traced := self.find((admitted.source, admitted.seq_key))) is not None:
            attributes = {"quire.num_cached_tokens": admitted.num_cached_tokens}
            end_s = traced.arrived_s + admitted.queue_s
            traced.record("queue", traced.arrived_s, end_s, attributes)

    def on_finished(self, finished: Finished, took_s: float = 0.0) -> None:
        """Called when a sequence has ended; applying the step's result took `took_s`."""
        if not self._traced:
            return
        traced = self._traced.get(finished.source, {}).pop(finished.seq_key, None)
        if traced is not None:
            now_s = time.time()
            traced.end_all(now_s)
            attributes = {"gen_ai.response.finish_reasons": (finished.reason.value,)}
            traced.record("finish", now_s - took_s, now_s, attributes)

    def drop_source(self, source: SourceId) -> None:
        """Forget the sequences of a router's stream, because the stream has ended."""
        for traced in self._traced.pop(source, {}).values():
            traced.end_all(time.time())


class WorkerSpans:
    """Records what one worker's steps do with traced sequences; a `StepObserver`."""

    def __init__(
        self,
        sequences: SequenceSpans,
        worker: str,
        block_bytes: int,
        owner: Callable[[int], tuple[SourceId, SeqKey] | None],
    ) -> None:
        """`owner` returns the source and key of the sequence in a row, as of the latest plan."""
        self._sequences = sequences
        self._worker = worker
        self._block_bytes = block_bytes
        self._owner = owner
        self._leaving: list[tuple[int, TracedSequence]] = []
        """Sequences whose blocks are being copied to the host, each with the step that copies
        them."""

    def on_sent(self, sent: SentStep) -> None:
        plan, step_id = sent.plan, sent.step_id
        if not plan.trace_events and not plan.new_sequences:  # true in most steps
            return
        now_s = time.time()
        start_s = now_s - sent.took_s
        step: dict[str, AttributeValue] = {
            "quire.step_id": step_id,
            "quire.worker": self._worker,
        }
        for event in plan.trace_events:
            if (traced := self._sequences.find((event.source, event.seq_key))) is None:
                continue
            if isinstance(event, Preempted):
                self._preempted(traced, event, step, start_s)
                if event.num_swapped_out_blocks:
                    self._leaving.append((step_id, traced))
            else:
                self._started(traced, event, step, start_s)
        for new in plan.new_sequences:
            if not new.traceparent or not (traced := self._sequences.find(self._owner(new.row))):
                continue
            traced.end("swap_in", start_s)
            attributes: Attributes = {
                **step,
                "quire.num_tokens": len(new.token_ids),
                "quire.num_computed_tokens": new.num_computed_tokens,
                "quire.num_blocks": len(new.block_ids),
            }
            traced.record("admission", start_s, now_s, attributes)

    def on_answered(self, answered: AnsweredStep) -> None:
        while self._leaving and self._leaving[0][0] <= answered.step_id:
            self._leaving.pop(0)[1].end("swap_out", time.time())

    def _preempted(
        self, traced: TracedSequence, turn: Preempted, step: Attributes, now_s: float
    ) -> None:
        num_blocks = turn.num_swapped_out_blocks
        attributes: Attributes = {
            **step,
            "quire.mode": "swap" if num_blocks else "recompute",
            "quire.num_computed_tokens": turn.num_computed_tokens,
        }
        traced.end("swap_in", now_s)
        traced.begin("preempted", now_s, attributes)
        if num_blocks:
            traced.begin("swap_out", now_s, {**step, **self._transfer("out", num_blocks)})

    def _started(
        self, traced: TracedSequence, turn: Started, step: Attributes, now_s: float
    ) -> None:
        traced.end("preempted", now_s)
        if num_blocks := turn.num_swapped_in_blocks:
            traced.begin("swap_in", now_s, {**step, **self._transfer("in", num_blocks)})

    def _transfer(self, direction: str, num_blocks: int) -> Attributes:
        return {
            "quire.tier": "host",
            "quire.direction": direction,
            "quire.num_blocks": num_blocks,
            "quire.bytes": num_blocks * self._block_bytes,
        }
