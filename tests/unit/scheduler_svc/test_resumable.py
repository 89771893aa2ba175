"""Resumable requests: the stream that has each, the events kept of it, and for how long."""

import numpy as np
import pytest

from contract.codec.packing import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from contract.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, TooBusyError
from quire.v1 import common_pb2, scheduler_pb2
from scheduler_svc.core.interface.request import Request
from scheduler_svc.domain import live_seq_keys
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.routers.resumable import ResumableRequests
from scheduler_svc.wire.router import renamed_part

GRACE_S = 10.0
MIB = 1 << 20
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
LENGTH = common_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def streams():
    return RouterStreams(MIB, ResumableRequests(grace_s=GRACE_S, max_bytes=MIB))


def submit(streams, stream, request_id="r", *, key=0, n=1, tenant="", deadline=None, **fields):
    """Submit a resumable request like the servicer."""
    request = Request(
        stream.source,
        key,
        request_id,
        np.array([1, 2], np.int32),
        n,
        5,
        b"",
        tenant=tenant,
        deadline=deadline,
    )
    message = scheduler_pb2.Submit(
        request_id=request_id,
        first_seq_key=key,
        n=n,
        tenant=tenant,
        resume_record=b"terms",
        **fields,
    )
    stream.claim(live_seq_keys(request))
    return request, streams.resumables.add(request, message, stream)


def output(keys=(), tokens=(), *, ended=(), **fields):
    return scheduler_pb2.StepOutput(
        seq_keys=pack_uint64(list(keys)),
        token_ids=pack_int32(list(tokens)),
        finished=[scheduler_pb2.SequenceFinished(seq_key=k, finish_reason=LENGTH) for k in ended],
        **fields,
    )


def resume(streams, stream, key, request_id="r", *, tenant="", now=0.0):
    message = scheduler_pb2.Resume(request_id=request_id, tenant=tenant, first_seq_key=key)
    streams.resumables.resume(message, stream, now)


async def next_resumed(stream):
    while (message := await stream.next_message()).WhichOneof("message") != "resumed":
        pass
    return message.resumed


def tokens_by_key(step):
    tokens = {}
    keys = unpack_uint64(step.seq_keys, "seq_keys").tolist()
    for key, token in zip(keys, unpack_int32(step.token_ids, "token_ids").tolist(), strict=True):
        tokens.setdefault(key, []).append(token)
    return tokens


@pytest.mark.parametrize("num_steps", [3, 16, 200])
async def test_a_resumed_stream_gets_all_earlier_and_later_events(streams, num_steps):
    """Even if it is resumed between two batches of stored events."""
    first = streams.open("a")
    submit(streams, first, key=5, n=2)
    for step in range(num_steps):
        streams.deliver({first.source: output([6, 5, 99], [step, 1000 + step, 7])})
    streams.close(first)
    assert streams.resumables.leave_all(first, 0.0) == frozenset()
    streams.deliver({first.source: output([6], [num_steps])})
    second = streams.open("b")
    resume(streams, second, 40)
    streams.deliver({first.source: output([5, 6, 99], [8, 9, 7], ended=[6])})
    resumed = await next_resumed(second)
    assert resumed.submit.resume_record == b"terms"
    assert resumed.submit.first_seq_key == 40
    assert tokens_by_key(resumed.so_far) == {
        40: list(range(1000, 1000 + num_steps)),
        41: list(range(num_steps + 1)),
    }
    events = (await second.next_message()).step
    assert tokens_by_key(events) == {40: [8], 41: [9]}
    assert [end.seq_key for end in events.finished] == [41]


async def test_everything_that_is_not_a_token_is_kept_too(streams):
    first = streams.open("a")
    submit(streams, first, key=5, n=2)
    logprob = common_pb2.TokenLogprob(logprob=-1.5)
    for _ in range(2):
        streams.deliver(
            {
                first.source: output(
                    [9, 6, 5],
                    [1, 2, 3],
                    logprobs=[scheduler_pb2.IndexedLogprob(index=2, logprob=logprob)],
                    admitted=[scheduler_pb2.SequenceAdmitted(seq_key=5, num_cached_tokens=4)],
                    pinned=[scheduler_pb2.SequencePinned(seq_key=6, num_pinned_tokens=3)],
                    prompt_logprobs=[
                        scheduler_pb2.SequencePromptLogprobs(seq_key=5, position=1),
                        scheduler_pb2.SequencePromptLogprobs(seq_key=9, position=7),
                    ],
                )
            }
        )
    second = streams.open("b")
    resume(streams, second, 40)
    so_far = (await next_resumed(second)).so_far
    keys = unpack_uint64(so_far.seq_keys, "seq_keys").tolist()
    assert [keys[item.index] for item in so_far.logprobs] == [40, 40]
    assert [(item.seq_key, item.num_cached_tokens) for item in so_far.admitted] == [(40, 4)]
    assert [(item.seq_key, item.num_pinned_tokens) for item in so_far.pinned] == [(40, 3)]
    assert {(item.seq_key, item.position) for item in so_far.prompt_logprobs} == {(40, 1)}


