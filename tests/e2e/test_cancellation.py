"""A client that cancels, times out, stops reading or disappears disturbs no other client."""

import asyncio
import http.client
import json
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from quire.v1 import common_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import Child, eventually
from tests.e2e.generation import Result, generate_request, read, read_aio
from tests.e2e.service import JSON_TYPE, Service, is_idle
from tests.e2e.step_gate import StepGate

ENDLESS = {"max_tokens": 3800, "ignore_eos": True}
PROMPT = list(range(50, 90))
MIB = 2**20


@pytest.fixture(scope="module")
def gated(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[tuple[Service, StepGate]]:
    """A separate service whose steps the test controls."""
    directory = run_dir()
    service = Service(
        directory, long_llama, worker=["--num-blocks=512"], worker_uds=directory / "gate.sock"
    )
    with StepGate(directory / "gate.sock", service.uds["worker"]) as gate, service:
        yield service, gate


# --- how a client leaves: each starts a stream, returns when it runs, and then leaves -------------


def _cancel(service: Service, stack: ExitStack) -> Callable[[], object]:
    stream = service.stub.Generate(generate_request(PROMPT, **ENDLESS))
    stack.callback(stream.cancel)
    next(stream)
    return stream.cancel


def _cancel_four_outputs(service: Service, stack: ExitStack) -> Callable[[], object]:
    stream = service.stub.Generate(generate_request(PROMPT, n=4, **ENDLESS))
    stack.callback(stream.cancel)
    seen: set[int] = set()
    while len(seen) < 4:
        seen.add(next(stream).delta.output_index)
    return stream.cancel


def _pass_deadline(service: Service, stack: ExitStack) -> Callable[[], object]:
    stream = service.stub.Generate(generate_request(PROMPT, **ENDLESS), timeout=1.5)
    stack.callback(stream.cancel)
    result = Result()
    result.add(next(stream))

    def wait() -> None:
        # The timers of client and router end at the same time, in either order.
        try:
            for response in stream:
                result.add(response)
            reason = result.finished[0].finish_reason
            was_deadline = reason == common_pb2.FINISH_REASON_DEADLINE
        except grpc.RpcError as error:
            was_deadline = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert was_deadline

    return wait


def _close_channel(service: Service, stack: ExitStack) -> Callable[[], object]:
    channel = stack.enter_context(grpc.insecure_channel(service.target))
    next(InferenceServiceStub(channel).Generate(generate_request(PROMPT, **ENDLESS)))
    return channel.close


def _die(service: Service, stack: ExitStack) -> Callable[[], object]:
    client = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.leaving_client", service.target],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
    )
    stack.callback(client.kill)
    assert client.stdout is not None
    assert client.stdout.readline() == b"streaming\n"
    return client.kill


def _post(service: Service, body: dict[str, object]) -> socket.socket:
    """Sends a completion request; the caller owns the connection."""
    host, port = service.router.http.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    text = json.dumps({"prompt": PROMPT, **body})
    connection.request("POST", "/v1/completions", text, JSON_TYPE)
    assert connection.sock is not None
    return connection.sock


def _disconnect_from_events(service: Service, stack: ExitStack) -> Callable[[], object]:
    sock = stack.enter_context(_post(service, {"stream": True, "temperature": 0, **ENDLESS}))
    assert sock.recv(64).startswith(b"HTTP/1.1 200")
    return sock.close


def _disconnect_before_the_answer(service: Service, stack: ExitStack) -> Callable[[], object]:
    sock = stack.enter_context(_post(service, {"temperature": 0, **ENDLESS}))
    eventually(lambda: service.load().num_requests_running == 1 or None, "it runs")
    return sock.close


WAYS_TO_LEAVE = (
    _cancel,
    _cancel_four_outputs,
    _pass_deadline,
    _close_channel,
    _die,
    _disconnect_from_events,
    _disconnect_before_the_answer,
)


