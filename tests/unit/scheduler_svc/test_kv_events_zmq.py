"""KV events over ZeroMQ, read as a subscriber of vLLM's events reads them."""

import asyncio
import contextlib
from collections import defaultdict

import msgspec
import pytest
import zmq
import zmq.asyncio
from pydantic import ValidationError
from test_kv_events import Pools

from contract.codec.packing import pack_int32
from quire.v1 import kv_pb2
from rpc.grpc_server import CannotListenError
from scheduler_svc.kv_events.feed import KvEvents
from scheduler_svc.kv_events.vllm_format import AsOneEngine, encode
from scheduler_svc.kv_events.zmq_outlet import ZmqOutlet, _batches
from scheduler_svc.settings import SchedulerSettings

END = (-1).to_bytes(8, "big", signed=True)
MEDIA = {1: "GPU", 2: "CPU", 3: "STORAGE"}


class Subscriber:
    """The blocks by medium, from the received messages alone."""

    def __init__(self):
        self.blocks = defaultdict(set)
        self.last = -1

    def apply(self, number, payload):
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self.blocks[event["medium"]].update(event["block_hashes"])
                case "BlockRemoved":
                    self.blocks[event["medium"]].difference_update(event["block_hashes"])
                case "AllBlocksCleared":
                    self.blocks.clear()
        self.last = int.from_bytes(number, "big")

    @property
    def found(self):
        return {medium: blocks for medium, blocks in self.blocks.items() if blocks}


def on_wire(pools):
    """The blocks that a subscriber must have."""
    return {
        MEDIA[tier]: {int.from_bytes(name[:8], "big") for name in names}
        for tier, names in pools.truth.items()
    }


@contextlib.asynccontextmanager
async def serving(tmp_path, epoch=1, **options):
    events = KvEvents(epoch)
    pools = Pools(events)
    endpoint, replay_endpoint = f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/r"
    outlet = ZmqOutlet(events, endpoint, replay_endpoint, "kv@a@tiny", **options)
    task = asyncio.create_task(outlet.run())
    context = zmq.asyncio.Context()
    subscription, question = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscription.setsockopt(zmq.SUBSCRIBE, b"kv@")
    subscription.connect(endpoint)
    question.connect(replay_endpoint)
    yield pools, subscription, question
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    context.destroy(linger=0)


async def replay(question, first, subscriber):
    """Ask for the batches from `first` on; return their numbers."""
    await question.send_multipart((b"", first.to_bytes(8, "big")))
    numbers = []
    while True:
        _, number, payload = await question.recv_multipart()
        if number == END:
            return numbers
        numbers.append(int.from_bytes(number, "big"))
        subscriber.apply(number, payload)


async def test_a_subscriber_that_replays_what_it_missed_knows_the_blocks(tmp_path):
    async with serving(tmp_path) as (pools, subscription, question):
        subscriber = Subscriber()
        pools.add(500)
        numbers = await replay(question, 0, subscriber)
        assert numbers[0] == 0
        for _ in range(20):
            pools.churn(20)
            topic, number, payload = await subscription.recv_multipart()
            assert topic == b"kv@a@tiny"
            if (now := int.from_bytes(number, "big")) > subscriber.last:
                assert now == subscriber.last + 1
                subscriber.apply(number, payload)
        await asyncio.sleep(0)  # the last changes are handed over
        await replay(question, subscriber.last + 1, subscriber)
        while subscriber.found != on_wire(pools):
            _, number, payload = await subscription.recv_multipart()
            if int.from_bytes(number, "big") > subscriber.last:
                subscriber.apply(number, payload)


async def test_what_is_not_kept_any_more_is_replaced_by_a_snapshot(tmp_path):
    async with serving(tmp_path, num_kept=1) as (pools, _, question):
        subscriber = Subscriber()
        subscriber.blocks["GPU"].add(123)  # removed long before
        pools.add(3000)
        while len(numbers := await replay(question, 0, subscriber)) == 1:
            pass  # the first batch is still kept
        assert len(numbers) > 3
        assert len({*numbers}) == 1
        assert subscriber.found == on_wire(pools)


async def test_a_subscriber_of_an_earlier_scheduler_sees_a_gap_and_replays_from_the_clearing(
    tmp_path,
):
    async with serving(tmp_path, epoch=5000) as (pools, _, question):
        subscriber = Subscriber()
        subscriber.blocks["GPU"].add(123)  # of the earlier scheduler
        pools.add(100)
        while subscriber.found != on_wire(pools):
            numbers = await replay(question, 3, subscriber)
        assert numbers == [*range(5, 5 + len(numbers))]


