"""KV events: snapshots while the cache changes, readers that fall behind, lost workers."""

import asyncio
from random import Random

import grpc
import pytest
from scheduler_harness import running_scheduler

from contract.hashing import BlockHash, next_hash, root_hash
from contract.lora import LoraAdapter
from quire.v1 import kv_pb2, kv_pb2_grpc
from rpc.peers.channel import open_channel
from scheduler_svc.core.space.cache_watcher import CacheTier
from scheduler_svc.domain import adapter_salt, split_salt
from scheduler_svc.kv_events.feed import KvEvents
from tests.kv_index import ReaderIndex

FIRST, FELL_BEHIND = kv_pb2.KV_SNAPSHOT_REASON_FIRST, kv_pb2.KV_SNAPSHOT_REASON_FELL_BEHIND


class Pools:
    """The tables of a core's pools, filled and emptied at random."""

    def __init__(self, events, worker="w"):
        self.events = events
        self.feed = events.feed(worker)
        self.truth_at = {}  # by sequence number
        self._flush, self.feed.flush = self.feed.flush, self.flush
        self.draw = Random(1)
        self.num_named = 0
        self.attach()

    def attach(self):
        index = self.feed.attach(4)
        self.tables = {tier: index.table(tier) for tier in CacheTier}

    def flush(self):
        self._flush()
        self.truth_at[self.feed.sequence] = self.truth

    def add(self, count):
        for _ in range(count):
            self.num_named += 1
            name = BlockHash(self.num_named.to_bytes(8, "big") * 4)
            self.tables[self.draw.choice(list(CacheTier))].setdefault(name, self.num_named)

    def churn(self, count):
        for _ in range(count):
            table = self.tables[self.draw.choice(list(CacheTier))]
            if table and self.draw.random() < 0.5:
                table.pop(self.draw.choice(list(table)))
            else:
                self.add(1)

    @property
    def truth(self):
        return {tier.value: set(table) for tier, table in self.tables.items() if table}


async def read_until_exact(messages, index, worker="w"):
    async for message in messages:
        index.apply(message)
        if worker in index.exact:
            return


async def test_a_snapshot_is_exact_although_the_cache_changes_while_it_is_made():
    events = KvEvents(epoch=7)
    pools, index = Pools(events), ReaderIndex()
    pools.add(5000)
    with events.reader() as reader:
        num_messages = 0
        async for message in reader.messages():
            assert (message.worker, message.epoch, message.block_size) == ("w", 7, 4)
            index.apply(message)
            num_messages += 1
            if "w" in index.exact:
                break
            pools.churn(20)
        assert num_messages > 5
        assert index.of("w") == pools.truth_at[index.sequence["w"]]
        assert index.reasons == [FIRST]


async def test_changes_follow_the_snapshot_in_one_batch_per_turn_of_the_loop():
    events = KvEvents(epoch=1)
    pools, index = Pools(events), ReaderIndex()
    with events.reader() as reader:
        messages = reader.messages()
        await read_until_exact(messages, index)
        for _ in range(3):
            before = index.sequence["w"]
            pools.churn(10)
            index.apply(await anext(messages))
            assert index.of("w") == pools.truth
            assert index.sequence["w"] == before + 1


async def test_many_changes_of_one_turn_are_several_batches():
    events = KvEvents(epoch=1)
    pools, index = Pools(events), ReaderIndex()
    with events.reader() as reader:
        messages = reader.messages()
        await read_until_exact(messages, index)
        before = index.sequence["w"]
        pools.add(5000)
        num_changes = []
        while index.of("w") != pools.truth:
            message = await anext(messages)
            index.apply(message)
            num_changes.append(sum(len(e.stored.block_hashes) // 32 for e in message.events))
        assert index.sequence["w"] == before + len(num_changes)
        assert max(num_changes) <= 256


async def test_a_reader_that_falls_behind_is_told_and_gets_a_snapshot():
    events = KvEvents(epoch=1, max_unread_changes=50)
    pools, index = Pools(events), ReaderIndex()
    pools.add(100)
    with events.reader() as reader:
        messages = reader.messages()
        await read_until_exact(messages, index)
        for _ in range(10):
            pools.churn(10)
            await asyncio.sleep(0)
        assert len(reader._unread) <= 5, "what waits for a reader is bounded"
        index.apply(await anext(messages))
        assert index.reasons == [FIRST, FELL_BEHIND]
        await read_until_exact(messages, index)
        assert index.of("w") == pools.truth


async def test_a_lost_worker_has_no_blocks_and_begins_again_empty():
    events = KvEvents(epoch=1)
    pools, index = Pools(events), ReaderIndex()
    pools.add(3000)
    with events.reader() as reader:
        messages = reader.messages()
        for _ in range(3):
            index.apply(await anext(messages))
        pools.feed.detach()  # in the middle of the snapshot
        pools.attach()
        pools.add(10)
        await read_until_exact(messages, index)
        assert index.of("w") == pools.truth


async def test_a_reader_of_one_worker_hears_of_no_other():
    events = KvEvents(epoch=1)
    Pools(events, "other").add(3)
    with events.reader("other") as reader:
        pools, index = Pools(events, "w"), ReaderIndex()
        pools.add(3)
        await read_until_exact(reader.messages(), index, "other")
        assert index.tiers.keys() == {"other"}


def test_a_salt_of_an_adapter_is_taken_apart():
    salt = adapter_salt(LoraAdapter("fr", bytes(range(32)))) + "tenant"
    assert split_salt(salt) == ("fr", "tenant")
    assert split_salt("tenant") == ("", "tenant")


async def read_exact(call, index, worker, is_enough=lambda _: True):
    while not (worker in index.exact and is_enough(index.of(worker))):
        index.apply(await call.read())


async def test_a_stream_has_the_blocks_of_prompts_with_their_tokens(folder, worker, connect):
    prompt = list(range(10, 31))
    async with running_scheduler(folder, [worker.target], kv_events=True) as scheduler:
        router = await connect(scheduler.target)
        async with open_channel(scheduler.target) as channel:
            call = kv_pb2_grpc.KvEventServiceStub(channel).WatchKv(kv_pb2.WatchKvRequest())
            index = ReaderIndex()
            await read_exact(call, index, worker.target)
            assert index.of(worker.target) == {}
            await router.submit(0, prompt, max_tokens=100)
            size = (await router.load()).block_size
            num_full = len(prompt) // size
            await read_exact(
                call, index, worker.target, lambda tiers: len(tiers.get(1, ())) >= num_full
            )
            parent = root_hash("")
            for start in range(0, num_full * size, size):
                tokens = b"".join(t.to_bytes(4, "little") for t in prompt[start : start + size])
                parent = next_hash(parent, tokens)
                assert parent in index.tiers[worker.target][1]
                assert index.tokens[parent] == tokens
            call.cancel()


async def test_without_the_flag_there_is_no_stream_and_nothing_is_kept(folder, worker):
    async with (
        running_scheduler(folder, [worker.target]) as scheduler,
        open_channel(scheduler.target) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_pb2_grpc.KvEventServiceStub(channel).WatchKv(kv_pb2.WatchKvRequest()).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_unknown_worker_is_refused_by_name(folder, worker):
    async with (
        running_scheduler(folder, [worker.target], kv_events=True) as scheduler,
        open_channel(scheduler.target) as channel,
    ):
        stub = kv_pb2_grpc.KvEventServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="'nobody' is not known") as caught:
            await stub.WatchKv(kv_pb2.WatchKvRequest(worker="nobody")).read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
