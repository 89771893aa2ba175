"""A collector of traces for the tests: receives OTLP over gRPC and keeps the spans."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """A span, and the service it came from."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: frozenset[str]
    """Ids of the spans that it is linked to."""


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port while entered."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        spans = [
            _span_from_proto(span, _attributes(resource.resource.attributes)["service.name"])
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self._spans += spans
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, trace_id: str, names: Sequence[str], within_s: float = 60.0) -> list[Span]:
        """Waits until a trace has all of `names`, each as often as listed; returns its spans. Fails
        with the names that it has.
        """

        def complete() -> bool:
            return not Counter(names) - Counter(span.name for span in self._of(trace_id))

        with self._changed:
            came = self._changed.wait_for(complete, within_s)
            assert came, f"of {names} only: {[(s.service, s.name) for s in self._of(trace_id)]}"
            return self._of(trace_id)

    def linked_to(self, spans: Iterable[Span], within_s: float = 60.0) -> dict[str, Span]:
        """Waits for all spans to which `spans` are linked; returns them by id."""
        wanted = {span_id for span in spans for span_id in span.links}

        def found() -> dict[str, Span]:
            return {span.span_id: span for span in self._spans if span.span_id in wanted}

        with self._changed:
            came = self._changed.wait_for(lambda: len(found()) == len(wanted), within_s)
            assert came, f"{wanted - found().keys()} have not come"
            return found()

    def trace_ids(self, name: str) -> set[str]:
        """The traces that have a span of a name so far."""
        with self._changed:
            return {span.trace_id for span in self._spans if span.name == name}

    def _of(self, trace_id: str) -> list[Span]:
        return [span for span in self._spans if span.trace_id == trace_id]


def _span_from_proto(span: trace_pb2.Span, service: str) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        frozenset(link.span_id.hex() for link in span.links),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
