"""Records trace spans: of sequences, and of the steps that computed for these sequences.

A request's trace gets these spans each time that one of its sequences gets a row:

    prefill          until the first token
      prefill_chunk  a step's part of the prefill, linked to that step
    decode           until the sequence loses its row, linked to some of the sequence's steps

A span named `step` begins a separate trace, and links to every traced request that the step
computed for. A span for each token would cost too much. So a step has a span only if it computed a
chunk of a traced sequence, or a traced sequence's 1st, 2nd, 4th, 8th ... decode.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.context import Context

from contract.arrays import Int64Array
from contract.step import NewSequence
from gpu_worker.step.rows import ScheduledRows
from rpc.observe import telemetry

_MAX_LINKS = 128
"""The exporter's default limit."""


class RecordSpan(Protocol):
    """The type of `rpc.observe.telemetry.record_span`, which records a span that has ended."""

    def __call__(
        self,
        name: str,
        parent: Context,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, int],
        links: Sequence[Context] = (),
    ) -> Context:
        """Return the span's context. Times are wall-clock seconds."""


class SampledContext(Protocol):
    """The type of `rpc.observe.telemetry.sampled_context`."""

    def __call__(self, traceparent: str) -> Context | None:
        """Return the context that `traceparent` names; None if the trace is not recorded."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    step: Context
    start_s: float
    end_s: float
    attributes: Mapping[str, int]


@dataclass(slots=True)
class _Traced:
    """A traced sequence."""

    parent: Context
    start_s: float
    num_known_tokens: int
    num_prompt_tokens: int
    first_token_s: float | None = None
    num_sampled: int = 0
    num_decodes: int = 0
    """Steps since the first token; each yields one token, or more with guesses."""
    chunks: list[_Chunk] = field(default_factory=list)
    decode_steps: list[Context] = field(default_factory=list)

    @property
    def wants_step(self) -> bool:
        """Whether this sequence's spans link to the latest step that computed for the sequence."""
        if self.first_token_s is None:
            return True
        return self.num_decodes & (self.num_decodes - 1) == 0


class SequenceSpans:
    """Follows the sequences with a recorded trace; other sequences cost nothing."""

    def __init__(
        self,
        record: RecordSpan = telemetry.record_span,
        sampled_context: SampledContext = telemetry.sampled_context,
    ) -> None:
        self._record = record
        self._sampled_context = sampled_context
        self._row_to_traced: dict[int, _Traced] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._row_to_traced)

    def opened(self, new_rows: Iterable[NewSequence], now_s: float) -> None:
        """Follow the new sequences whose trace is recorded. Times are wall-clock seconds."""
        for new in new_rows:
            if (parent := self._sampled_context(new.traceparent)) is not None:
                self._row_to_traced[new.row] = _Traced(
                    parent,
                    now_s,
                    len(new.token_ids),
                    new.num_prompt_tokens,
                )

    def computed(
        self,
        step_id: int,
        scheduled: ScheduledRows,
        sampled_rows: Int64Array,
        start_s: float,
        end_s: float,
    ) -> None:
        """Record a finished step; `sampled_rows` names a row once for each token that it gained."""
        if not self._row_to_traced:
            return
        rows = scheduled.rows.tolist()
        places = {row: place for place, row in enumerate(rows) if row in self._row_to_traced}
        if not places:
            return
        traced = {row: self._row_to_traced[row] for row in places}
        for each in traced.values():
            each.num_decodes += each.first_token_s is not None
        sampled = Counter(row for row in sampled_rows.tolist() if row in traced)
        for row, count in sampled.items():
            traced[row].num_sampled += count
        if any(each.wants_step for each in traced.values()):
            step = self._record(
                "step",
                Context(),
                start_s,
                end_s,
                {
                    "quire.step_id": step_id,
                    "quire.num_seqs": len(rows),
                    "quire.num_decodes": scheduled.num_decodes,
                    "quire.num_tokens": scheduled.num_tokens,
                },
                [each.parent for each in traced.values()][:_MAX_LINKS],
            )
            for row, each in traced.items():
                place = places[row]
                start, length = int(scheduled.starts[place]), int(scheduled.lens[place])
                if each.first_token_s is not None:
                    if each.wants_step:
                        each.decode_steps.append(step)
                    continue
                attributes = {
                    "quire.step_id": step_id,
                    "quire.num_tokens": length,
                    "quire.num_computed_tokens": start,
                }
                each.chunks.append(_Chunk(step, start_s, end_s, attributes))
        for row in sampled:
            if traced[row].first_token_s is None:
                traced[row].first_token_s = end_s
                self._write_prefill(traced[row], end_s)

    def released(self, rows: Iterable[int], now_s: float) -> None:
        """Write the spans of sequences that lost their rows."""
        if not self._row_to_traced:
            return
        for row in rows:
            traced = self._row_to_traced.pop(row, None)
            if traced is None:
                continue
            if traced.first_token_s is None:
                self._write_prefill(traced, now_s)
                continue
            num_outputs = traced.num_known_tokens - traced.num_prompt_tokens + traced.num_sampled
            attributes = {
                "gen_ai.usage.input_tokens": traced.num_prompt_tokens,
                "gen_ai.usage.output_tokens": num_outputs,
                "quire.num_tokens": traced.num_sampled,
            }
            self._record(
                "decode",
                traced.parent,
                traced.first_token_s,
                now_s,
                attributes,
                traced.decode_steps,
            )

    def clear(self, now_s: float) -> None:
        """Write the spans of all sequences; called when all sequences lose their rows."""
        self.released(list(self._row_to_traced), now_s)

    def _write_prefill(self, traced: _Traced, end_s: float) -> None:
        """Write the spans of an ended prefill; none if it ended before its first chunk ran."""
        if not traced.chunks:
            return
        attributes = {
            "gen_ai.usage.input_tokens": traced.num_prompt_tokens,
            "quire.num_tokens": sum(c.attributes["quire.num_tokens"] for c in traced.chunks),
        }
        prefill = self._record("prefill", traced.parent, traced.start_s, end_s, attributes)
        for chunk in traced.chunks:
            self._record(
                *("prefill_chunk", prefill, chunk.start_s, chunk.end_s, chunk.attributes),
                links=[chunk.step],
            )
