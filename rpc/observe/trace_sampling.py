"""Decides which traces are recorded.

This module is separate from `telemetry`, because it imports the SDK.
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
    """Make a sampler that records a span if its parent, or else a linked span, is recorded.

    The sampler records the share `new_trace_ratio`, in [0, 1], of spans without parent and links.
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
