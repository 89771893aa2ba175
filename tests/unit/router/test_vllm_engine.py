"""The engine contract of SMG, as its gateway calls it, against a fake scheduler."""

import asyncio
import io
import zipfile
from hashlib import sha256

import grpc
import pytest
from keyed_router import plain_settings, running
from router_fake_scheduler import ERROR, LENGTH, STOP, FakeKvEvents, FakeScheduler

from contract.codec.packing import pack_int32, unpack_int32
from contract.codec.sampling import sampling_from_proto
from contract.sampling import SamplingParams
from quire.v1 import common_pb2, kv_pb2
from quire.vllm_engine import smg_common_pb2, vllm_engine_pb2_grpc
from quire.vllm_engine import vllm_engine_pb2 as pb
from router.vllm_engine.kv_events import CellIndex, batches

PROMPT = pb.TokenizedInput(input_ids=[5, 6, 7])


@pytest.fixture
def settings(model_dir, tmp_path):
    return plain_settings(model_dir, tmp_path, vllm_engine=True)


@pytest.fixture
async def router(settings, tmp_path):
    async with running(settings, tmp_path) as router:
        yield router


@pytest.fixture
def stub(router):
    return vllm_engine_pb2_grpc.VllmEngineStub(router.channel)


async def test_a_streamed_request_has_its_tokens_and_then_its_end(router, stub):
    call = stub.Generate(
        pb.GenerateRequest(
            request_id="mine",
            tokenized=PROMPT,
            stream=True,
            sampling_params=pb.SamplingParams(temperature=0, top_k=3, max_tokens=2, seed=11),
        )
    )
    submit = await router.scheduler.submits.get()
    assert submit.request_id == "mine"
    assert list(unpack_int32(submit.prompt_token_ids, "prompt")) == [5, 6, 7]
    sampling = sampling_from_proto(submit.sampling)
    assert sampling == SamplingParams(temperature=0, top_k=3, max_tokens=2, seed=11)
    key = submit.first_seq_key
    await router.scheduler.step({key: [70]}, admitted={key: 2})
    chunk = (await call.read()).chunk
    assert list(chunk.token_ids) == [70]
    assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens) == (3, 1, 2)
    await router.scheduler.step({key: [71]}, finished={key: LENGTH})
    assert list((await call.read()).chunk.token_ids) == [71]
    complete = (await call.read()).complete
    assert (complete.finish_reason, list(complete.output_ids)) == ("length", [])
    assert await call.read() is grpc.aio.EOF


