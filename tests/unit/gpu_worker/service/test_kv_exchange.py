"""Host blocks that move from one worker to another."""

import asyncio
import contextlib
import ctypes
import threading
import zlib
from types import SimpleNamespace
from typing import ClassVar

import grpc
import grpc.aio
import numpy as np
import pytest
import torch

from contract.codec.packing import pack_int32
from contract.info import WorkerInfo, new_instance_id
from contract.state import Holdings
from contract.worker_limits import Limits
from gpu_worker import metrics
from gpu_worker.kv import nixl_engine
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.kv.nixl_engine import NixlEngine, TransferFailedError
from gpu_worker.service import kv_exchange
from gpu_worker.service.api import WorkerService
from gpu_worker.step.block_labels import BlockLabels
from gpu_worker.step_loop import StepLoop
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls, ServerTls, server_credentials
from rpc.status import ErrorInterceptor
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options
from tests.certificates import Authority

NUM_BLOCKS, BLOCK_BYTES = 12, 64
LIMITS = Limits(2, 32, 16, 4, 4, 97, num_host_blocks=NUM_BLOCKS)


def blocks(*ids):
    return np.array(ids, np.int32)


def make_pool(seed, *, has_checksums=False):
    """A host pool with random content in each block."""
    device = torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8)
    pool = HostPool(device, NUM_BLOCKS, has_checksums=has_checksums)
    content = np.random.default_rng(seed).integers(0, 256, NUM_BLOCKS * BLOCK_BYTES, np.uint8)
    pool.write(np.arange(NUM_BLOCKS, dtype=np.int32), content.tobytes())
    return pool


class Steps:
    """Fake steps of a worker's service, with a host pool."""

    def __init__(self, pool):
        self.pool = pool
        self.damage = None

    async def attach(self, attachment):  # noqa: ARG002
        return Holdings()

    async def read_host_blocks(self, block_ids):
        return self.pool.read(block_ids)

    async def checksum_host_blocks(self, block_ids):
        return self.pool.checksum(block_ids)

    async def write_host_blocks(self, block_ids, content):
        self.pool.write(block_ids, content)


