"""Passes trace context between processes, and exports spans.

Trace context is always propagated, as W3C specifies: an incoming `traceparent` is passed on even if
this process exports nothing. If no `otlp_traces_endpoint` is set and the log level is not debug,
OpenTelemetry's SDK is not imported. The tracer is then OpenTelemetry's no-op tracer: its spans cost
almost nothing, and have the context of their parent.

The client, or else the router, decides whether a trace is recorded. All other processes follow the
`traceparent`; `sampled_context` returns None if the trace is not recorded.
"""

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

if TYPE_CHECKING:  # clients that only open channels do not need pydantic
    from rpc.settings import ProcessSettings

TRACEPARENT = "traceparent"

STALL_SPAN = "event_loop_stall"
"""The name of the only span that is recorded regardless of sampling."""

_PROPAGATOR = TraceContextTextMapPropagator()
_PROPAGATED = _PROPAGATOR.fields
_TRACER = trace.get_tracer("quire")
"""A proxy, which passes calls to the real tracer after `configure`."""

_EXPORT_TIMEOUT_S = 5
_SHUTDOWN_S = 5.0

log = structlog.get_logger()


def configure(
    service_name: str, settings: "ProcessSettings", *, new_trace_ratio: float = 0.0
) -> None:
    """Export spans to `settings.otlp_traces_endpoint`, if set. Call once per process.

    If no endpoint is set and the log level is debug, all requests are traced, but only in the log.

    Args:
        service_name: Name of this process in its spans.
        settings: Settings of the process.
        new_trace_ratio: Share of traces to record, among those that start in this process.
    """
    if not settings.otlp_traces_endpoint and settings.log_level != "debug":
        return
    # These modules are imported here, because together they add 80 ms to each start.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    from rpc.observe.trace_sampling import sampler  # noqa: PLC0415

    provider = TracerProvider(
        sampler=sampler(new_trace_ratio if settings.otlp_traces_endpoint else 1.0),
        resource=Resource.create({SERVICE_NAME: service_name}),
        shutdown_on_exit=False,
    )
    if settings.otlp_traces_endpoint:
        exporter = OTLPSpanExporter(
            endpoint=settings.otlp_traces_endpoint,
            insecure=not settings.otlp_traces_endpoint.startswith("https://"),
            timeout=_EXPORT_TIMEOUT_S,
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def shutdown() -> None:
    """Export the remaining spans, as a process's last step; blocks for at most five seconds."""
    flush: Callable[[], None] | None = getattr(trace.get_tracer_provider(), "shutdown", None)
    if flush is None:
        return
    # A thread flushes, because the exporter may retry for too long.
    thread = threading.Thread(target=flush, name="telemetry-shutdown", daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_S)
    if thread.is_alive():
        log.warning("the collector did not accept all spans; they are lost", waited_s=_SHUTDOWN_S)


def tracer() -> trace.Tracer:
    return _TRACER


def extract(traceparent: str) -> Context:
    """Parse a `traceparent`; return an empty context for an empty or malformed one."""
    return _PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())


def sampled_context(traceparent: str) -> Context | None:
    """Parse a `traceparent` into a context; None if its trace is not recorded."""
    if not traceparent:
        return None
    context = extract(traceparent)
    return context if _span_context(context).trace_flags.sampled else None


def inject(context: Context | None = None) -> str:
    """Return the `traceparent` of a span, or "" if there is no span.

    The span is that of `context`, or the current span if `context` is None.
    """
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier.get(TRACEPARENT, "")


def inject_metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata that makes a call part of the current trace; empty outside a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


def record_span(
    name: str,
    parent: Context,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Sequence[Context] = (),
) -> Context:
    """Record a span that has ended; times are wall-clock seconds since 1970.

    With an empty `parent` the span starts a trace. `links` are contexts of related spans. Returns
    the span's context, which can be the `parent` of other spans or one of their `links`.
    """
    span = _TRACER.start_span(
        name,
        context=parent,
        kind=SpanKind.INTERNAL,
        attributes=attributes,
        links=[Link(_span_context(each)) for each in links],
        start_time=round(start_s * 1e9),
    )
    span.end(round(end_s * 1e9))
    if (in_trace := _span_context(parent)).is_valid:
        log.debug(
            name,
            trace_id=trace.format_trace_id(in_trace.trace_id),
            took_s=round(end_s - start_s, 6),
            **{_log_name(key): value for key, value in (attributes or {}).items()},
        )
    return trace.set_span_in_context(span, Context())


def _log_name(attribute: str) -> str:
    return "request_id" if attribute == "gen_ai.request.id" else attribute.rpartition(".")[2]


def _span_context(context: Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


class TraceInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Makes the caller's trace context current while a handler runs."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Attach the caller's trace context to the task of the call."""
        carrier = {
            key: value
            for key, value in handler_call_details.invocation_metadata or ()
            if key in _PROPAGATED and isinstance(value, str)
        }
        if carrier:
            otel_context.attach(_PROPAGATOR.extract(carrier, Context()))
        return await continuation(handler_call_details)
