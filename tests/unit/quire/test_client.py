"""Both clients against a fake of the service."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
from silent_relay import SilentRelay

from contract.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    TooBusyError,
    UnavailableError,
)
from quire.client import (
    AsyncClient,
    BeamSearch,
    ChatMessage,
    Client,
    FinishReason,
    Model,
    OutputDelta,
    OutputError,
    OutputFinished,
    Retry,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from quire.client.async_client import ASYNCIO
from quire.v1.inference_pb2 import (
    CancelRequest,
    GenerateRequest,
    OutputReceived,
    ResumeRequest,
)

EVENTS = [
    OutputDelta(0, 0, (0,), "one", ()),
    OutputDelta(0, 1, (1,), " two", ()),
    OutputFinished(0, FinishReason.LENGTH),
    Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
]


async def synchronously(target: str, call: Callable[[Client], object]) -> object:
    def run() -> object:
        with Client(target) as client:
            return call(client)

    return await asyncio.to_thread(run)


async def test_generate_streams_events(served):
    async with AsyncClient(served.target) as client:
        assert [event async for event in client.generate("hello")] == EVENTS
    assert await synchronously(served.target, lambda c: list(c.generate("hello"))) == EVENTS


async def test_unset_sampling_stays_unset_on_the_wire(served):
    await synchronously(served.target, lambda c: list(c.generate("hello")))
    (request,) = served.fake.requests
    assert request.sampling.ListFields() == []
    assert request.text == "hello"


@pytest.mark.parametrize(("stopping", "number"), [(False, 1), (True, 2), ("never", 3)])
async def test_a_search_goes_out_in_the_words_of_transformers(served, stopping, number):
    beam = BeamSearch(4, 0.0, stopping)
    await synchronously(served.target, lambda c: list(c.generate("hello", n=2, beam=beam)))
    (request,) = served.fake.requests
    assert (request.n, request.beam.width, request.beam.early_stopping) == (2, 4, number)
    assert request.beam.HasField("length_penalty")


async def test_zero_is_sent_where_zero_is_not_the_default(served):
    sampling = SamplingParams(temperature=0.0, seed=0, logprobs=0, logit_bias={3: 1.5})
    events = await synchronously(served.target, lambda c: list(c.generate([4, 2], sampling, n=2)))
    (request,) = served.fake.requests
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert dict(request.sampling.logit_bias) == {3: 1.5}
    assert list(request.token_ids.ids) == [4, 2]
    assert request.n == 2
    assert not request.HasField("skip_special_tokens")
    assert events[0].logprobs == (TokenLogprob(-0.5, ((0, -0.5),)),)


async def test_generate_once_gives_whole_outputs(served):
    completion = await synchronously(
        served.target, lambda c: c.generate_once("x", stop=("!",), model="m")
    )
    assert [output.text for output in completion.outputs] == ["one"]
    finished = completion.outputs[0].finished
    assert (finished.finish_reason, finished.stop_string) == (FinishReason.STOP, "!")
    assert list(served.fake.requests[0].request.stop) == ["!"]
    async with AsyncClient(served.target) as client:
        assert await client.generate_once("x", stop=("!",), model="m") == completion


async def test_tokenize_sends_text_or_chat(served):
    chat = [ChatMessage("user", "hi")]
    async with AsyncClient(served.target) as client:
        assert await client.tokenize("hi", add_special_tokens=False) == (5, 6, 7)
        assert await client.tokenize(chat) == (5, 6, 7)
        assert await client.detokenize([5, 6]) == "five six"
    text, messages, _ = served.fake.requests
    assert (text.text, text.add_special_tokens) == ("hi", False)
    assert [(m.role, m.content) for m in messages.chat.messages] == [("user", "hi")]


async def test_models_and_load(served):
    models = await synchronously(served.target, lambda c: c.models())
    assert models == (Model("m", max_model_len=64, vocab_size=9, eos_token_ids=(1,)),)
    load = await synchronously(served.target, lambda c: c.load())
    assert (load.num_requests_running, load.num_blocks, load.num_workers) == (2, 10, 1)
    assert (load.fragmentation, load.num_slots_written, load.num_host_blocks) == (0.25, 120, 4)
    async with AsyncClient(served.target) as client:
        assert (await client.models(), await client.load()) == (models, load)


async def test_refusal_is_the_service_s_own_error(served):
    with pytest.raises(InvalidArgumentError, match="is 2; it must be in") as refusal:
        await synchronously(served.target, lambda c: list(c.generate("bad")))
    assert refusal.value.field == "sampling.top_p"
    async with AsyncClient(served.target) as client:
        with pytest.raises(TooBusyError) as busy:
            await anext(client.generate("busy"))
    assert busy.value.retry_after_s == 2.5


async def test_service_that_is_not_there_is_unavailable():
    with pytest.raises(UnavailableError):
        await synchronously("127.0.0.1:1", lambda c: c.load(timeout_s=5))


async def test_deadline_reaches_the_service(served):
    timeout_s = 0.2
    while not served.fake.requests:  # on a busy machine it may time out before it arrives
        with pytest.raises(DeadlineExceededError):
            await synchronously(
                served.target, lambda c, s=timeout_s: list(c.generate("endless", timeout_s=s))
            )
        timeout_s *= 4
    await asyncio.wait_for(served.fake.cancelled.wait(), 20)


async def test_leaving_a_stream_early_cancels_it(served):
    def take_one(client: Client) -> object:
        events = client.generate("endless")
        event = next(events)
        events.close()
        return event

    assert await synchronously(served.target, take_one) == EVENTS[0]
    await asyncio.wait_for(served.fake.cancelled.wait(), 20)


async def test_leaving_an_asynchronous_stream_early_cancels_it(served):
    async with AsyncClient(served.target) as client:
        events = client.generate("endless")
        assert await anext(events) == EVENTS[0]
        await events.aclose()
        await asyncio.wait_for(served.fake.cancelled.wait(), 20)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"priority": -3}, {"x-quire-priority": "-3"}),
        ({"priority": 5, "tenant": "a b"}, {"x-quire-priority": "5", "x-quire-tenant": "a b"}),
    ],
)
async def test_priority_and_tenant_go_as_metadata(served, options, expected):
    await synchronously(served.target, lambda c: list(c.generate("x", **options)))
    await synchronously(served.target, lambda c: c.generate_once("x", **options))
    async with AsyncClient(served.target) as client:
        assert [event async for event in client.generate("x", **options)] == EVENTS
        await client.generate_once("x", **options)
    sent = [{k: v for k, v in m.items() if k.startswith("x-")} for m in served.fake.metadata]
    assert sent == [expected] * 4


async def test_a_tenant_that_metadata_cannot_carry_is_refused_by_name(served):
    with pytest.raises(InvalidArgumentError, match="tenant is 'é'"):
        await synchronously(served.target, lambda c: list(c.generate("x", tenant="é")))


async def test_the_failure_of_an_output_has_its_code(served):
    events = await synchronously(served.target, lambda c: list(c.generate("fails")))
    assert events[2] == OutputFinished(
        0, FinishReason.ERROR, error=OutputError(14, "lost", retryable=True)
    )


async def test_a_resumable_stream_that_breaks_goes_on(served):
    events = await synchronously(
        served.target, lambda c: list(c.generate("breaks", resumable=True, request_id="mine"))
    )
    assert events == EVENTS
    async with AsyncClient(served.target) as client:
        assert [e async for e in client.generate("breaks", resumable=True)] == EVENTS
        completion = await client.generate_once("breaks", resumable=True, request_id="mine")
    assert completion.request_id == "mine"
    assert [(o.text, o.token_ids) for o in completion.outputs] == [("one two", (0, 1))]
    assert [type(r) for r in served.fake.requests] == [GenerateRequest, ResumeRequest] * 3
    received = OutputReceived(output_index=0, num_tokens=1, num_text_bytes=3)
    assert served.fake.requests[1] == ResumeRequest(request_id="mine", received=[received])


async def test_without_resumable_a_stream_that_breaks_has_failed(served):
    async with AsyncClient(served.target, retry=Retry()) as client:
        with pytest.raises(UnavailableError, match="shutting down"):
            async for _ in client.generate("breaks"):
                pass
    assert len(served.fake.requests) == 1


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_client_finds_a_router_that_answers_and_keeps_it(served, resumable):
    dead = f"{served.target}-dead"
    async with AsyncClient([dead, served.target], retry=Retry()) as client:
        for _ in range(2):
            assert [e async for e in client.generate("x", resumable=resumable)] == EVENTS
        await client.generate_once("x")
    events = await synchronously(
        f"{dead},{served.target}", lambda c: list(c.generate("x", resumable=True))
    )
    assert events == EVENTS
    with pytest.raises(InvalidArgumentError, match="targets"):
        AsyncClient(f"{dead},")


async def test_a_resumable_call_leaves_a_silent_router_and_no_call_leaves_a_slow_one(served):
    path = served.target.removeprefix("unix:")
    async with SilentRelay(f"{path}-relay", path) as relay:
        routers = [relay.target, served.target]
        async with AsyncClient(routers) as client, AsyncClient(served.target) as other:
            with Client(routers) as blocking:
                plain = client.generate("pauses")
                slow = other.generate("pauses", resumable=True)
                leaving = client.generate("pauses", resumable=True)
                left_by_thread = blocking.generate("pauses", resumable=True)
                for events in (plain, slow, leaving):
                    assert await anext(events) == EVENTS[0]
                assert await asyncio.to_thread(next, left_by_thread) == EVENTS[0]
                relay.speaks.clear()
                assert [event async for event in leaving] == EVENTS[1:]
                assert await asyncio.to_thread(list, left_by_thread) == EVENTS[1:]
                relay.speaks.set()
                served.fake.goes_on.set()
                assert [event async for event in plain] == EVENTS[1:]
                assert [event async for event in slow] == EVENTS[1:]
    assert [type(r) for r in served.fake.requests] == [GenerateRequest] * 4 + [ResumeRequest] * 2


async def test_closing_a_resumable_stream_cancels_the_request(served):
    async with AsyncClient(served.target) as client:
        events = client.generate("endless", resumable=True, request_id="mine")
        await anext(events)
        await events.aclose()
    assert served.fake.requests[-1] == CancelRequest(request_id="mine")


async def test_cancelling_between_two_calls_cancels_the_request(served):
    waits = asyncio.Event()

    async def sleep(_):
        waits.set()
        await asyncio.Event().wait()

    async def read(client):
        async for _ in client.generate("breaks", resumable=True, request_id="mine"):
            pass

    async with AsyncClient(served.target, transport=replace(ASYNCIO, sleep=sleep)) as client:
        reading = asyncio.create_task(read(client))
        await waits.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert served.fake.requests[-1] == CancelRequest(request_id="mine")


async def test_a_busy_service_is_asked_again_when_it_says(served):
    waits = []

    async def sleep(delay_s):
        waits.append(delay_s)

    transport = replace(ASYNCIO, sleep=sleep)
    async with AsyncClient(
        served.target, retry=Retry(max_attempts=3), transport=transport
    ) as client:
        with pytest.raises(TooBusyError):
            async for _ in client.generate("busy"):
                pass
        assert waits == [2.5, 2.5]
        with pytest.raises(TooBusyError):
            async for _ in client.generate("busy", timeout_s=2):
                pass
    assert waits == [2.5, 2.5], "it would be too late by then"


def test_both_clients_have_the_same_methods_with_the_same_parameters():
    def methods(kind):
        return {
            name: list(inspect.signature(method).parameters.values())
            for name, method in vars(kind).items()
            if callable(method) and not name.startswith("_")
        }

    expected = methods(AsyncClient)
    assert methods(Client) == expected
    assert {"generate", "generate_once", "tokenize", "close"} <= expected.keys()
