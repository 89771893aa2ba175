"""Spans of the traced sequences: `prefill` until the first token, `decode` until the release."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from gpu_worker.step import Int64Array, NewRow
from rpc import telemetry


class RecordSpan(Protocol):
    """`rpc.telemetry.record_span`: writes a span after the fact."""

    def __call__(
        self,
        name: str,
        parent: Context,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, int],
        kind: SpanKind,
    ) -> None:
        """Times are wall clock, in seconds."""


@dataclass(slots=True)
class _Traced:
    """A traced sequence; `first_token_s` is None during its prefill."""

    parent: Context
    start_s: float
    num_known_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    first_token_s: float | None = None
    num_sampled: int = 0


class SequenceSpans:
    """Follows the sequences that have a trace context; the others cost nothing."""

    def __init__(
        self,
        record: RecordSpan = telemetry.record_span,
        extract: Callable[[str], Context] = telemetry.extract,
    ) -> None:
        self._record = record
        self._extract = extract
        self._row_to_traced: dict[int, _Traced] = {}

    def opened(self, new_rows: Iterable[NewRow], now_s: float) -> None:
        """Sequences got rows. Times here are wall-clock seconds."""
        for new in new_rows:
            if new.traceparent:
                self._row_to_traced[new.row] = _Traced(
                    self._extract(new.traceparent),
                    now_s,
                    len(new.token_ids),
                    new.num_prompt_tokens,
                    new.num_computed_tokens,
                )

    def sampled(self, rows: Int64Array, now_s: float) -> None:
        """Rows sampled a token each, or as many as they are there."""
        if not self._row_to_traced:
            return
        for row in rows.tolist():
            if (traced := self._row_to_traced.get(row)) is None:
                continue
            traced.num_sampled += 1
            if traced.first_token_s is None:
                traced.first_token_s = now_s
                attributes = {
                    "gen_ai.usage.input_tokens": traced.num_prompt_tokens,
                    "quire.num_tokens": traced.num_known_tokens - traced.num_computed_tokens,
                }
                self._write("prefill", traced, traced.start_s, now_s, attributes)

    def released(self, rows: Iterable[int], now_s: float) -> None:
        """Rows lost their sequences."""
        if not self._row_to_traced:
            return
        for row in rows:
            traced = self._row_to_traced.pop(row, None)
            if traced is not None and traced.first_token_s is not None:
                num_outputs = (
                    traced.num_known_tokens - traced.num_prompt_tokens + traced.num_sampled
                )
                attributes = {
                    "gen_ai.usage.input_tokens": traced.num_prompt_tokens,
                    "gen_ai.usage.output_tokens": num_outputs,
                    "quire.num_tokens": traced.num_sampled,
                }
                self._write("decode", traced, traced.first_token_s, now_s, attributes)

    def clear(self, now_s: float) -> None:
        """All rows lost their sequences."""
        self.released(list(self._row_to_traced), now_s)

    def _write(
        self, name: str, traced: _Traced, start_s: float, end_s: float, attributes: dict[str, int]
    ) -> None:
        self._record(name, traced.parent, start_s, end_s, attributes, SpanKind.INTERNAL)
