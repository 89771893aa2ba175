"""`quire kv` and `quire migrate` against fakes of the service."""

import asyncio
import json

import pytest

from contract.errors import FailedPreconditionError
from quire.cli import target
from quire.cli.__main__ import main
from quire.client import AsyncClient, Client
from quire.v1 import kv_pb2, scheduler_pb2, scheduler_pb2_grpc


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


async def test_kv_shows_a_map_and_the_sequences(served, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert await run("kv", "--target", served.target, "--worker", "unix:/w") == 0
    output = capsys.readouterr().out
    assert "device: 7 blocks: 1 held, 1 shared, 1 cached, 1 pinned, 1 free, 2 retired" in output
    assert "       0 ·cp#Sxx\n" in output
    assert "r[1]" in output
    assert "decode" in output
    assert "2 sequences in total; --worker unix:/w --first-seq-id 8 shows the next ones" in output
    (request,) = served.fake.requests
    assert (request.query.worker, request.query.block_tables) == ("unix:/w", False)


async def test_kv_as_json_has_all(served, capsys):
    assert await run("kv", "--target", served.target, "--json", "--first-block", "2") == 0
    (worker,) = json.loads(capsys.readouterr().out)
    (tier,) = worker["tiers"]
    assert tier["states"] == ["free", "cached", "pinned", "held", "shared"] + ["retired"] * 2
    assert tier["ref_counts"] == [0, 0, 0, 1, 2, 0, 0]
    assert worker["sequences"][0]["device_block_ids"] == [3, 4]
    assert served.fake.requests[0].query.first_block == 2


async def test_clients_give_the_same(served):
    with Client(served.target) as client:
        (worker,) = await asyncio.to_thread(client.describe_kv, max_sequences=0, block_tables=True)
    async with AsyncClient(served.target) as client:
        assert await client.describe_kv(block_tables=True) == (worker,)
    assert worker.tiers[0].tier == kv_pb2.KV_TIER_DEVICE
    assert worker.tiers[0].next_block == 0
    assert worker.sequences[0].status == kv_pb2.SEQUENCE_STATUS_DECODE
    assert worker.next_seq_id == 8
    first, second = (request.query for request in served.fake.requests)
    assert first.HasField("max_sequences")
    assert first.max_sequences == 0
    assert not second.HasField("max_sequences")


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def Migrate(self, request, context):  # noqa: N802, ARG002
        match request.request_id:
            case "stays":
                raise FailedPreconditionError("that worker has no host tier")
            case "there":
                return scheduler_pb2.MigrateResponse(from_worker=request.worker, was_there=True)
            case "ended":
                return scheduler_pb2.MigrateResponse(from_worker="a")
        return scheduler_pb2.MigrateResponse(from_worker="a", num_sequences=2, num_blocks=9)


@pytest.fixture
async def scheduler(serve):
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    return await serve(add, FakeScheduler())


@pytest.mark.parametrize(
    ("request_id", "code", "output"),
    [
        ("r", 0, "r has moved from a to b: 2 sequences, 9 KV blocks\n"),
        ("there", 0, "there is at b already\n"),
        ("ended", 0, "ended ended during its move from a\n"),
        ("stays", 1, "quire: that worker has no host tier\n"),
    ],
)
async def test_migrate_says_what_became_of_it(scheduler, capsys, request_id, code, output):
    assert await run("migrate", request_id, "--to", "b", "--scheduler", scheduler) == code
    captured = capsys.readouterr()
    assert captured.out + captured.err == output


async def test_migrate_needs_a_scheduler(capsys, monkeypatch):
    monkeypatch.setattr(target, "running_services", lambda: iter(()))
    assert await run("migrate", "r", "--to", "b") == 1
    assert "--scheduler HOST:PORT names a scheduler elsewhere" in capsys.readouterr().err
