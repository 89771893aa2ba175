"""The cost of the split in `bench/serve.py`, and the links of the service in one process."""

import asyncio
import contextlib
from functools import partial

import grpc
import pytest

from contract.errors import NotFoundError
from quire.v1 import scheduler_pb2 as pb
from quire.v1 import scheduler_pb2_grpc
from rpc.grpc_server import Service
from rpc.peers.channel import open_channel


async def test_turns_are_taken_in_order_and_in_reverse_on_the_same_requests_after_a_warm_up():
    from engines.split import GRPC, HTTP, ONE_GRPC, measure_split  # noqa: PLC0415
    from harness.closed_loop import Workload  # noqa: PLC0415

    taken = []

    def turn(name, tok_s):
        async def take(workload, concurrency):
            taken.append((name, workload.seed, concurrency))
            return next(speeds)

        speeds = iter((1.0, *tok_s))  # the first is the warm-up's
        return take

    sides = {
        HTTP: turn("h", (100, 100)),
        ONE_GRPC: turn("o", (80, 50)),
        GRPC: turn("g", (60, 50)),
    }
    tax = await measure_split(sides, Workload("m", 4, 8, 8, seed=6), 2, 2)
    warm_up, first, second = taken[:3], taken[3:6], taken[6:]
    assert [name for name, *_ in warm_up + first + second] == [*"hog", *"hog", *"goh"]
    assert {seed for _, seed, _ in first} == {7}
    assert {seed for _, seed, _ in second} == {8}
    assert list(tax.ratios()) == ["split_ratio"], "one process was not measured by HTTP"
    ratio = tax.metrics()
    assert (ratio["split_ratio_min"], ratio["split_ratio_max"]) == (0.75, 1.0)
    assert tax.metrics()["split_ratio"] == 0.875
    assert tax.metrics()["split_grpc_tok_s"] == 55
    assert "0.875  (0.750 … 1.000)" in tax.table()
    assert "three processes, by HTTP        100.0" in tax.table()
    assert "one process, by HTTP" not in tax.table()


class Echo(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers each message with a welcome; refuses a cancel."""

    is_over = False

    async def Connect(self, requests, context):  # noqa: N802
        try:
            async for request in requests:
                if request.WhichOneof("message") == "cancel":
                    raise NotFoundError("no such sequence")
                await context.write(pb.ConnectResponse(welcome=pb.SchedulerWelcome(epoch=3)))
        finally:
            self.is_over = True

    async def Migrate(self, request, context):  # noqa: ARG002, N802
        raise NotFoundError(f"no {request.request_id}")

    async def GetSchedulerLoad(self, request, context):  # noqa: ARG002, N802
        return pb.GetSchedulerLoadResponse()


@contextlib.asynccontextmanager
async def linked(servicer):
    from engines.in_process import Links  # noqa: PLC0415

    links, stop, started = Links(), asyncio.Event(), asyncio.Event()

    async def on_started(_):
        started.set()

    add = partial(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, servicer)
    services = [Service("quire.v1.SchedulerService", add)]
    serving = asyncio.create_task(
        links.serve(None, services=services, stop=stop, on_started=on_started)
    )
    await started.wait()
    with links.joined():
        async with open_channel("anywhere") as channel:
            yield scheduler_pb2_grpc.SchedulerServiceStub(channel)
    stop.set()
    await serving


async def test_a_message_is_handed_over_and_a_refusal_is_a_status():
    hello = pb.ConnectRequest(hello=pb.RouterHello(router_id="r"))
    cancel = pb.ConnectRequest(cancel=pb.Cancel(seq_keys=[1]))
    async with linked(Echo()) as stub:
        assert await stub.GetSchedulerLoad(pb.GetSchedulerLoadRequest()) is not None
        with pytest.raises(grpc.aio.AioRpcError, match="no r1") as unary:
            await stub.Migrate(pb.MigrateRequest(request_id="r1"), timeout=5)
        assert unary.value.code() is grpc.StatusCode.NOT_FOUND
        call = stub.Connect()
        await call.write(hello)
        assert (await call.read()).welcome.epoch == 3
        await call.write(cancel)
        for _ in range(2):  # it is refused each time
            with pytest.raises(grpc.aio.AioRpcError, match="no such sequence"):
                await call.read()


async def test_a_handler_ends_when_its_caller_cancels_or_has_no_more_to_say():
    async def requests():
        yield pb.ConnectRequest(hello=pb.RouterHello(router_id="r"))

    async with linked(echo := Echo()) as stub:
        assert [each.welcome.epoch async for each in stub.Connect(requests())] == [3]
        assert echo.is_over
        echo.is_over = False
        call = stub.Connect()
        await call.write(pb.ConnectRequest(hello=pb.RouterHello(router_id="r")))
        await call.read()
        call.cancel()
        assert await call.read() is grpc.aio.EOF
        assert echo.is_over