async def test_what_a_router_says_when_it_submits_again_is_part_of_it(streams):
    stream = streams.open("a")
    end = scheduler_pb2.SequenceFinished(finish_reason=LENGTH)
    so_far = [
        scheduler_pb2.OutputSoFar(token_ids=pack_int32([1, 2])),
        scheduler_pb2.OutputSoFar(token_ids=pack_int32([3]), finished=True, end=end),
    ]
    submit(streams, stream, key=0, n=2, outputs=so_far)
    logprob = common_pb2.TokenLogprob(logprob=-1.0)
    streams.deliver(
        {
            stream.source: output(
                [0], [5], logprobs=[scheduler_pb2.IndexedLogprob(index=0, logprob=logprob)]
            )
        }
    )
    resume(streams, other := streams.open("b"), 10)
    resumed = await next_resumed(other)
    assert tokens_by_key(resumed.so_far) == {10: [1, 2, 5], 11: [3]}
    assert [item.index for item in resumed.so_far.logprobs] == [2], "of the token that came here"
    assert [(e.seq_key, e.finish_reason) for e in resumed.so_far.finished] == [(11, LENGTH)]
    assert not resumed.submit.outputs


async def test_the_former_router_is_notified_and_can_reuse_its_keys(streams):
    first, second = streams.open("a"), streams.open("b")
    submit(streams, first, key=5, n=2)
    resume(streams, second, 40)
    refused = (await first.next_message()).refused
    assert (refused.first_seq_key, refused.code) == (5, 10)  # ABORTED
    first.claim([5, 6])
    with pytest.raises(InvalidArgumentError, match="sequence 41 is live"):
        second.claim([41])
    assert streams.resumables.by_source(second, [41, 7]) == {first.source: [6], second.source: [7]}


async def test_a_request_moves_on_from_stream_to_stream(streams):
    routers = [streams.open(name) for name in "abc"]
    submit(streams, routers[0])
    resume(streams, routers[1], 40)
    streams.deliver({routers[0].source: output([0], [1])})
    streams.close(routers[1])
    streams.resumables.leave_all(routers[1], 0.0)
    streams.deliver({routers[0].source: output([0], [2])})
    resume(streams, routers[2], 70)
    assert tokens_by_key((await next_resumed(routers[2])).so_far) == {70: [1, 2]}
    resume(streams, routers[0], 90)  # again on its first stream, with other keys
    assert tokens_by_key((await next_resumed(routers[0])).so_far) == {90: [1, 2]}
    streams.deliver({routers[0].source: output([0], [3])})
    assert tokens_by_key((await routers[0].next_message()).step)[90] == [3]


@pytest.mark.parametrize("tenant", ["", "b"])
def test_another_tenants_request_is_not_found(streams, tenant):
    submit(streams, streams.open("a"), tenant="a")
    with pytest.raises(NotFoundError, match="'r' cannot be resumed"):
        resume(streams, streams.open("b"), 40, tenant=tenant)


def test_a_request_that_is_not_resumed_is_cancelled_after_the_grace_period(streams):
    stream = streams.open("a")
    submit(streams, stream, "left", key=0)
    submit(streams, stream, "stays", key=1)
    assert streams.resumables.leave(stream, 0, now=1.0)
    assert list(streams.resumables.expire(GRACE_S + 0.9)) == []
    assert list(streams.resumables.expire(GRACE_S + 1)) == [(stream.source, [0])]
    with pytest.raises(NotFoundError):
        resume(streams, stream, 40, "left")
    assert list(streams.resumables.expire(1e9)) == []
    assert len(streams.resumables) == 1