async def test_a_question_that_is_none_is_ignored(tmp_path):
    async with serving(tmp_path) as (_, _, question):
        await question.send_multipart((b"", b"what?"))
        assert await replay(question, 0, Subscriber()) == [0]


def stored(worker, names, parents, salt="", tier=1):
    event = kv_pb2.KvBlocksStored(
        tier=tier,
        block_hashes=b"".join(names),
        parent_hashes=b"".join(parents),
        token_ids=pack_int32([*range(2 * len(names))]) if parents else b"",
        cache_salt=salt,
    )
    return kv_pb2.WatchKvResponse(
        worker=worker, block_size=2, events=[kv_pb2.KvEvent(stored=event)]
    )


def name(number):
    return number.to_bytes(8, "big") * 4


def wire(engine, message):
    return msgspec.msgpack.decode(
        encode([event for part in engine.apply(message) for event in part])
    )[1]


def stored_event(hashes, parent, tokens, medium, **more):
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 2,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def test_events_have_vllms_fields():
    engine = AsOneEngine()
    first = stored("a", [name(1), name(2), name(9)], [bytes(32), name(1), bytes(32)])
    assert wire(engine, first) == [
        stored_event([1, 2], None, [0, 1, 2, 3], "GPU"),
        stored_event([9], None, [4, 5], "GPU"),
    ]
    salted = stored("a", [name(3), name(4)], [bytes(32), name(3)], salt="x", tier=2)
    assert wire(engine, salted) == [
        stored_event([3, 4], None, [0, 1, 2, 3], "CPU", extra_keys=[["x"], None])
    ]
    assert wire(engine, stored("b", [name(1)], [])) == [stored_event([1], None, [], "GPU")]


def test_a_block_goes_when_the_last_worker_has_lost_it():
    engine = AsOneEngine()
    for worker in ("a", "b"):
        wire(engine, stored(worker, [name(1)], [bytes(32)]))
    cleared = kv_pb2.KvEvent(cleared=kv_pb2.KvCacheCleared())
    assert wire(engine, kv_pb2.WatchKvResponse(worker="a", events=[cleared])) == []
    assert wire(engine, kv_pb2.WatchKvResponse(worker="b", events=[cleared])) == [
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    ]


async def test_a_lost_workers_blocks_are_removed_in_batches_between_which_others_run():
    async def count_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    engine, names = AsOneEngine(), [*map(name, range(1, 20_001))]
    wire(engine, stored("a", names, []))
    cleared = kv_pb2.KvEvent(cleared=kv_pb2.KvCacheCleared())
    message = kv_pb2.WatchKvResponse(worker="a", events=[cleared])
    num_turns, turns, gone = 0, [], []
    counter = asyncio.create_task(count_turns())
    async for batch in _batches(engine, message):
        ((removed,),) = [msgspec.msgpack.decode(batch)[1]]
        assert len(removed["block_hashes"]) < 1024
        gone += removed["block_hashes"]
        turns.append(num_turns)
    counter.cancel()
    assert sorted(gone) == [*range(1, 20_001)]
    assert len({*turns}) == len(turns) > 20


async def test_a_replay_of_many_batches_lets_others_run(tmp_path):
    async def count_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with serving(tmp_path) as (pools, _, question):
        for _ in range(300):
            pools.add(1)
            await asyncio.sleep(0)
        num_turns = 0
        counter = asyncio.create_task(count_turns())
        numbers = await replay(question, 0, Subscriber())
        counter.cancel()
        assert len(numbers) > 100
        assert num_turns > len(numbers)


async def test_an_endpoint_that_is_not_available_is_named():
    with pytest.raises(CannotListenError, match=r"KV events cannot listen on tcp://1.2.3.4:5"):
        ZmqOutlet(KvEvents(1), "tcp://1.2.3.4:5", "", "t")


def test_the_flags_need_each_other():
    with pytest.raises(ValidationError, match="--kv-events-zmq needs --kv-events"):
        SchedulerSettings(kv_events_zmq="tcp://*:5557")
    with pytest.raises(ValidationError, match="--kv-events-replay needs --kv-events-zmq"):
        SchedulerSettings(kv_events=True, kv_events_replay="tcp://*:5558")
    with pytest.raises(ValidationError, match="--kv-events-topic needs --kv-events-zmq"):
        SchedulerSettings(kv_events=True, kv_events_topic="kv@a@b")
