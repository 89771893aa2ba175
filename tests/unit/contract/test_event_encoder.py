"""Events that are put together from bytes parse as what they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.codec.outputs import EventEncoder, event_from_proto, event_to_proto
from contract.outputs import FinishReason, OutputDelta, OutputFinished, TokenLogprob, Usage
from quire.v1 import inference_pb2

UINT32 = st.integers(0, 2**32 - 1)


def decoded(data: bytes) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse.FromString(data)


@given(UINT32, UINT32, st.lists(UINT32, max_size=200), st.text(max_size=300))
def test_a_delta_is_the_same_message_as_protobufs(index, offset, token_ids, text):
    delta = OutputDelta(index, offset, tuple(token_ids), text)
    message = decoded(EventEncoder("request 1").encode(delta))
    assert message == event_to_proto("request 1", delta)
    assert event_from_proto(message) == delta


@pytest.mark.parametrize(
    "event",
    [
        OutputDelta(0, 3, (5,), "a", (TokenLogprob(-0.5, ((5, -0.5), (6, -1.0))),)),
        OutputDelta(1, 0, (), ""),
        OutputFinished(2, FinishReason.STOP, stop_string="."),
        Usage(3, 4, 1),
    ],
)
def test_every_other_event_is_the_same_message_as_protobufs(event):
    encoder = EventEncoder("request 1")
    for _ in range(2):
        assert decoded(encoder.encode(event)) == event_to_proto("request 1", event)