def test_ended_requests_are_kept_for_the_grace_period(streams):
    stream = streams.open("a")
    submit(streams, stream, n=2)
    streams.deliver({stream.source: output(ended=[0])})
    streams.deliver({stream.source: output([1], [4], ended=[1])})
    assert list(streams.resumables.expire(5.0)) == []
    assert list(streams.resumables.expire(5.0 + GRACE_S - 0.1)) == []
    resume(streams, streams.open("b"), 40, now=14.0)
    assert list(streams.resumables.expire(14.0 + GRACE_S)) == []
    assert len(streams.resumables) == 0


def test_a_request_without_a_reader_ends_at_its_deadline(streams):
    stream = streams.open("a")
    submit(streams, stream, deadline=3.0)
    assert list(streams.resumables.expire(3.0)) == [], "its router sees to that"
    streams.resumables.leave(stream, 0, now=3.0)
    assert list(streams.resumables.expire(3.1)) == [(stream.source, [0])]


def test_a_stream_that_ends_takes_along_what_is_not_kept(streams):
    stream = streams.open("a")
    submit(streams, stream, key=0)
    stream.claim([7, 8])
    streams.close(stream)
    assert streams.resumables.leave_all(stream, 0.0) == {7, 8}
    plain = streams.open("b")
    plain.claim([1])
    assert streams.resumables.leave_all(plain, 0.0) is None


def test_a_router_that_comes_back_takes_the_place_of_what_still_runs(streams):
    before = streams.open("a")
    submit(streams, before, key=3, n=2)
    streams.deliver({before.source: output(ended=[3])})
    after = streams.open("a")
    _, stale = submit(streams, after, key=3, n=2)
    assert stale == (before.source, [4])
    assert streams.resumables.leave_all(before, 0.0) is None
    with pytest.raises(AlreadyExistsError, match="another router"):
        submit(streams, streams.open("b"), key=0)
    streams.resumables.leave(after, 3, 0.0)
    _, stale = submit(streams, streams.open("b"), key=0)
    assert stale == (after.source, [3, 4])


async def test_a_refusal_reaches_who_has_resumed_the_request(streams):
    first, second = streams.open("a"), streams.open("b")
    request, _ = submit(streams, first, key=5)
    resume(streams, second, 40)
    await next_resumed(second)
    streams.refuse(request, TooBusyError("the queue is full"))
    assert (await second.next_message()).refused.first_seq_key == 40
    assert len(streams.resumables) == 0


def test_memory_is_bounded_and_the_oldest_that_has_ended_goes_first():
    streams = RouterStreams(MIB, ResumableRequests(grace_s=GRACE_S, max_bytes=10_000))
    stream = streams.open("a")
    for key in range(4):
        submit(streams, stream, f"r{key}", key=key)
    streams.resumables.leave(stream, 0, now=0.0)
    streams.deliver({stream.source: output([0, 1, 2, 3] * 800, [0] * 3200, ended=[2])})
    assert list(streams.resumables.expire(1.0)) == [], "the one that has ended is enough"
    with pytest.raises(NotFoundError):
        resume(streams, stream, 40, "r2")
    streams.deliver({stream.source: output([1, 3] * 400, [0] * 800)})
    assert list(streams.resumables.expire(1.0)) == [(stream.source, [0])], "then one without reader"
    streams.deliver({stream.source: output([1, 3] * 800, [0] * 1600)})
    assert list(streams.resumables.expire(1.0)) == [], "who is read is not given up"
    with pytest.raises(TooBusyError, match="the limit is 10000"):
        submit(streams, stream, "more", key=9)


def test_without_a_grace_period_nothing_is_kept():
    streams = RouterStreams(MIB)
    stream = streams.open("a")
    assert submit(streams, stream)[1] is None
    assert not streams.resumables.leave(stream, 0, now=0.0)
    assert streams.resumables.leave_all(stream, 0.0) is None


def test_a_part_of_the_news_names_what_it_is_asked_for():
    logprobs = [
        scheduler_pb2.IndexedLogprob(index=i, logprob=common_pb2.TokenLogprob(logprob=-i))
        for i in range(3)
    ]
    whole = output([1, 2, 1], [10, 20, 11], ended=[2], logprobs=logprobs)
    part = renamed_part(whole, {1: 7})
    assert tokens_by_key(part) == {7: [10, 11]}
    assert [(item.index, item.logprob.logprob) for item in part.logprobs] == [(0, 0.0), (1, -2.0)]
    assert not part.finished
    assert [end.seq_key for end in renamed_part(whole, {2: 8}).finished] == [8]
    assert renamed_part(whole, {3: 9}) is None