@contextlib.asynccontextmanager
async def serving(path, pool, dtype="float32", *, files=None, agent=None, **fields):
    info = WorkerInfo(
        "w",
        "cpu",
        "m",
        LIMITS,
        (),
        BLOCK_BYTES,
        dtype,
        **{"instance_id": new_instance_id(), **fields},
    )
    tls = None if files is None else ClientTls(files.ca, files.cert, files.key)
    service = WorkerService(tls)
    transfer = None if agent is None else NixlEngine(agent, pool.blocks)
    service.open(info, Steps(pool), transfer=transfer)
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=channel_options(DEFAULT_MAX_MESSAGE_MB)
    )
    service.service().add(server)
    target = f"unix:{path}"
    if files is None:
        server.add_insecure_port(target)
    else:
        credentials = server_credentials(ServerTls(files.cert, files.key, files.ca))
        target = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    async with open_channel(target, tls=tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        attached = await stub.Attach(worker_pb2.AttachRequest(epoch=3))
        yield SimpleNamespace(
            stub=stub,
            pool=pool,
            target=target,
            instance_id=attached.worker.instance_id,
            kv_format=info.kv_format,
            transfer=transfer,
        )
    await server.stop(0)
    if transfer is not None:
        await transfer.close()


@pytest.fixture
async def source(tmp_path):
    async with serving(tmp_path / "source", make_pool(1)) as worker:
        yield worker


@pytest.fixture
async def target(tmp_path):
    async with serving(tmp_path / "target", make_pool(2)) as worker:
        yield worker


async def pull(target, source, sources, targets, epoch=3):
    await target.stub.PullKv(
        worker_pb2.PullKvRequest(
            epoch=epoch,
            source_target=source.target,
            source_instance_id=source.instance_id,
            source_host_block_ids=pack_int32(sources),
            host_block_ids=pack_int32(targets),
        )
    )


async def test_kv_that_depends_on_the_batch_is_not_taken_by_a_batch_invariant_worker(tmp_path):
    fields = {"is_batch_invariant": True}
    async with (
        serving(tmp_path / "usual", make_pool(1)) as usual,
        serving(tmp_path / "source", make_pool(2), **fields) as source,
        serving(tmp_path / "target", make_pool(3), **fields) as target,
    ):
        await pull(target, source, [4], [9])
        assert target.pool.read(blocks(9)) == source.pool.read(blocks(4))
        with pytest.raises(grpc.aio.AioRpcError, match="batch-invariant on cpu"):
            await pull(target, usual, [4], [8])
        with pytest.raises(grpc.aio.AioRpcError, match="batch-invariant on cpu"):
            await pull(usual, source, [4], [8])


async def test_workers_show_each_other_their_certificates(tmp_path):
    ours = Authority(tmp_path / "ours").issue("worker")
    theirs = Authority(tmp_path / "theirs").issue("worker")
    async with (
        serving(None, make_pool(1), files=ours) as source,
        serving(None, make_pool(2), files=ours) as target,
        serving(None, make_pool(3), files=theirs) as stranger,
    ):
        await pull(target, source, [4, 2], [9, 3])
        assert target.pool.read(blocks(9, 3)) == source.pool.read(blocks(4, 2))
        for taker, giver in ((stranger, source), (target, stranger)):
            with pytest.raises(grpc.aio.AioRpcError, match="cannot read from"):
                await pull(taker, giver, [4, 2], [9, 3])


@pytest.mark.parametrize("piece_bytes", [1, 3 * BLOCK_BYTES, 1 << 20])
async def test_blocks_arrive_where_they_should_and_nowhere_else(
    source, target, monkeypatch, piece_bytes
):
    monkeypatch.setattr(kv_exchange, "_PIECE_BYTES", piece_bytes)
    others = target.pool.read(blocks(0, 1, 2, 6, 7, 8, 10))
    await pull(target, source, [4, 2, 7, 7, 0], [9, 3, 11, 5, 4])
    assert target.pool.read(blocks(9, 3, 11, 5, 4)) == source.pool.read(blocks(4, 2, 7, 7, 0))
    assert target.pool.read(blocks(0, 1, 2, 6, 7, 8, 10)) == others


@pytest.mark.parametrize(
    ("sources", "targets", "epoch", "code", "words"),
    [
        ([0], [NUM_BLOCKS], 3, "INVALID_ARGUMENT", "host_block_ids[0] is 12"),
        ([0, 1], [5, 5], 3, "INVALID_ARGUMENT", "has 5 twice"),
        ([0, 1], [5], 3, "INVALID_ARGUMENT", "it must have one for each of source_host_block_ids"),
        ([0], [0], 2, "FAILED_PRECONDITION", "epoch is 2"),
        ([0], [0], 4, "INVALID_ARGUMENT", "4, which has not attached"),
        ([NUM_BLOCKS], [0], 3, "UNAVAILABLE", "INVALID_ARGUMENT: host_block_ids[0] is 12"),
    ],
)
async def test_wrong_requests_are_refused_by_name(
    source, target, sources, targets, epoch, code, words
):
    before = target.pool.read(np.arange(NUM_BLOCKS))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pull(target, source, sources, targets, epoch)
    assert refused.value.code().name == code
    assert words in refused.value.details()
    assert target.pool.read(np.arange(NUM_BLOCKS)) == before


@pytest.mark.parametrize("info", [{"dtype": "bfloat16"}, {"kv_dtype": "fp8"}])
async def test_worker_with_other_kv_is_refused(target, tmp_path, info):
    async with serving(tmp_path / "other", make_pool(1), **info) as source:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pull(target, source, [0], [0])
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "FAILED_PRECONDITION" in refused.value.details()
    assert "float32, KV auto, codec none, 4 tokens" in refused.value.details()


@pytest.mark.parametrize("dialled", ["source", "target"])
async def test_other_worker_that_answers_at_the_address_gives_nothing(
    source, target, tmp_path, dialled
):
    """Its epoch and KV format match, so only the instance id distinguishes it."""
    async with serving(tmp_path / "meant", make_pool(3)) as meant:
        assert len({source.instance_id, target.instance_id, meant.instance_id, 0}) == 4
        address = {"source": source, "target": target}[dialled].target
        before = target.pool.read(np.arange(NUM_BLOCKS))
        wrong = SimpleNamespace(target=address, instance_id=meant.instance_id)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pull(target, wrong, [1], [0])
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "FAILED_PRECONDITION" in refused.value.details()
    assert f"instance {meant.instance_id:#x}" in refused.value.details()
    assert target.pool.read(np.arange(NUM_BLOCKS)) == before


async def test_read_that_does_not_say_whose_is_refused(source):
    request = worker_pb2.ReadKvRequest(
        epoch=3, host_block_ids=pack_int32([0]), kv_format=source.kv_format
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(source.stub.ReadKv(request)))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "instance 0x0" in refused.value.details()
    request.instance_id = source.instance_id
    assert (await anext(aiter(source.stub.ReadKv(request)))).content == source.pool.read(blocks(0))


async def test_source_that_is_not_there_is_named(target, tmp_path):
    gone = SimpleNamespace(target=f"unix:{tmp_path}/gone", instance_id=1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pull(target, gone, [0], [0])
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "gone" in refused.value.details()


class FakeAgent:
    """As NIXL's agent within one process: an address is read if its agent is known and alive."""

    agents: ClassVar = {}

    def __init__(self, name):
        self.name = name
        self.metadata = f"metadata of {name}".encode()
        self.agents[self.metadata] = self
        self.peers = {}
        self.registered = []
        self.state = "DONE"
        self.num_reads = 0
        self.served = threading.Event()
        self.during_read = lambda: None

    def get_agent_metadata(self):
        return self.metadata

    def get_reg_descs(self, regions, kind):
        assert kind == "DRAM"
        return regions

    get_xfer_descs = get_reg_descs

    def register_memory(self, regions, kind):
        self.registered += self.get_reg_descs(regions, kind)

    def deregister_memory(self, regions):
        for region in regions:
            self.registered.remove(region)

    def add_remote_agent(self, metadata):
        self.peers[self.agents[metadata].name] = self.agents[metadata]
        return self.agents[metadata].name

    def remove_remote_agent(self, name):
        del self.peers[name]

    def initialize_xfer(self, operation, local, remote, name):
        assert operation == "READ"
        return local, remote, self.peers[name]

    def transfer(self, handle):
        local, remote, peer = handle
        self.num_reads += 1
        self.during_read()
        assert all(inside(place, self.registered) for place in local)
        assert all(inside(place, peer.registered) for place in remote)
        assert peer.served.wait(30), "the source does not serve"
        if self.state == "DONE":
            for to, source in zip(local, remote, strict=True):
                ctypes.memmove(int(to[0]), int(source[0]), int(source[1]))
        return self.state

    def check_xfer_state(self, handle):  # noqa: ARG002
        return self.state

    def get_new_notifs(self):
        self.served.set()
        return {}

    def release_xfer_handle(self, handle):
        pass


def inside(place, regions):
    address, size, _ = map(int, place)
    return any(first <= address and address + size <= first + most for first, most, *_ in regions)


def pulled(means):
    return metrics.KV_PULLED_BYTES.labels(means)._value.get()


@pytest.fixture
async def by_nixl(tmp_path):
    """A source and a target with NIXL."""
    async with (
        serving(tmp_path / "source", make_pool(1), agent=FakeAgent("source")) as source,
        serving(tmp_path / "target", make_pool(2), agent=FakeAgent("target")) as target,
    ):
        source.agent, target.agent = source.transfer._agent, target.transfer._agent
        yield source, target


@pytest.mark.parametrize("staging_bytes", [1, 3 * BLOCK_BYTES, 1 << 20])
async def test_nixl_reads_blocks_to_where_they_should_be_and_nowhere_else(
    tmp_path, monkeypatch, staging_bytes
):
    monkeypatch.setattr(nixl_engine, "_STAGING_BYTES", staging_bytes)
    before = pulled("nixl"), pulled("grpc")
    async with (
        serving(tmp_path / "source", make_pool(1), agent=FakeAgent("source")) as source,
        serving(tmp_path / "target", make_pool(2), agent=FakeAgent("target")) as target,
    ):
        others = target.pool.read(blocks(0, 1, 2, 6, 7, 8, 10))
        await pull(target, source, [4, 2, 7, 7, 0], [9, 3, 11, 5, 4])
        await pull(target, source, [1], [4])
        assert target.pool.read(blocks(9, 3, 11, 5, 4)) == source.pool.read(blocks(4, 2, 7, 7, 1))
        assert target.pool.read(blocks(0, 1, 2, 6, 7, 8, 10)) == others
    assert (pulled("nixl"), pulled("grpc")) == (before[0] + 6 * BLOCK_BYTES, before[1])


@pytest.mark.parametrize("with_nixl", ["source", "target"])
async def test_one_worker_with_nixl_is_not_enough(tmp_path, with_nixl):
    agents = {with_nixl: FakeAgent(with_nixl)}
    async with (
        serving(tmp_path / "source", make_pool(1), agent=agents.get("source")) as source,
        serving(tmp_path / "target", make_pool(2), agent=agents.get("target")) as target,
    ):
        await pull(target, source, [4, 2], [9, 3])
        assert target.pool.read(blocks(9, 3)) == source.pool.read(blocks(4, 2))
    assert agents[with_nixl].num_reads == 0


@pytest.mark.parametrize("failure", ["ERR", "PROC", "damage", "unknown"])
async def test_what_nixl_cannot_read_comes_over_grpc(by_nixl, monkeypatch, failure):
    source, target = by_nixl
    monkeypatch.setattr(nixl_engine, "_READ_S", 0.0)
    if failure == "unknown":
        del FakeAgent.agents[source.agent.metadata]
    elif failure == "damage":
        memory = source.pool.blocks

        def damage():  # the checksum is that of the content before
            memory[4, 0] ^= 1

        target.agent.during_read = damage
    else:
        target.agent.state = failure
    await pull(target, source, [4, 2], [9, 3])
    assert target.pool.read(blocks(9, 3)) == source.pool.read(blocks(4, 2))
    num_reads = target.agent.num_reads
    await pull(target, source, [5], [6])
    assert target.pool.read(blocks(6)) == source.pool.read(blocks(5))
    assert target.agent.num_reads == num_reads  # not tried again so soon


async def test_buffers_of_failed_reads_are_not_used_again_and_do_not_pile_up(by_nixl):
    source, target = by_nixl
    engine = target.transfer
    target.agent.state = "ERR"
    source.agent.served.set()
    crc = source.pool.checksum(blocks(1))
    used = set()
    for _ in range(20):
        with pytest.raises(TransferFailedError):
            async with engine.read(source.agent.metadata, source.transfer.address, blocks(1), crc):
                pass
        assert engine._staging.ctypes.data not in used
        used = {buffer.ctypes.data for buffer in engine._retired}
    assert len(target.agent.registered) <= 2 + nixl_engine._MAX_RETIRED
    target.agent.state = "DONE"
    reading = engine.read(source.agent.metadata, source.transfer.address, blocks(1), crc)
    async with reading as content:
        assert content.tobytes() == source.pool.read(blocks(1))


async def test_closed_engine_reads_nothing_and_is_not_read(by_nixl):
    source, target = by_nixl
    agent = target.agent
    await target.transfer.close()
    assert not target.transfer.is_usable(source.instance_id)
    with pytest.raises(TransferFailedError, match="closed"):
        async with target.transfer.read(b"", 0, blocks(1), 0):
            pass
    await pull(target, source, [4], [9])
    assert target.pool.read(blocks(9)) == source.pool.read(blocks(4))
    assert agent.num_reads == 0


async def test_source_that_tells_of_too_many_blocks_is_not_believed(by_nixl, tmp_path):
    source, target = by_nixl
    memory = worker_pb2.KvMemory(agent=source.agent.metadata, address=source.transfer.address)
    server = grpc.aio.server()
    piece = worker_pb2.ReadKvResponse(memory=memory, num_blocks=3)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(BadSource(piece), server)
    server.add_insecure_port(f"unix:{tmp_path}/bad")
    await server.start()
    bad = SimpleNamespace(target=f"unix:{tmp_path}/bad", instance_id=1)
    with pytest.raises(grpc.aio.AioRpcError, match="whole blocks, 128 at most"):
        await pull(target, bad, [0, 1], [0, 1])
    assert target.agent.num_reads == 0
    await server.stop(0)


class BadSource(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, *pieces):
        self.pieces = pieces

    async def ReadKv(self, request, context):  # noqa: N802, ARG002
        for piece in self.pieces:
            yield piece


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "sent 0 of 2 blocks"),
        ([worker_pb2.ReadKvResponse(content=bytes(64), crc32=1)], "damaged on the way"),
        ([worker_pb2.ReadKvResponse(content=bytes(65))], "65 bytes; it must be whole blocks"),
        (
            [worker_pb2.ReadKvResponse(content=bytes(192))],
            "192 bytes; it must be whole",
        ),
    ],
)
async def test_source_that_gives_something_else_is_not_believed(target, tmp_path, pieces, words):
    server = grpc.aio.server(options=channel_options(DEFAULT_MAX_MESSAGE_MB))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(BadSource(*pieces), server)
    server.add_insecure_port(f"unix:{tmp_path}/bad")
    await server.start()
    bad = SimpleNamespace(target=f"unix:{tmp_path}/bad", instance_id=1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pull(target, bad, [0, 1], [0, 1])
    assert words in refused.value.details()
    await server.stop(0)


def test_block_that_has_changed_is_not_read():
    pool = make_pool(1, has_checksums=True)
    assert pool.read(blocks(3, 5)) is not None
    pool._host_blocks[5, 7] ^= 1
    assert pool.read(blocks(3)) is not None
    assert pool.read(blocks(3, 5)) is None
    assert pool.checksum(blocks(3)) == zlib.crc32(pool.read(blocks(3)))
    assert pool.checksum(blocks(3, 5)) is None
    pool.write(blocks(5), bytes(BLOCK_BYTES))
    assert pool.read(blocks(5)) == bytes(BLOCK_BYTES)


class IdleExecutor:
    max_in_flight = 1

    def __init__(self, host_pool):
        self.host_pool = host_pool
        self.labels = BlockLabels(Limits(1, 8, 8, 4, 4, 8, num_host_blocks=NUM_BLOCKS))

    def bind_thread(self):
        pass


async def test_step_loop_reads_and_writes_between_steps():
    pool = make_pool(1, has_checksums=True)
    steps = StepLoop(IdleExecutor(pool), asyncio.get_running_loop())
    await steps.write_host_blocks(blocks(2), bytes(BLOCK_BYTES))
    assert await steps.read_host_blocks(blocks(2)) == bytes(BLOCK_BYTES)
    pool._host_blocks[2, 0] = 1
    with pytest.raises(Exception, match="has changed since"):
        await steps.read_host_blocks(blocks(2))
    await steps.stop()


async def test_worker_without_host_blocks_says_so():
    steps = StepLoop(IdleExecutor(None), asyncio.get_running_loop())
    with pytest.raises(Exception, match="--host-kv-memory-gb"):
        await steps.read_host_blocks(blocks(0))
    await steps.stop()
