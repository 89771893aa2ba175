"""A scheduler process in the test's own event loop, and a fake router."""

import asyncio
import contextlib
from dataclasses import dataclass

import aiohttp
import grpc.aio
from prometheus_client import CollectorRegistry

from contract.codec.packing import pack_int32, unpack_int32, unpack_uint64
from quire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from rpc.peers.channel import open_channel
from scheduler_svc.app import run_scheduler
from scheduler_svc.settings import SchedulerSettings


@dataclass
class RunningScheduler:
    target: str
    http: str
    registry: CollectorRegistry
    task: asyncio.Task
    stop: asyncio.Event


@contextlib.asynccontextmanager
async def running_scheduler(folder, workers, *, resolver=None, **options):
    """Run a scheduler during the block; it drains at the end."""
    registry = CollectorRegistry()
    started, stop = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def on_started(addresses):
        started.set_result(addresses)

    settings = SchedulerSettings(
        uds=folder / options.pop("socket", "s"),
        http_port=0,
        workers=tuple(workers),
        **{"drain_s": 10, **options},
    )
    task = asyncio.create_task(
        run_scheduler(
            settings, registry=registry, on_started=on_started, stop=stop, resolver=resolver
        )
    )
    await asyncio.wait([started, task], return_when=asyncio.FIRST_COMPLETED)
    addresses = started.result()
    try:
        yield RunningScheduler(addresses.grpc, addresses.http, registry, task, stop)
    finally:
        stop.set()
        await task


async def get(scheduler, path):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{scheduler.http}{path}") as response,
    ):
        return response.status, await response.json()


async def wait_until_not_ready(scheduler):
    while (answer := await get(scheduler, "/ready"))[0] == 200:
        pass
    return answer


def num_live(load):
    return load.num_requests_running + load.num_requests_waiting


class FakeRouter:
    """A router's end of the stream: submits requests, and records all events."""

    def __init__(self, target):
        self.channel = open_channel(target)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.call = self.stub.Connect()
        self.messages = []
        self.tokens = {}  # by seq key
        self.finished = {}  # SequenceFinished by seq key
        self.admitted = {}
        self.logprobs = {}  # by seq key, parallel to tokens
        self.pinned = {}  # tokens by seq key
        self.refused = {}  # by first seq key
        self.resumed = {}  # Submit by first seq key
        self.welcome = None

    async def connect(self, router_id="r"):
        hello = scheduler_pb2.RouterHello(router_id=router_id)
        await self.call.write(scheduler_pb2.ConnectRequest(hello=hello))
        self.welcome = (await self.call.read()).welcome
        return self

    async def submit(
        self,
        key,
        prompt,
        *,
        max_tokens=8,
        n=1,
        outputs=(),
        cache_pin_s=None,
        beam=None,
        tenant="",
        resume_record=None,
        is_again=False,
        **sampling,
    ):
        await self.send(
            scheduler_pb2.Submit(
                request_id=f"request-{key}",
                first_seq_key=key,
                n=n,
                prompt_token_ids=pack_int32(prompt),
                sampling=common_pb2.SamplingParams(
                    max_tokens=max_tokens, **{"seed": 1, **sampling}
                ),
                outputs=outputs,
                cache_pin_s=cache_pin_s,
                beam=beam,
                tenant=tenant,
                resume_record=resume_record,
                is_again=is_again,
            )
        )

    async def send(self, submit):
        await self.call.write(scheduler_pb2.ConnectRequest(submit=submit))

    async def cancel(self, *keys):
        await self.call.write(
            scheduler_pb2.ConnectRequest(cancel=scheduler_pb2.Cancel(seq_keys=keys))
        )

    async def resume(self, request_id, key, tenant=""):
        resume = scheduler_pb2.Resume(request_id=request_id, tenant=tenant, first_seq_key=key)
        await self.call.write(scheduler_pb2.ConnectRequest(resume=resume))

    async def leave(self, *keys):
        leave = scheduler_pb2.Leave(seq_keys=keys)
        await self.call.write(scheduler_pb2.ConnectRequest(leave=leave))

    async def read(self):
        """Read and record one message."""
        message = await self.call.read()
        assert message is not grpc.aio.EOF, "the scheduler ended the stream"
        if message == scheduler_pb2.ConnectResponse(step=scheduler_pb2.StepOutput()):
            return message  # a heartbeat without events
        self.messages.append(message)
        if message.WhichOneof("message") == "refused":
            self.refused[message.refused.first_seq_key] = message.refused
            return message
        step = message.step
        if message.WhichOneof("message") == "resumed":
            self.resumed[message.resumed.submit.first_seq_key] = message.resumed.submit
            step = message.resumed.so_far
        keys = unpack_uint64(step.seq_keys, "seq_keys").tolist()
        token_ids = unpack_int32(step.token_ids, "token_ids").tolist()
        for key, token_id in zip(keys, token_ids, strict=True):
            assert key not in self.finished, f"token after the end of {key}"
            self.tokens.setdefault(key, []).append(token_id)
        for item in step.logprobs:
            self.logprobs.setdefault(keys[item.index], []).append(item.logprob.logprob)
        for item in step.admitted:
            self.admitted[item.seq_key] = item
        for item in step.pinned:
            self.pinned[item.seq_key] = item.num_pinned_tokens
        for item in step.finished:
            assert item.seq_key not in self.finished, f"{item.seq_key} ends twice"
            self.finished[item.seq_key] = item
        return message

    async def read_until(self, condition):
        while not condition():
            await self.read()

    async def read_to_end(self):
        """Read until the stream breaks; raises its error."""
        await self.read_until(lambda: False)

    async def read_until_finished(self, *keys):
        await self.read_until(lambda: all(key in self.finished for key in keys))

    async def load(self):
        response = await self.stub.GetSchedulerLoad(scheduler_pb2.GetSchedulerLoadRequest())
        return response.load

    async def wait_for_load(self, condition):
        """Poll the load until the condition is true; the test's timeout is the limit."""
        while not condition(load := await self.load()):
            pass
        return load

    async def wait_for_live(self, count):
        """Wait until the scheduler has `count` sequences; sent submits may arrive later."""
        await self.wait_for_load(lambda load: num_live(load) == count)

    async def defragment(self):
        response = await self.stub.Defragment(scheduler_pb2.DefragmentRequest())
        return response.workers

    async def disconnect(self):
        self.call.cancel()
        await self.channel.close()
