"""The whole router except its `main`, between a gRPC client and a fake scheduler."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from keyed_router import plain_settings
from router_fake_scheduler import ERROR, LENGTH, MAX_MODEL_LEN, VOCAB_SIZE, FakeScheduler

from contract.codec.request import stop_options_from_bytes
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, kv_pb2
from router.app import run_router
from rpc.peers.channel import open_channel
from rpc.status import status_to_error


@dataclass
class Process:
    """A running router, a client's stub, and the scheduler behind it."""

    stub: inference_pb2_grpc.InferenceServiceStub
    http: str
    scheduler: FakeScheduler
    stop: asyncio.Event
    task: asyncio.Task


@pytest.fixture
async def process(model_dir, tmp_path) -> AsyncIterator[Process]:
    scheduler = FakeScheduler(tmp_path / "s")
    await scheduler.start()
    settings = plain_settings(model_dir, tmp_path)
    stop = asyncio.Event()
    addresses = asyncio.get_running_loop().create_future()

    async def on_started(bound):
        addresses.set_result(bound)

    task = asyncio.create_task(run_router(settings, stop, on_started=on_started))
    async with open_channel(f"unix:{tmp_path / 'r'}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="quire.v1.InferenceService"), wait_for_ready=True
        )
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield Process(stub, addresses.result().http, scheduler, stop, task)
        stop.set()
        await task
    await scheduler.stop()


def request(**kwargs):
    if "token_ids" not in kwargs:
        kwargs.setdefault("text", "hello")
    return inference_pb2.GenerateRequest(**kwargs)