async def test_an_unstreamed_request_has_one_message_for_each_output(router, stub):
    call = stub.Generate(
        pb.GenerateRequest(
            tokenized=PROMPT, sampling_params=pb.SamplingParams(n=2, stop_token_ids=[9])
        )
    )
    submit = await router.scheduler.submits.get()
    assert submit.n == 2
    key = submit.first_seq_key
    await router.scheduler.step({key: [70], key + 1: [80]}, admitted={key: 0})
    await router.scheduler.step({key: [9], key + 1: [81]}, finished={key: STOP, key + 1: LENGTH})
    ends = [message.complete async for message in call]
    assert {end.index: list(end.output_ids) for end in ends} == {0: [70, 9], 1: [80, 81]}
    assert {end.index: end.finish_reason for end in ends} == {0: "stop", 1: "length"}
    assert all(end.prompt_tokens == 3 for end in ends)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "input: is not set"),
        ({"tokenized": PROMPT, "mm_inputs": pb.Unsupported()}, "mm_inputs: is set"),
        ({"tokenized": PROMPT, "kv_transfer_params_json": "{}"}, "kv_transfer_params_json: is set"),
        ({"tokenized": PROMPT, "data_parallel_rank": 1}, "data_parallel_rank: is 1"),
        (
            {"tokenized": PROMPT, "sampling_params": pb.SamplingParams(structural_tag="{}")},
            "structural_tag: is set",
        ),
        ({"tokenized": PROMPT, "sampling_params": pb.SamplingParams(top_p=2)}, "top_p: is 2"),
        ({"tokenized": pb.TokenizedInput()}, "prompt"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(stub, fields, problem):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest(**fields)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem.replace(": ", " ") in caught.value.details().replace(": ", " ")


async def test_an_output_that_fails_ends_the_call_with_its_error(router, stub):
    call = stub.Generate(pb.GenerateRequest(tokenized=PROMPT, stream=True))
    key = (await router.scheduler.submits.get()).first_seq_key
    await router.scheduler.step({}, finished={key: ERROR})
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()


async def test_a_request_ends_by_abort_or_when_its_call_is_cancelled(router, stub):
    call = stub.Generate(pb.GenerateRequest(request_id="a", tokenized=PROMPT, stream=True))
    key = (await router.scheduler.submits.get()).first_seq_key
    await stub.Abort(pb.AbortRequest(request_ids=["unknown", "a"]))
    assert await router.scheduler.cancels.get() == [key]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.ABORTED
    call = stub.Generate(pb.GenerateRequest(request_id="b", tokenized=PROMPT, stream=True))
    key = (await router.scheduler.submits.get()).first_seq_key
    call.cancel()
    assert await router.scheduler.cancels.get() == [key]


async def test_the_cell_describes_itself_as_one_rank(router, stub, model_dir):
    router.scheduler.load = common_pb2.Load(
        num_requests_running=3,
        num_requests_waiting=5,
        max_num_seqs=6,
        num_blocks=200,
        num_free_blocks=40,
        num_cached_blocks=10,
        block_size=16,
        num_workers=2,
        num_prefix_cache_queries=10,
        num_prefix_cache_hits=5,
    )
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.is_generation) == ("tiny", True)
    assert (model.vocab_size, model.max_context_length) == (500, 64)
    assert model.tokenizer_path == str(model_dir)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (16, 6, 1)
    (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.num_waiting_reqs) == (3, 5)
    assert (load.token_usage, load.utilization, load.cache_hit_rate) == (0.75, 0.5, 0.5)
    assert (load.num_used_tokens, load.max_total_num_tokens) == (150 * 16, 200 * 16)
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_the_tokenizer_comes_as_an_archive_with_its_hash(stub, model_dir):
    chunks = [chunk async for chunk in stub.GetTokenizer(smg_common_pb2.GetTokenizerRequest())]
    archive = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [
        sha256(archive).hexdigest()
    ]
    files = zipfile.ZipFile(io.BytesIO(archive))
    assert files.read("tokenizer.json") == (model_dir / "tokenizer.json").read_bytes()
    assert "tokenizer_config.json" in files.namelist()


@pytest.fixture
def _embeds(monkeypatch):
    monkeypatch.setattr(FakeScheduler, "model_fields", {"tasks": [common_pb2.TASK_EMBED]})


@pytest.mark.usefixtures("_embeds")
async def test_an_input_has_the_precedence_of_its_call(settings, tmp_path):
    async with running(settings, tmp_path) as router:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(router.channel)
        metadata = (("x-quire-priority", "-100"), ("x-quire-tenant", "them"))
        call = stub.Embed(pb.EmbedRequest(tokenized=PROMPT), metadata=metadata)
        submit = await router.scheduler.submits.get()
        assert (submit.priority, submit.tenant) == (-100, "them")
        await router.scheduler.step(vectors={submit.first_seq_key: [1.0]})
        assert list((await call).embedding) == [1.0]


async def test_a_model_that_makes_no_vectors_says_so(stub):
    with pytest.raises(grpc.aio.AioRpcError, match="tiny"):
        await stub.Embed(pb.EmbedRequest(tokenized=PROMPT))


def stored(worker, tier, names, parents, tokens=True):
    event = kv_pb2.KvBlocksStored(
        tier=tier,
        block_hashes=b"".join(map(name_of, names)),
        parent_hashes=b"".join(map(name_of, parents)) if tokens else b"",
        token_ids=pack_int32([*range(2 * len(names))]) if tokens else b"",
    )
    return message(worker, stored=event)


