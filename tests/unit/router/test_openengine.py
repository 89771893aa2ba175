"""`openengine.v1`, as its clients call it, against a fake scheduler."""

import asyncio

import grpc
import pytest
from keyed_router import plain_settings, running
from router_fake_scheduler import EOS, ERROR, LENGTH, STOP, FakeKvEvents

from contract.codec.packing import pack_int32, unpack_int32
from contract.codec.sampling import sampling_from_proto
from contract.sampling import SamplingParams
from quire.openengine import openengine_pb2 as pb
from quire.openengine import openengine_pb2_grpc
from quire.v1 import common_pb2, kv_pb2
from router.grpc.bounds import MAX_SMALL_BYTES

PROMPT = pb.TokenIds(ids=[5, 6, 7])


@pytest.fixture
async def router(model_dir, tmp_path):
    settings = plain_settings(model_dir, tmp_path, openengine=True)
    async with running(settings, tmp_path) as router:
        yield router


@pytest.fixture
def generate(router):
    return openengine_pb2_grpc.InferenceStub(router.channel).Generate


@pytest.fixture
def control(router):
    return openengine_pb2_grpc.ControlStub(router.channel)


def ends_with(*token_ids, **stopping):
    conditions = [pb.StopCondition(stop_token_id=each) for each in token_ids]
    return pb.StoppingOptions(conditions=conditions, **stopping)


async def read(call):
    return [message async for message in call]


def tokens_of(messages):
    return [info.token_id for message in messages for info in message.token.tokens]


async def test_a_request_has_its_tokens_and_the_usage_with_its_last_end(router, generate):
    request = pb.GenerateRequest(
        request_id="mine",
        model="tiny",
        token_ids=PROMPT,
        sampling=pb.SamplingParams(temperature=0, top_k=-1, seed=11, num_sequences=2),
        stopping=pb.StoppingOptions(max_tokens=2),
    )
    call = generate(request, metadata=(("openengine-priority", "7"),))
    submit = await router.scheduler.submits.get()
    assert (submit.request_id, submit.n, submit.priority) == ("mine", 2, 7)
    assert list(unpack_int32(submit.prompt_token_ids, "prompt")) == [5, 6, 7]
    sampling = sampling_from_proto(submit.sampling)
    assert sampling == SamplingParams(temperature=0, max_tokens=2, seed=11)
    key = submit.first_seq_key
    await router.scheduler.step({key: [70], key + 1: [80]}, admitted={key: 2})
    await router.scheduler.step({key: [71]}, finished={key: LENGTH})
    await router.scheduler.step({key + 1: [81]}, finished={key + 1: LENGTH})
    messages = await read(call)
    assert {message.request_id for message in messages} == {"mine"}
    for index, token_ids in enumerate(([70, 71], [80, 81])):
        own = [each for each in messages if each.token.output_index == index]
        assert tokens_of(own) == token_ids
    ends = [message for message in messages if message.HasField("finished")]
    assert [end.finished.output_index for end in ends] == [0, 1]
    assert {end.finished.reason for end in ends} == {pb.FINISH_REASON_LENGTH}
    assert [end.HasField("usage") for end in ends] == [False, True]
    assert messages[-1] is ends[-1]
    usage = ends[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)
    assert usage.cached_prompt_tokens == 2


@pytest.mark.parametrize(("included", "token_ids"), [(False, [9, 70]), (True, [9, 70, 9])])
async def test_a_stop_token_is_part_of_the_output_if_wanted(router, generate, included, token_ids):
    stopping = ends_with(9, include_stop_in_output=included)
    call = generate(pb.GenerateRequest(token_ids=PROMPT, stopping=stopping))
    key = (await router.scheduler.submits.get()).first_seq_key
    # fewer than wanted, so this is not the end
    await router.scheduler.step({key: [9]}, admitted={key: 0})
    await router.scheduler.step({key: [70]})
    await router.scheduler.step({key: [9]}, finished={key: STOP}, stop_token_id=9)
    *tokens, end = await read(call)
    assert tokens_of(tokens) == token_ids
    assert end.finished.reason == pb.FINISH_REASON_STOP
    assert end.finished.stop_match.stop_token_id == 9


