"""Which traces are recorded. Apart from `telemetry`, as it needs the SDK."""

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


def sampler(new_trace_ratio: float) -> Sampler:
    """Make a sampler that does as a span's parent does, or else as what it is linked to.

    Args:
        new_trace_ratio: Share to record of the spans that have neither, in [0, 1].
    """
    return ParentBased(_AsLinked(TraceIdRatioBased(new_trace_ratio)))


class _AsLinked(Sampler):
    """Records a span without a parent if it is linked to one that is recorded."""

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
        """See `Sampler`."""
        is_linked = any(link.context.trace_flags.sampled for link in links or ())
        chosen = ALWAYS_ON if is_linked else self._unlinked
        return chosen.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        """See `Sampler`."""
        return f"AsLinked{{{self._unlinked.get_description()}}}"