def message(worker, **event):
    return kv_pb2.WatchKvResponse(worker=worker, block_size=2, events=[kv_pb2.KvEvent(**event)])


def name_of(number):
    return number.to_bytes(8, "big") * 4


def removed(worker, tier, *names):
    hashes = b"".join(map(name_of, names))
    return message(worker, removed=kv_pb2.KvBlocksRemoved(tier=tier, block_hashes=hashes))


def apply(cell, message):
    return [event for events in cell.apply(message) for event in events]


def test_a_cell_has_a_block_while_some_worker_has_it_in_some_tier():
    cell = CellIndex()
    (event,) = apply(cell, stored("a", 1, [1, 2], [0, 1]))
    assert not event.stored.HasField("parent_block_hash")
    assert [block.block_hash for block in event.stored.blocks] == [1, 2]
    assert [list(block.token_ids) for block in event.stored.blocks] == [[0, 1], [2, 3]]
    assert apply(cell, stored("b", 1, [1], [0])) == []
    assert apply(cell, stored("a", 2, [2], [1])) == []
    assert apply(cell, removed("a", 1, 1, 2)) == [], "b has block 1; a's host has block 2"
    (event,) = apply(cell, removed("b", 1, 1))
    assert list(event.removed.block_hashes) == [1]
    (event,) = apply(cell, message("a", cleared=kv_pb2.KvCacheCleared()))
    assert list(event.removed.block_hashes) == [2]


def test_a_chain_is_one_event_and_blocks_without_tokens_are_told_when_they_have_some():
    cell = CellIndex()
    assert apply(cell, stored("a", 1, [5], [], tokens=False)) == []
    first, second = apply(cell, stored("a", 1, [5, 6, 9], [4, 5, 0]))
    assert first.stored.parent_block_hash == 4
    assert [block.block_hash for block in first.stored.blocks] == [5, 6]
    assert not second.stored.HasField("parent_block_hash")


async def test_a_lost_workers_blocks_are_removed_in_batches_between_which_others_run():
    async def messages():
        yield stored("a", 1, [*range(1, 20_001)], [*range(20_000)])
        yield message("a", cleared=kv_pb2.KvCacheCleared())

    async def count_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    num_turns, num_removed, turns = 0, 0, []
    counter = asyncio.create_task(count_turns())
    async for batch in batches(messages()):
        for event in batch.events:
            if event.WhichOneof("data") == "removed":
                assert len(event.removed.block_hashes) < 1024
                num_removed += len(event.removed.block_hashes)
                turns.append(num_turns)
    counter.cancel()
    assert num_removed == 20_000
    assert len({*turns}) == len(turns) > 20


async def test_events_begin_by_clearing_and_are_numbered_without_gaps(router, stub):
    router.scheduler.kv_events = events = FakeKvEvents()
    await router.scheduler.stop()
    await router.scheduler.start()
    begin = kv_pb2.KvSnapshotBegin(reason=kv_pb2.KV_SNAPSHOT_REASON_FIRST)
    for each in (
        message("a", begin=begin),
        stored("a", 1, [1], [0]),
        stored("a", 2, [1], [0]),
        removed("a", 1, 1),
        removed("a", 2, 1),
    ):
        events.messages.put_nowait(each)
    request = smg_common_pb2.SubscribeKvEventsRequest()
    while True:
        try:
            call = stub.SubscribeKvEvents(request)
            found = [await call.read() for _ in range(3)]
            break
        except grpc.aio.AioRpcError:  # the router is not connected again
            continue
    assert [batch.sequence_number for batch in found] == [1, 2, 3]
    kinds = [[event.WhichOneof("data") for event in batch.events] for batch in found]
    assert kinds == [["cleared"], ["stored"], ["removed"]]
    call.cancel()