async def test_an_end_token_of_the_model_is_named(router, generate):
    call = generate(pb.GenerateRequest(token_ids=PROMPT))
    key = (await router.scheduler.submits.get()).first_seq_key
    step = router.scheduler.step
    await step({key: [70, EOS]}, admitted={key: 0}, finished={key: STOP}, stop_token_id=EOS)
    *_, end = await read(call)
    assert end.finished.stop_match == pb.StopMatch(eos_token_id=EOS)


@pytest.mark.parametrize(
    ("fields", "code", "problem"),
    [
        ({"token_ids": None}, "INVALID_ARGUMENT", "input is not set"),
        (
            {"stopping": pb.StoppingOptions(conditions=[pb.StopCondition()])},
            "INVALID_ARGUMENT",
            "stopping.conditions[0] is not set",
        ),
        ({"media": [pb.MediaItem()]}, "UNIMPLEMENTED", "media is set"),
        ({"lora_name": "a"}, "UNIMPLEMENTED", "lora_name is set"),
        ({"kv": pb.KvOptions(session=pb.KvSessionRef())}, "UNIMPLEMENTED", "kv.session is set"),
        ({"kv": pb.KvOptions(bypass_prefix_cache=True)}, "UNIMPLEMENTED", "bypass_prefix_cache"),
        (
            {"guided": pb.GuidedDecoding(structural_tag="{}")},
            "UNIMPLEMENTED",
            "structural_tag is set",
        ),
        ({"guided": pb.GuidedDecoding(backend="other")}, "UNIMPLEMENTED", "backend is 'other'"),
        (
            {
                "response": pb.ResponseOptions(
                    output_candidates=pb.CandidateTokenSelection(all=pb.AllCandidates())
                )
            },
            "UNIMPLEMENTED",
            "response.output_candidates.all is set",
        ),
        (
            {"sampling": pb.SamplingParams(top_p=2)},
            "INVALID_ARGUMENT",
            "top_p is 2",
        ),
        (
            {"sampling": pb.SamplingParams(num_sequences=0)},
            "INVALID_ARGUMENT",
            "n is 0",
        ),
        ({"model": "other"}, "NOT_FOUND", "other"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(generate, fields, code, problem):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(pb.GenerateRequest(**{"token_ids": PROMPT} | fields)).read()
    assert caught.value.code().name == code
    assert problem in caught.value.details()


async def test_a_prompt_may_have_as_many_bytes_as_by_other_apis(generate):
    prompt = pb.GenerateRequest(prompt="x" * 2 * MAX_SMALL_BYTES)
    with pytest.raises(grpc.aio.AioRpcError, match="prompt has 131072 bytes; at most 1216 can fit"):
        await generate(prompt).read()


async def test_a_rank_that_the_cell_has_not_is_refused(generate):
    metadata = (("openengine-target-dp-rank", "1"),)
    with pytest.raises(grpc.aio.AioRpcError, match="openengine-target-dp-rank is '1'"):
        await generate(pb.GenerateRequest(token_ids=PROMPT), metadata=metadata).read()


async def test_a_failure_after_the_first_tokens_is_the_last_event(router, generate):
    call = generate(pb.GenerateRequest(token_ids=PROMPT))
    key = (await router.scheduler.submits.get()).first_seq_key
    await router.scheduler.step({key: [70]}, admitted={key: 0})
    first = await call.read()
    assert tokens_of([first]) == [70]
    await router.scheduler.step({}, finished={key: ERROR})
    (last,) = await read(call)
    assert last.error.code == pb.ERROR_CODE_INTERNAL
    assert await call.code() is grpc.StatusCode.OK


async def test_requests_are_aborted_one_by_one_or_all(router, generate, control):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await control.Abort(pb.AbortRequest(request_id="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    metadata = (("x-quire-tenant", "t"),)
    for target in ({"request_id": "a"}, {"all_requests": pb.AllRequests()}):
        call = generate(pb.GenerateRequest(request_id="a", token_ids=PROMPT), metadata=metadata)
        key = (await router.scheduler.submits.get()).first_seq_key
        await router.scheduler.step({key: [70]}, admitted={key: 0})
        await call.read()
        answer = await control.Abort(pb.AbortRequest(**target), metadata=metadata)
        assert answer.status == pb.ABORT_STATUS_ABORTED
        assert await router.scheduler.cancels.get() == [key]
        (last,) = await read(call)
        assert last.error.code == pb.ERROR_CODE_CANCELLED


async def test_the_cell_describes_itself(router, control, model_dir):
    router.scheduler.load = common_pb2.Load(
        num_requests_running=3,
        num_requests_waiting=5,
        max_num_seqs=6,
        num_blocks=200,
        num_free_blocks=40,
        num_cached_blocks=10,
        block_size=16,
        num_workers=2,
    )
    server = await control.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.engine_name, server.engine_role) == ("quire", pb.ENGINE_ROLE_AGGREGATED)
    assert (server.schema_revision, server.minimum_client_revision) == (1, 1)
    assert list(server.supported_models) == ["tiny"]
    assert (server.capacity.kv_block_size, server.capacity.total_kv_blocks) == (16, 200)
    model = await control.GetModelInfo(pb.GetModelInfoRequest(model="tiny"))
    assert (model.model_id, model.served_model_name) == (str(model_dir), "tiny")
    assert model.max_context_length == 64
    assert model.generation.output_logprobs.max_top_n == 20
    load = await control.GetLoad(pb.GetLoadRequest(include_per_rank=True))
    assert (load.running_requests, load.queued_requests) == (3, 5)
    assert (load.used_kv_blocks, load.total_kv_blocks) == (150, 200)
    assert [rank.used_kv_blocks for rank in load.ranks] == [150]
    health = await control.Health(pb.HealthRequest())
    assert health.state == pb.HEALTH_STATE_READY
    for wrong, code in (("", "INVALID_ARGUMENT"), ("other", "NOT_FOUND")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control.GetModelInfo(pb.GetModelInfoRequest(model=wrong))
        assert caught.value.code().name == code


async def test_log_probabilities_are_beside_their_tokens(router, generate):
    selection = pb.CandidateTokenSelection(top_n=1)
    response = pb.ResponseOptions(return_output_logprobs=True, output_candidates=selection)
    call = generate(pb.GenerateRequest(token_ids=PROMPT, response=response))
    submit = await router.scheduler.submits.get()
    assert sampling_from_proto(submit.sampling).logprobs == 1
    call.cancel()
    assert await router.scheduler.cancels.get() == [submit.first_seq_key]


async def test_kv_events_begin_by_clearing(router, control):
    router.scheduler.kv_events = events = FakeKvEvents()
    await router.scheduler.stop()
    await router.scheduler.start()
    stored = kv_pb2.KvBlocksStored(
        tier=1,
        block_hashes=(1).to_bytes(8, "big") * 4 + (2).to_bytes(8, "big") * 4,
        parent_hashes=bytes(32) + (1).to_bytes(8, "big") * 4,
        token_ids=pack_int32([5, 6, 7, 8]),
    )
    begin = kv_pb2.KvSnapshotBegin(reason=kv_pb2.KV_SNAPSHOT_REASON_FIRST)
    while True:
        events.messages = asyncio.Queue()  # a failed attempt may have taken some
        for event in ({"begin": begin}, {"stored": stored}):
            events.messages.put_nowait(
                kv_pb2.WatchKvResponse(worker="a", block_size=2, events=[kv_pb2.KvEvent(**event)])
            )
        try:
            call = control.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
            first, second = [(await call.read()).batch for _ in range(2)]
            break
        except grpc.aio.AioRpcError:  # the router is not connected again
            continue
    assert (first.sequence_number, second.sequence_number) == (1, 2)
    assert [event.WhichOneof("event") for event in first.events] == ["all_blocks_cleared"]
    (run,) = (event.block_stored for event in second.events)
    assert [each.value[-1] for each in run.block_hashes] == [1, 2]
    assert list(run.token_ids) == [5, 6, 7, 8]
    assert not run.HasField("parent_block_hash")
    call.cancel()
