"""Decides which traces are recorded.

This module imports OpenTelemetry's SDK, so `telemetry` imports this module only in a process that
records traces.
"""

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from rpc.observe.telemetry import STALL_SPAN


def sampler(new_trace_ratio: float) -> Sampler:
    """Make the sampler, which decides whether a span is recorded.

    A span with a parent is recorded if the parent is. A span without a parent is recorded if it
    links to a recorded span or is a stall of the event loop. Of all other spans, the share
    `new_trace_ratio` (0 to 1) is recorded.
    """
    return ParentBased(_AsLinked(TraceIdRatioBased(new_trace_ratio)))


class _AsLinked(Sampler):
    """Decides which spans without a parent are recorded.

    Stalls of the event loop are always recorded, and so are spans that link to a recorded span.
    `unlinked` decides on all others.
    """

    def __init__(self, unlinked: Sampler) -> None:
        self._unlinked = unlinked

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        is_linked = any(link.context.trace_flags.sampled for link in links or ())
        chosen = ALWAYS_ON if is_linked or name == STALL_SPAN else self._unlinked
        return chosen.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        return f"AsLinked{{{self._unlinked.get_description()}}}"
