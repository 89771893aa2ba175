"""A thread notices that the event loop beside it is held up, and logs the code that holds it."""

import asyncio
import threading
import time
from collections.abc import Callable

import grpc
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rpc.grpc_server import Service
from rpc.observe import loop_watch, stall_report, telemetry
from rpc.observe.loop_watch import Stall, watching_loop
from rpc.observe.trace_sampling import sampler
from rpc.peers.channel import open_channel
from rpc.settings import ProcessSettings

STALL_S = 0.05


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives a function that holds the calling thread until its stack was recorded."""
    seen, holding = threading.Event(), threading.Event()

    def seen_stack(thread_id: int) -> str:
        assert holding.wait(60)  # a slow machine may stall before this
        stack = take(thread_id)
        seen.set()
        return stack

    take = loop_watch._stack
    monkeypatch.setattr(loop_watch, "_stack", seen_stack)

    def hold_the_loop() -> None:
        holding.set()
        assert seen.wait(60)

    return hold_the_loop


async def reported(stalls: list[Stall], count: int) -> None:
    async with asyncio.timeout(60):
        while len(stalls) < count:  # noqa: ASYNC110 - a thread appends
            await asyncio.sleep(0)


async def test_stall_is_reported_once_with_its_length_and_the_stack_of_what_held_the_loop(hold):
    found: list[Stall] = []
    began = time.monotonic()
    with watching_loop(STALL_S, found.append):
        hold()
        held_s = time.monotonic() - began
        await reported(found, 1)
    (stall,) = found
    assert stall.is_over
    assert stall.lasted_s >= STALL_S
    assert "in hold_the_loop\n" in stall.stack
    assert stall.cpu_s < held_s, "it waited"


async def test_stall_that_does_not_end_is_reported_before_it_ends(monkeypatch):
    monkeypatch.setattr(loop_watch, "_STILL_S", 0.01)
    found: list[Stall] = []
    told = threading.Event()

    def tell(stall: Stall) -> None:
        found.append(stall)
        if not stall.is_over:
            told.set()

    with watching_loop(STALL_S, tell):
        assert told.wait(60)
        place = [stall.is_over for stall in found].index(False)
        await reported(found, place + 2)
    before, after = found[place : place + 2]
    assert after.is_over
    assert "in test_stall_that_does_not_end_is_reported_before_it_ends\n" in before.stack
    assert before.lasted_s < after.lasted_s


async def test_what_keeps_the_interpreter_to_itself_is_noticed_when_it_lets_go():
    found: list[Stall] = []
    with watching_loop(STALL_S, found.append):
        while not found:  # the watching thread does not run either
            sum(range(30_000_000))
            await asyncio.sleep(0)
    assert found[0].cpu_s > STALL_S / 2
    assert "sum(range(" in found[0].stack or "asyncio.sleep" in found[0].stack


async def test_lag_of_a_loop_that_runs_is_reported_and_is_no_stall():
    lags: list[float] = []
    found: list[Stall] = []
    with watching_loop(60.0, found.append, lags.append):
        pass
    assert (lags, found) == ([], [])
    with watching_loop(1e-3, found.append, lags.append):
        async with asyncio.timeout(60):
            while len(lags) < 3:  # noqa: ASYNC110 - a thread appends
                await asyncio.sleep(0)
    assert all(lag > 0 for lag in lags)


async def test_leaving_the_watch_does_not_wait_for_the_loop(hold):
    with watching_loop(STALL_S, lambda _: None):
        hold()  # a callback is posted, which runs only after this
    await asyncio.sleep(0)


async def test_0_watches_nothing():
    with watching_loop(0.0, lambda _: None):
        assert "loop-watch" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The exported spans if no new trace may be recorded."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler(0.0), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_TRACER", provider.get_tracer("test"))
    assert not trace.get_current_span().is_recording()
    return exporter


def in_freeze(spans):
    return [
        span
        for span in spans.get_finished_spans()
        if "in freeze\n" in span.attributes["code.stacktrace"]
    ]


async def test_process_tells_of_its_stall_by_log_metric_and_span(
    hold, run_server, socket_path, spans
):
    async def freeze(_request, _context):
        hold()
        return b""

    generic = grpc.method_handlers_generic_handler(
        "quire.test.Freeze", {"Call": grpc.unary_unary_rpc_method_handler(freeze)}
    )
    service = Service("quire.test.Freeze", lambda s: s.add_generic_rpc_handlers((generic,)))
    stalled_before_s = stall_report.STALLED_SECONDS._value.get()
    settings = ProcessSettings(uds=socket_path, loop_stall_s=STALL_S)
    with structlog.testing.capture_logs() as logs:
        async with (
            run_server(settings, services=[service]) as addresses,
            open_channel(addresses.grpc) as channel,
        ):
            await channel.unary_unary("/quire.test.Freeze/Call")(b"")
            async with asyncio.timeout(60):
                while not in_freeze(spans):  # noqa: ASYNC110 - a thread ends it
                    await asyncio.sleep(0)
    # A slow machine may hold the loop at another place, too.
    (line,) = [
        line
        for line in logs
        if line["event"] == "the event loop was blocked" and "in freeze\n" in line["stack"]
    ]
    assert line["lasted_s"] >= STALL_S
    assert stall_report.STALLED_SECONDS._value.get() > stalled_before_s
    (span,) = in_freeze(spans)
    assert span.name == "event_loop_stall"
    assert span.attributes["code.stacktrace"] == line["stack"]