async def details_of(call):
    """The error of a call, and its google.rpc details by the name of their type."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    packed = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    details = {}
    for detail in status_pb2.Status.FromString(packed).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                detail.Unpack(message := kind())
                details[kind.__name__] = message
    return caught.value, details


async def test_generate_streams_deltas_ends_and_usage(process):
    call = process.stub.Generate(request(request_id="r", n=2))
    submit = await process.scheduler.submits.get()
    first = submit.first_seq_key
    await process.scheduler.step(
        {first: [70], first + 1: [71]}, finished={first: LENGTH, first + 1: LENGTH}
    )
    responses = [response async for response in call]
    assert {response.request_id for response in responses} == {"r"}
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["delta", "finished", "delta", "finished", "usage"]
    assert [list(responses[i].delta.token_ids) for i in (0, 2)] == [[70], [71]]
    assert responses[4].usage.completion_tokens == 2
    assert responses[1].finished.WhichOneof("stopped_by") is None


async def test_priority_tenant_and_deadline_reach_the_scheduler(process):
    metadata = (("x-quire-priority", "-4"), ("x-quire-tenant", "a"))
    call = process.stub.Generate(request(), metadata=metadata, timeout=60)
    submit = await process.scheduler.submits.get()
    assert (submit.priority, submit.tenant) == (-4, "a")
    assert 0 < submit.deadline_s < 61  # gRPC rounds
    call.cancel()
    call = process.stub.Generate(request())
    submit = await process.scheduler.submits.get()
    assert (submit.priority, submit.tenant, submit.HasField("deadline_s")) == (0, "", False)
    call.cancel()


async def test_generate_once_collects_outputs_by_index(process):
    sampling = common_pb2.SamplingParams(logprobs=0)
    call = process.stub.GenerateOnce(
        inference_pb2.GenerateOnceRequest(request=request(n=2, stop=["zz"], sampling=sampling))
    )
    first = (await process.scheduler.submits.get()).first_seq_key
    hello = (await process.stub.Tokenize(
        inference_pb2.TokenizeRequest(text="hello", add_special_tokens=False)
    )).token_ids  # fmt: skip
    await process.scheduler.step({first + 1: hello}, finished={first + 1: LENGTH}, logprobs=[])
    await process.scheduler.step(
        {first: [70]}, finished={first: LENGTH}, logprobs=[common_pb2.TokenLogprob(logprob=-1.5)]
    )
    response = await call
    assert [list(output.token_ids) for output in response.outputs] == [[70], list(hello)]
    assert response.outputs[1].text == "hello"
    assert response.outputs[0].logprobs[0].logprob == -1.5
    assert response.outputs[0].finished.finish_reason == LENGTH
    assert response.usage.completion_tokens == 1 + len(hello)


async def test_a_request_that_may_be_resumed_keeps_its_interval(process):
    resumable = inference_pb2.GenerateOnceRequest(request=request(request_id="r", resumable=True))
    call = process.stub.GenerateOnce(resumable)
    record = (await process.scheduler.submits.get()).resume_record
    assert stop_options_from_bytes(record).stream_interval == 1
    call.cancel()


async def test_generate_once_fails_if_an_output_does(process):
    call = process.stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request(n=2)))
    first = (await process.scheduler.submits.get()).first_seq_key
    await process.scheduler.step({first: [70]})
    error = common_pb2.OutputError(code=14, message="worker lost", retryable=True)
    await process.scheduler.step(finished={first: ERROR}, error=error)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "worker lost",
    )
    assert await process.scheduler.cancels.get() == [first + 1]


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        ({"text": ""}, "prompt", "is empty"),
        ({"token_ids": inference_pb2.TokenIds()}, "prompt", "is empty"),
        ({"text": "a b " * 60}, "prompt", f"at most {MAX_MODEL_LEN - 1}"),
        ({"token_ids": inference_pb2.TokenIds(ids=[VOCAB_SIZE])}, "prompt[0]", f"{VOCAB_SIZE})"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens", "is 0; it must be in [1, 64]"),
        ({"sampling": {"max_tokens": -1}}, "sampling.max_tokens", "is -1"),
        ({"sampling": {"max_tokens": 2**31 - 1}}, "sampling.max_tokens", "is 2147483647"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature", "is nan"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p", "is 2.0; it must be in (0, 1]"),
        ({"sampling": {"logprobs": 500}}, "sampling.logprobs", "is 500"),
        ({"stop": ["x"] * 10_000}, "stop", "has 10000 entries; it must have at most 16"),
        ({"stop": ["x" * 1_000_000]}, "stop[0]", "has 1000000 characters"),
        ({"n": 0}, "n", "is 0; it must be in [1, 64]"),
    ],
)
async def test_bad_input_is_invalid_argument_with_the_field_in_bad_request(
    process, bad, field, words
):
    error, details = await details_of(process.stub.Generate(request(**bad)).read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field} ")
    assert words in error.details()
    assert details["BadRequest"].field_violations[0].field == field
    models = await process.stub.ListModels(inference_pb2.ListModelsRequest())
    assert [model.id for model in models.models] == ["tiny"]  # the service still works


async def test_no_prompt_and_an_unknown_model_have_different_errors(process):
    empty = process.stub.Generate(inference_pb2.GenerateRequest())
    error, _ = await details_of(empty.read())
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt is not set; text or token_ids must be",
    )
    error, _ = await details_of(process.stub.Generate(request(model="gpt-4")).read())
    assert (error.code(), error.details()) == (
        grpc.StatusCode.NOT_FOUND,
        "model 'gpt-4' is not served; 'tiny' is",
    )


async def test_a_full_scheduler_is_resource_exhausted_with_retry_info(process):
    call = process.stub.Generate(request())
    submit = await process.scheduler.submits.get()
    await process.scheduler.refuse(
        submit.first_seq_key, grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", retry_after_s=2.5
    )
    error, details = await details_of(call.read())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 2.5
    assert status_to_error(error).retry_after_s == 2.5


async def test_a_client_that_cancels_or_times_out_ends_its_sequences(process):
    cancelled = process.stub.Generate(request())
    first = (await process.scheduler.submits.get()).first_seq_key
    cancelled.cancel()
    assert await process.scheduler.cancels.get() == [first]

    submitted = asyncio.create_task(process.scheduler.submits.get())
    timeout_s = 0.2
    while not submitted.done():  # on a busy machine it may time out before it arrives
        timed_out = process.stub.Generate(request(), timeout=timeout_s)
        # Both ends have a timer; the call ends with the same status whichever fires first.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in timed_out]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        timeout_s *= 4
    assert await process.scheduler.cancels.get() == [submitted.result().first_seq_key]


async def test_a_client_that_never_reads_and_leaves_ends_its_sequences(process):
    # More than the transport's windows hold, so the handler waits in a write when the client
    # leaves.
    logprob = common_pb2.TokenLogprob(top_token_ids=range(400, 420), top_logprobs=[-1.0] * 20)
    call = process.stub.Generate(request(n=64, sampling={"logprobs": 20}))
    first = (await process.scheduler.submits.get()).first_seq_key
    keys = range(first, first + 64)
    for _ in range(50):
        await process.scheduler.step({key: [70] for key in keys}, logprobs=[logprob] * 64)
    call.cancel()
    assert await process.scheduler.cancels.get() == list(keys)


async def test_the_callers_trace_goes_on_to_the_scheduler(process):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    call = process.stub.Generate(
        request(), metadata=[("traceparent", f"00-{trace_id}-b7ad6b7169203331-01")]
    )
    assert (await process.scheduler.submits.get()).traceparent.split("-")[1] == trace_id
    call.cancel()


async def test_tokenize_and_detokenize_are_each_others_inverse(process):
    tokens = await process.stub.Tokenize(inference_pb2.TokenizeRequest(text="naïve 🙂"))
    assert (tokens.token_ids[0], tokens.max_model_len) == (0, MAX_MODEL_LEN)
    for skip, text in ((None, "naïve 🙂"), (False, "<s>naïve 🙂")):
        answer = await process.stub.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=skip)
        )
        assert answer.text == text
    error, _ = await details_of(
        process.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[VOCAB_SIZE]))
    )
    assert error.details() == f"token_ids[0] is {VOCAB_SIZE}; it must be in [0, {VOCAB_SIZE})"


async def test_a_chat_is_tokenized_by_the_template_without_special_tokens_twice(process):
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    tokens = await process.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    answer = await process.stub.Detokenize(
        inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=False)
    )
    assert answer.text == "<s>user: hi\nassistant:"


async def test_add_special_tokens_with_a_chat_is_refused_by_name(process):
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    for value in (True, False):
        asked = inference_pb2.TokenizeRequest(chat=chat, add_special_tokens=value)
        error, details = await details_of(process.stub.Tokenize(asked))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details["BadRequest"].field_violations[0].field == "add_special_tokens"


async def test_the_load_is_the_schedulers(process):
    load = await process.stub.GetLoad(inference_pb2.GetLoadRequest())
    assert load.load == process.scheduler.load


async def test_an_http_client_is_served_by_the_same_service_and_its_leaving_is_noticed(process):
    async with aiohttp.ClientSession(f"http://{process.http}") as http:
        body = {"model": "tiny", "prompt": "hello", "stream": True}
        response = await post_and_answer(process, http, body)
        assert b"data: [DONE]" in await response.read()
        for body["stream"] in (True, False):
            leaving = asyncio.create_task(http.post("/v1/completions", json=body))
            first = (await process.scheduler.submits.get()).first_seq_key
            leaving.cancel()
            assert await process.scheduler.cancels.get() == [first]


async def test_kv_is_what_the_scheduler_says(process):
    query = kv_pb2.KvQuery(first_block=16)
    response = await process.stub.DescribeKv(inference_pb2.DescribeKvRequest(query=query))
    assert [(worker.worker, worker.block_size) for worker in response.workers] == [("w", 16)]
    query = kv_pb2.KvQuery(worker="nowhere")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await process.stub.DescribeKv(inference_pb2.DescribeKvRequest(query=query))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "nowhere" in refused.value.details()


async def post_and_answer(process, http, body):
    response = asyncio.create_task(http.post("/v1/completions", json=body))
    first = (await process.scheduler.submits.get()).first_seq_key
    await process.scheduler.step({first: [70]}, finished={first: LENGTH})
    return await response


async def test_a_stop_signal_lets_live_requests_finish_and_refuses_new_ones(process):
    call = process.stub.Generate(request())
    first = (await process.scheduler.submits.get()).first_seq_key
    process.stop.set()
    while True:  # until the drain has begun
        late = process.stub.Generate(request())
        try:
            await asyncio.wait_for(late.read(), 0.2)
        except TimeoutError:
            continue
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
            break
    await process.scheduler.step({first: [70]}, finished={first: LENGTH})
    kinds = [response.WhichOneof("event") async for response in call]
    assert kinds == ["delta", "finished", "usage"]
    await process.task
