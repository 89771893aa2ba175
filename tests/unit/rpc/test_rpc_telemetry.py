"""Trace context through two processes, and the export of spans to a collector."""

import asyncio
import contextlib
import os
import subprocess
import sys

import grpc
import grpc.aio
import pytest
from opentelemetry import context as otel_context
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from rpc.grpc_server import Service
from rpc.observe import telemetry
from rpc.peers.channel import open_channel

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-01"


@contextlib.contextmanager
def current(traceparent):
    token = otel_context.attach(telemetry.extract(traceparent))
    try:
        yield
    finally:
        otel_context.detach(token)


def echo_service(before=None):
    """Answer with the handler's own trace context, seen after a turn of the event loop."""

    async def unary(_request, _context):
        if before is not None:
            await before()
        return telemetry.inject().encode()

    async def stream(_request, context):
        yield await unary(_request, context)

    async def bidi(_requests, context):
        yield await unary(None, context)

    generic = grpc.method_handlers_generic_handler(
        "quire.test.Echo",
        {
            "Unary": grpc.unary_unary_rpc_method_handler(unary),
            "Stream": grpc.unary_stream_rpc_method_handler(stream),
            "Bidi": grpc.stream_stream_rpc_method_handler(bidi),
        },
    )
    return Service("quire.test.Echo", lambda server: server.add_generic_rpc_handlers((generic,)))


@pytest.fixture
async def channel(run_server, settings):
    async with (
        run_server(settings, services=[echo_service()]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        yield channel


def test_a_traceparent_goes_in_and_comes_out_without_an_exporter():
    assert telemetry.inject(telemetry.extract(PARENT)) == PARENT
    with current(PARENT):
        assert telemetry.inject() == PARENT


@pytest.mark.parametrize("malformed", ["", "nonsense", PARENT[:-1], "00-" + "0" * 32 + PARENT[35:]])
def test_a_malformed_traceparent_is_no_trace(malformed):
    assert telemetry.inject(telemetry.extract(malformed)) == ""


def test_the_tracer_without_an_exporter_hands_its_parent_on():
    span = telemetry.tracer().start_span("request", context=telemetry.extract(PARENT))
    assert f"{span.get_span_context().trace_id:032x}" == TRACE_ID
    telemetry.record_span("queue", telemetry.extract(PARENT), 1.0, 2.0)


async def test_the_callers_context_is_the_handlers(channel):
    with current(PARENT):
        assert await channel.unary_unary("/quire.test.Echo/Unary")(b"") == PARENT.encode()
        stream = channel.unary_stream("/quire.test.Echo/Stream")(b"")
        assert [response async for response in stream] == [PARENT.encode()]


async def test_without_a_trace_the_handler_has_none(channel):
    assert await channel.unary_unary("/quire.test.Echo/Unary")(b"") == b""


async def test_metadata_given_by_hand_wins_and_reaches_every_kind_of_call(channel):
    metadata = (("traceparent", OTHER), ("x-other", "kept"))
    with current(PARENT):
        unary = channel.unary_unary("/quire.test.Echo/Unary")(b"", metadata=metadata)
        assert await unary == OTHER.encode()
    bidi = channel.stream_stream("/quire.test.Echo/Bidi")(metadata=metadata)
    await bidi.done_writing()
    assert await bidi.read() == OTHER.encode()


async def test_calls_side_by_side_keep_their_contexts_apart(run_server, settings):
    both = asyncio.Barrier(2)
    async with (
        run_server(settings, services=[echo_service(before=both.wait)]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        call = channel.unary_unary("/quire.test.Echo/Unary")
        async with asyncio.timeout(10):
            answers = await asyncio.gather(
                call(b"", metadata=(("traceparent", PARENT),)),
                call(b"", metadata=(("traceparent", OTHER),)),
            )
    assert answers == [PARENT.encode(), OTHER.encode()]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps all spans."""

    def __init__(self):
        self.resource_spans = []

    async def Export(self, request, _context):  # noqa: N802 - the proto's name
        self.resource_spans.extend(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


EXPORTING_PROCESS = """
import asyncio, sys
from rpc.observe import telemetry
from rpc.server import run
from rpc.settings import ProcessSettings

async def main():
    telemetry.configure("quire-test", ProcessSettings(otlp_traces_endpoint=sys.argv[1]))
    parent = telemetry.extract(sys.argv[2])
    telemetry.record_span("queue", parent, 100.5, 101.25, {"gen_ai.request.model": "tiny"})
    with telemetry.tracer().start_as_current_span("request", context=parent):
        print(telemetry.inject())

run(main())
"""


async def export(endpoint):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "QUIRE_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", EXPORTING_PROCESS, endpoint, PARENT),
        stdout=subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(60):
        stdout, _ = await process.communicate()
    return process.returncode, stdout.decode().strip()


async def test_spans_reach_the_collector_before_the_process_ends(run_server, settings):
    collector = Collector()
    service = Service(
        "opentelemetry.proto.collector.trace.v1.TraceService",
        lambda server: trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server),
    )
    async with run_server(type(settings)(), services=[service]) as addresses:
        returncode, outgoing = await export(f"http://{addresses.grpc}")
    assert returncode == 0
    (resource_spans,) = collector.resource_spans
    resource = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert resource["service.name"] == "quire-test"
    spans = {span.name: span for scope in resource_spans.scope_spans for span in scope.spans}
    queue = spans["queue"]
    assert queue.trace_id.hex() == TRACE_ID
    assert queue.parent_span_id.hex() == "b7ad6b7169203331"
    assert (queue.start_time_unix_nano, queue.end_time_unix_nano) == (
        100_500_000_000,
        101_250_000_000,
    )
    assert queue.attributes[0].value.string_value == "tiny"
    assert outgoing == f"00-{TRACE_ID}-{spans['request'].span_id.hex()}-01"


async def test_a_collector_that_is_away_does_not_keep_the_process():
    started = asyncio.get_running_loop().time()
    returncode, outgoing = await export("http://127.0.0.1:1")
    assert returncode == 0
    assert outgoing.startswith(f"00-{TRACE_ID}-")
    assert asyncio.get_running_loop().time() - started < 20
