"""Recorded traces: those that the client wants, or else a share; linked spans, too."""

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link

from rpc.observe import telemetry
from rpc.observe.trace_sampling import sampler

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def is_recorded(ratio, parent="", linked=""):
    contexts = [telemetry.extract(each) for each in (parent, linked)]
    link = Link(trace.get_current_span(contexts[1]).get_span_context())
    tracer = TracerProvider(sampler=sampler(ratio), shutdown_on_exit=False).get_tracer("test")
    return tracer.start_span("s", contexts[0], links=[link] if linked else ()).is_recording()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_client_decides(ratio):
    assert is_recorded(ratio, parent=TRACE + "01")
    assert not is_recorded(ratio, parent=TRACE + "00")


def test_share_is_recorded_of_those_that_begin_here():
    assert is_recorded(1.0)
    assert not is_recorded(0.0)


def test_span_of_its_own_trace_is_recorded_if_what_it_is_linked_to_is():
    assert is_recorded(0.0, linked=TRACE + "01")
    assert not is_recorded(0.0, linked=TRACE + "00")


@pytest.mark.parametrize("traceparent", ["", "00-1-2-01", TRACE + "00"])
def test_nothing_follows_a_trace_that_is_not_recorded(traceparent):
    assert telemetry.sampled_context(traceparent) is None


def test_recorded_trace_is_followed():
    context = telemetry.sampled_context(TRACE + "01")
    assert isinstance(context, Context)
    assert telemetry.inject(context) == TRACE + "01"