@pytest.mark.parametrize("start", WAYS_TO_LEAVE, ids=lambda way: way.__name__.strip("_"))
def test_blocks_are_free_two_steps_after_a_client_left(
    gated: tuple[Service, StepGate], start: Callable[[Service, ExitStack], Callable[[], object]]
):
    service, gate = gated
    service.wait_until_idle()
    with ExitStack() as stack:
        stack.callback(gate.open)
        leave = start(service, stack)
        gate.close()
        leave()
        load = eventually(
            lambda: load if (load := service.load()).num_requests_running == 0 else None,
            "the scheduler has heard that the client left",
        )
        assert not is_idle(load), "blocks that steps in flight write to are free"
        gate.let_through(2)
        service.wait_until_idle()


def test_others_go_on_when_one_leaves(service: Service):
    request = generate_request(PROMPT, max_tokens=200, ignore_eos=True)
    expected = read(service.stub.Generate(request)).outputs
    stayer = service.stub.Generate(request)
    leavers = [service.stub.Generate(generate_request(PROMPT, **ENDLESS)) for _ in range(8)]
    for stream in leavers:
        next(stream)
        stream.cancel()
    assert read(stayer).outputs == expected
    service.wait_until_idle()


async def test_a_thousand_cancelled_requests_leave_nothing(service: Service):
    before = await asyncio.to_thread(service.wait_until_idle)
    draw = random.Random(4)
    # more than can run at once, so that some are cancelled in the queue
    room = asyncio.Semaphore(100)

    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)

        async def cancel_one(i: int) -> None:
            prompt = [draw.randrange(5, 500) for _ in range(draw.randint(1, 200))]
            num_reads = draw.choice((0, 0, 1, 1, 2, 5, 20))
            async with room:
                n = 1 + i % 3
                stream = stub.Generate(generate_request(prompt, n=n, **ENDLESS))
                if i % 7 == 0:
                    await stream.wait_for_connection()
                for _ in range(num_reads):
                    assert await stream.read() is not grpc.aio.EOF
                assert stream.cancel()

        await asyncio.gather(*(cancel_one(i) for i in range(1000)))

    load = await asyncio.to_thread(service.wait_until_idle)
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks == before.num_blocks
    assert load.num_requests_running == load.num_requests_waiting == 0
    for child, name in (
        (service.router, "quire_num_requests_live"),
        (service.worker, "quire_worker_rows_used"),
    ):
        await asyncio.to_thread(_wait_until_zero, service, child, name)


def _wait_until_zero(service: Service, child: Child, metric: str) -> None:
    eventually(lambda: service.metrics(child)[metric] == 0 or None, f"{metric} is 0")


async def test_a_client_that_never_reads_stalls_no_other_stream(service: Service):
    await asyncio.to_thread(service.wait_until_idle)
    request = generate_request(PROMPT, max_tokens=64, ignore_eos=True)
    expected = (await asyncio.to_thread(read, service.stub.Generate(request))).outputs
    rss_before = service.router.rss_bytes()
    num_tokens = 600
    unread_request = generate_request(
        PROMPT, n=4, max_tokens=num_tokens, ignore_eos=True, logprobs=20
    )
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        unread = [stub.Generate(unread_request) for _ in range(4)]
        body = {"stream": True, "temperature": 0, "n": 4, "logprobs": 20, "ignore_eos": True}
        socks = [
            await asyncio.to_thread(_post, service, {**body, "max_tokens": num_tokens})
            for _ in range(4)
        ]
        await asyncio.to_thread(
            eventually, lambda: service.load().num_requests_running >= 32 or None, "they run"
        )
        for _ in range(3):
            result = await asyncio.wait_for(read_aio(stub.Generate(request)), 30)
            assert result.outputs == expected
        # Unread requests run to their end and free their blocks.
        await asyncio.to_thread(service.wait_until_idle)
        grown_bytes = service.router.rss_bytes() - rss_before
        for stream in unread:
            result = await read_aio(stream)
            assert [len(output) for output in result.outputs] == [num_tokens] * 4
        for sock in socks:
            sock.close()
    assert grown_bytes < 64 * MIB, f"{grown_bytes / MIB:.0f} MiB"
    await asyncio.to_thread(_wait_until_zero, service, service.router, "quire_num_requests_live")


async def test_a_deadline_that_has_no_chance_is_reported_as_such(service: Service):
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        stream = stub.Generate(generate_request(PROMPT, **ENDLESS), timeout=0.001)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_aio(stream)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.to_thread(service.wait_until_idle)
