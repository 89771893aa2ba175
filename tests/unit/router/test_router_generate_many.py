"""`GenerateMany`: many requests on one call, between a client and a fake scheduler."""

import asyncio
import gc
import weakref

import grpc
import grpc.aio
import pytest
from router_fake_scheduler import LENGTH, MAX_MODEL_LEN

from contract.codec.packing import pack_int32, pack_uint64
from contract.errors import InvalidArgumentError, TooBusyError
from quire.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2
from router.grpc import many
from router.grpc.api import InferenceServicer
from router.grpc.bounds import MAX_FIELDS, RefusedRequest, RequestBounds
from router.grpc.many import _MOST_UNSENT_BYTES, ManyCall
from router.live.live_request import LiveRequest
from rpc.status import ErrorInterceptor

CANCELLED, INVALID, NOT_FOUND = 1, 3, 5


@pytest.fixture
async def stub(router, tmp_path):
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(), RequestBounds(router.cells, 1 << 20)],
        options=[("grpc.max_receive_message_length", 4 << 20)],
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(router.cells), server
    )
    server.add_insecure_port(f"unix:{tmp_path / 'r'}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'r'}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
    await server.stop(0)


def generate(number, *, priority=0, timeout_s=None, tenant="", **kwargs):
    if "text" not in kwargs:
        kwargs["token_ids"] = inference_pb2.TokenIds(ids=[5, 6, 7])
    return inference_pb2.GenerateManyRequest(
        number=number,
        generate=inference_pb2.GenerateRequest(**kwargs),
        priority=priority,
        timeout_s=timeout_s,
        tenant=tenant,
    )


def leave(number):
    return inference_pb2.GenerateManyRequest(number=number, leave=inference_pb2.LeaveRequest())


async def next_events(call):
    return [(event.number, event) for event in (await call.read()).events]


async def begin(router, call, number, **kwargs):
    """Send a request; return its first sequence's key."""
    await call.write(generate(number, **kwargs))
    return (await router.scheduler.submits.get()).first_seq_key


async def test_a_step_is_one_message_for_all_requests(router, stub):
    call = stub.GenerateMany()
    a = await begin(router, call, 7, request_id="a")
    b = await begin(router, call, 9, request_id="b")
    await router.scheduler.step({a: [70], b: [71]})
    events = await next_events(call)
    assert [(number, e.request_id, list(e.delta.token_ids)) for number, e in events] == [
        (7, "a", [70]),
        (9, "b", [71]),
    ]
    await router.scheduler.step({a: [72], b: [73]}, finished={a: LENGTH})
    await call.done_writing()
    rest = [event for message in [m async for m in _until(call, 7)] for event in message.events]
    assert not any(event.request_id for event in rest)
    kinds = {7: [], 9: []}
    for event in rest:
        kinds[event.number].append(event.WhichOneof("event"))
    assert kinds == {7: ["delta", "finished", "usage"], 9: ["delta"]}
    await router.scheduler.step(finished={b: LENGTH})
    last = []
    while (message := await call.read()) is not grpc.aio.EOF:
        last += [event.WhichOneof("event") for event in message.events]
    assert last == ["finished", "usage"]
    assert await call.code() is grpc.StatusCode.OK


async def _until(call, number):
    """Yield messages until one has the usage of `number`, and one a delta of the other request."""
    numbers = set()
    while numbers < {7, 9}:
        message = await call.read()
        yield message
        numbers |= {e.number for e in message.events if e.number != number or e.HasField("usage")}


async def test_a_refused_request_does_not_end_the_others(router, stub):
    call = stub.GenerateMany()
    key = await begin(router, call, 1)
    await call.write(generate(2, model="other"))
    await call.write(generate(3, text="x" * (2 << 20)))
    await call.write(generate(4, stop=["x"] * (MAX_FIELDS + 1)))
    await call.write(generate(5, timeout_s=-1.0))
    await call.write(inference_pb2.GenerateManyRequest(number=6))
    refused = {}
    while len(refused) < 5:
        refused |= {number: event.error for number, event in await next_events(call)}
    assert {number: error.code for number, error in refused.items()} == {
        2: NOT_FOUND,
        3: INVALID,
        4: INVALID,
        5: INVALID,
        6: INVALID,
    }
    assert "timeout_s is -1.0" in refused[5].message
    assert "has more than" in refused[4].message
    await router.scheduler.step({key: [70]})
    ((number, event),) = await next_events(call)
    assert (number, list(event.delta.token_ids)) == (1, [70])
    call.cancel()


async def test_a_message_that_cannot_be_parsed_is_refused_alone(router):
    method = "/quire.v1.InferenceService/GenerateMany"
    parse = inference_pb2.GenerateManyRequest.FromString
    data = generate(300, text="ab").SerializeToString().replace(b"ab", b"\xff\xfe")
    refused = RequestBounds(router.cells, 1 << 20)._bounded(method, parse)(data)
    assert (refused.number, type(refused.error)) == (300, InvalidArgumentError)
    assert "UTF-8" in str(refused.error)


async def test_what_stands_beside_a_request_reaches_the_scheduler(router, stub):
    call = stub.GenerateMany()
    await call.write(generate(1, priority=-4, timeout_s=60, tenant="t"))
    submit = await router.scheduler.submits.get()
    assert (submit.priority, submit.tenant) == (-4, "t")
    assert 0 < submit.deadline_s <= 60
    call.cancel()


async def test_a_left_request_is_cancelled_and_its_number_is_free(router, stub):
    call = stub.GenerateMany()
    key = await begin(router, call, 1)
    await call.write(leave(1))
    await call.write(leave(2))  # no request has this number
    assert await router.scheduler.cancels.get() == [key]
    ((number, event),) = await next_events(call)
    assert (number, event.error.code, event.error.retryable) == (1, CANCELLED, False)
    key = await begin(router, call, 1, request_id="again")
    await router.scheduler.step({key: [70]})
    ((number, event),) = await next_events(call)
    assert (number, event.request_id) == (1, "again")
    call.cancel()


async def test_a_number_in_use_ends_the_call_and_its_requests(router, stub):
    call = stub.GenerateMany()
    key = await begin(router, call, 1)
    await call.write(generate(1))
    assert await router.scheduler.cancels.get() == [key]
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "number is 1" in await call.details()


async def test_a_broken_call_cancels_its_requests(router, stub):
    call = stub.GenerateMany()
    keys = [await begin(router, call, number) for number in (1, 2)]
    call.cancel()
    cancelled = await router.scheduler.cancels.get()
    while len(cancelled) < len(keys):  # together or one by one
        cancelled += await router.scheduler.cancels.get()
    assert sorted(cancelled) == sorted(keys)


@pytest.mark.parametrize("has_sent_all", [False, True])
async def test_requests_of_a_broken_call_end_in_slices(router, has_sent_all, monkeypatch):
    monkeypatch.setattr(many, "_CANCELLED_AT_ONCE", 2)
    context, messages = Context(), Messages()
    call = ManyCall(router.cells, context)
    serving = asyncio.create_task(call.serve(messages))
    for number in (1, 2, 3):
        messages.send(generate(number))
        await router.scheduler.submits.get()
    if has_sent_all:
        messages.send(None)
        await asyncio.sleep(0)
    tasks = [request.task for request in call._number_to_request.values()]
    serving.cancel()
    num_cancelling = []
    for _ in range(20):
        num_cancelling.append(sum(task.cancelling() > 0 for task in tasks))
        await asyncio.sleep(0)
    assert {2, 3} <= {*num_cancelling}
    await asyncio.wait([serving])
    assert all(task.cancelled() for task in tasks)


async def test_a_resumable_request_goes_on_in_another_call(router, stub):
    call = stub.GenerateMany()
    await call.write(generate(1, request_id="r", resumable=True))
    submit = await router.scheduler.submits.get()
    await router.scheduler.step({submit.first_seq_key: [70]})
    await next_events(call)
    call.cancel()
    assert await router.scheduler.leaves.get() == [submit.first_seq_key]

    call = stub.GenerateMany()
    asked = await _resume(
        router, call, 3, "r", received=[inference_pb2.OutputReceived(num_tokens=1)]
    )
    so_far = scheduler_pb2.StepOutput(
        seq_keys=pack_uint64([asked.first_seq_key] * 2), token_ids=pack_int32([70, 71])
    )
    await router.scheduler.resumed(submit, asked.first_seq_key, so_far)
    await router.scheduler.step({asked.first_seq_key: [72]}, finished={asked.first_seq_key: LENGTH})
    await call.done_writing()
    events = [event for message in [m async for m in call] for event in message.events]
    assert {event.number for event in events} == {3}
    tokens = [t for event in events for t in event.delta.token_ids]
    assert tokens == [71, 72]
    assert await call.code() is grpc.StatusCode.OK


async def test_an_unknown_request_is_not_resumed_and_the_call_stays(router, stub):
    call = stub.GenerateMany()
    asked = await _resume(router, call, 3, "unknown")
    await router.scheduler.refuse(asked.first_seq_key, grpc.StatusCode.NOT_FOUND, "no such request")
    ((number, event),) = await next_events(call)
    assert (number, event.error.code) == (3, NOT_FOUND)
    await begin(router, call, 4)
    call.cancel()


async def _resume(router, call, number, request_id, **fields):
    """Sends a resume; returns the scheduler's `Resume`."""
    resume = inference_pb2.ResumeRequest(request_id=request_id, **fields)
    await call.write(inference_pb2.GenerateManyRequest(number=number, resume=resume))
    return await router.scheduler.resumes.get()


class Context:
    """Writes when the test lets it."""

    def __init__(self):
        self.written = []
        self.may_write = asyncio.Event()

    def time_remaining(self):
        return None

    async def write(self, response):
        await self.may_write.wait()
        self.written.append(response)


class Messages:
    """The client's messages, as the test sends them."""

    def __init__(self):
        self._queue = asyncio.Queue()
        self.send = self._queue.put_nowait
        self.num_read = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if (message := await self._queue.get()) is None:
            raise StopAsyncIteration
        self.num_read += 1
        return message


async def test_a_slow_client_gets_all_tokens_in_few_messages_of_bounded_size(router):
    context, messages = Context(), Messages()
    serving = asyncio.create_task(ManyCall(router.cells, context).serve(messages))
    messages.send(generate(1))
    key = (await router.scheduler.submits.get()).first_seq_key
    num_tokens = MAX_MODEL_LEN - 3
    for token in range(num_tokens):
        await router.scheduler.step({key: [5 + token % 7]})
    await router.scheduler.step(finished={key: LENGTH})
    messages.send(None)
    context.may_write.set()
    await serving
    events = [event for response in context.written for event in response.events]
    offset = 0
    for event in events[:-2]:
        assert event.delta.token_offset == offset
        offset += len(event.delta.token_ids)
    assert offset == num_tokens
    assert events[-1].usage.completion_tokens == num_tokens


async def test_a_full_message_makes_its_requests_wait_and_merge(router):
    call = ManyCall(router.cells, Context())
    assert call.has_room()
    call._num_bytes = _MOST_UNSENT_BYTES
    waiting = asyncio.create_task(call.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    call._response.events.add(number=1)
    assert call._take_response().events
    await waiting


async def test_refusals_that_nobody_reads_stop_the_reading(router):
    context, messages = Context(), Messages()
    serving = asyncio.create_task(ManyCall(router.cells, context).serve(messages))
    for number in range(1, 5001):
        messages.send(RefusedRequest(number, TooBusyError("full", 2.5)))
    messages.send(None)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert messages.num_read == 2048  # one message is being written, and the next is full
    context.may_write.set()
    await serving
    events = [event for response in context.written for event in response.events]
    assert [event.number for event in events] == [*range(1, 5001)]
    assert (events[0].error.retryable, events[0].error.retry_after_s) == (True, 2.5)


async def test_a_refused_message_without_a_number_ends_the_call(router):
    bounds = RequestBounds(router.cells, 10)
    method = "/quire.v1.InferenceService/GenerateMany"
    parse = inference_pb2.GenerateManyRequest.FromString
    bounded = bounds._bounded(method, parse)
    refused = bounded(generate(300, text="x" * 20).SerializeToString())
    assert (refused.number, type(refused.error)) == (300, InvalidArgumentError)
    unnumbered = inference_pb2.GenerateManyRequest()
    unnumbered.generate.text = "x" * 20
    with pytest.raises(InvalidArgumentError, match="request has 24 bytes"):
        bounded(unnumbered.SerializeToString())


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
async def test_requests_that_are_refused_or_cancelled_leave_no_garbage(router, stub):
    call = stub.GenerateMany()
    refused = await begin(router, call, 1)
    await begin(router, call, 2)
    lives = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, LiveRequest)]
    assert len(lives) == 2
    await router.scheduler.refuse(refused, grpc.StatusCode.INVALID_ARGUMENT, "too long")
    [(number, event)] = await next_events(call)
    assert (number, event.error.code) == (1, INVALID)
    await until_left(lives, 1)
    call.cancel()
    await until_left(lives, 0)


async def until_left(lives, count):
    async with asyncio.timeout(10):
        while sum(live() is not None for live in lives) > count:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
