"""A router's stream: events merged for a slow reader, and the limit at which it is closed."""

import asyncio

import pytest
from scheduler_requests import make_request

from contract.codec.packing import pack_int32, pack_uint64
from contract.errors import InvalidArgumentError, TooBusyError
from quire.v1 import common_pb2, scheduler_pb2
from scheduler_svc.routers import fan_out
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.routers.stream import RouterStream


def make_output(step_id, keys, tokens, **fields):
    return scheduler_pb2.StepOutput(
        step_id=step_id, seq_keys=pack_uint64(keys), token_ids=pack_int32(tokens), **fields
    )


def make_logprob(index, logprob):
    return scheduler_pb2.IndexedLogprob(
        index=index, logprob=common_pb2.TokenLogprob(logprob=logprob)
    )


class TestRouterStream:
    async def test_pending_outputs_become_one_message(self):
        stream = RouterStream(1, "r", 1 << 20)
        stream.deliver(make_output(4, [1, 2], [10, 20], logprobs=[make_logprob(1, -2.0)]))
        stream.deliver(make_output(5, [2, 1], [21, 11], logprobs=[make_logprob(0, -3.0)]))
        end = scheduler_pb2.SequenceFinished(seq_key=1)
        stream.deliver(make_output(6, [], [], finished=[end]))
        message = await stream.next_message()
        assert message.step == make_output(
            6,
            [1, 2, 2, 1],
            [10, 20, 21, 11],
            logprobs=[make_logprob(1, -2.0), make_logprob(2, -3.0)],
            finished=[end],
        )

    async def test_pending_events_come_before_the_end(self):
        stream = RouterStream(1, "r", 1 << 20)
        stream.deliver(make_output(1, [1], [10]))
        stream.refuse(scheduler_pb2.Refused(first_seq_key=9))
        stream.end()
        assert (await stream.next_message()).refused.first_seq_key == 9
        assert (await stream.next_message()).step.step_id == 1
        assert await stream.next_message() is None

    async def test_waiting_ends_when_something_comes(self):
        stream = RouterStream(1, "r", 1 << 20)
        waiting = asyncio.create_task(stream.next_message())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.deliver(make_output(1, [1], [10]))
        assert (await waiting).step.step_id == 1

    @pytest.mark.parametrize("num_bytes", [0, 4000])
    async def test_backlog_is_bounded_whatever_it_is_made_of(self, num_bytes):
        stream = RouterStream(1, "r", 100_000)
        num_delivered = 0
        while not stream._ended:
            stream.deliver(make_output(1, [], [0] * (num_bytes // 4)))
            num_delivered += 1
        assert num_delivered <= 100_000 // (num_bytes + 256) + 1
        assert not stream._outputs
        with pytest.raises(TooBusyError, match="100000 bytes"):
            await stream.next_message()

    async def test_backlog_is_what_has_not_been_sent(self):
        stream = RouterStream(1, "r", 1000)
        for step_id in range(20):
            stream.deliver(make_output(step_id, [1], [2]))
            assert (await stream.next_message()).step.step_id == step_id

    def test_live_key_cannot_be_claimed_twice(self):
        streams = RouterStreams(1 << 20)
        stream = streams.open("r")
        stream.claim([10, 11, 12])
        with pytest.raises(InvalidArgumentError, match="sequence 12 is live"):
            stream.claim([12])
        stream.claim([13])
        streams.refuse(make_request(stream.source, key=13), TooBusyError("full"))
        stream.claim([13])

    async def test_routers_are_silent_when_none_is_heard(self, monkeypatch):
        monkeypatch.setattr(fan_out, "TICK_S", 0.001)
        streams = RouterStreams(1 << 20)
        watching = asyncio.create_task(streams.watch())
        assert not streams.are_silent, "there is none"
        one, other = streams.open("one"), streams.open("other")
        one.on_heartbeat()
        while not one.heartbeat.is_hanging:  # noqa: ASYNC110 - it counts ticks
            await asyncio.sleep(0.001)
        assert not streams.are_silent, "the other is of an earlier version"
        other.on_heartbeat()
        while not other.heartbeat.is_hanging:
            assert not streams.are_silent
            await asyncio.sleep(0.001)
        assert streams.are_silent
        one.on_message()
        assert not streams.are_silent
        streams.close(one)
        assert streams.are_silent
        watching.cancel()

    def test_news_for_a_stream_that_is_gone_is_lost(self):
        streams = RouterStreams(1 << 20)
        stream = streams.open("r")
        streams.close(stream)
        streams.deliver({stream.source: make_output(1, [1], [2])})
        streams.refuse(make_request(stream.source), TooBusyError("full"))
        assert streams.open("r").source != stream.source
