"""Publishes KV events over ZeroMQ as vLLM does: on a PUB socket, and a ROUTER socket for replays.

A message has a topic, a number and a batch. ZeroMQ drops messages for a slow subscriber. The
subscriber notices the missing number, and asks the ROUTER socket for all batches from that number
on. If these batches are no longer kept, the subscriber gets a snapshot instead, which begins with
`AllBlocksCleared`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import structlog
import zmq
import zmq.asyncio

from quire.v1.kv_pb2 import WatchKvResponse
from rpc.grpc_server import CannotListenError
from scheduler_svc.kv_events.feed import KvEvents
from scheduler_svc.kv_events.vllm_format import AllBlocksCleared, AsOneEngine, encode

_NUM_KEPT: Final = 10_000
"""Number of batches that can be replayed."""
_MAX_UNSENT: Final = 100_000
"""At most this many messages wait for one subscriber."""
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)

log = structlog.get_logger()


class ZmqOutlet:
    """The two sockets; `run` publishes on the PUB socket and answers on the ROUTER socket."""

    def __init__(
        self,
        events: KvEvents,
        endpoint: str,
        replay_endpoint: str,
        topic: str,
        num_kept: int = _NUM_KEPT,
    ) -> None:
        """Listen at two endpoints, such as tcp://*:5557; an empty `replay_endpoint`: no replays.

        Raises:
            CannotListenError: An endpoint is not available.
        """
        self._events = events
        self._topic = topic.encode()
        self._context = zmq.asyncio.Context()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        # The numbers are above those of an earlier scheduler, so that its subscribers notice a gap.
        # This holds because without --epoch, an epoch is at least the time of the start in
        # nanoseconds, and a batch takes more than a microsecond.
        self._first = self._next = events.epoch // 1000
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set_hwm(_MAX_UNSENT)
            self._publisher.bind(endpoint)
            self._replayer = self._context.socket(zmq.ROUTER)
            self._replayer.set_hwm(_MAX_UNSENT)
            if replay_endpoint:
                self._replayer.bind(replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CannotListenError(f"KV events cannot listen on {endpoint}: {error}") from None

    async def run(self) -> None:
        """Publish and replay until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish())
                tasks.create_task(self._replay())
        finally:
            self._context.destroy(linger=0)

    async def _publish(self) -> None:
        engine = AsOneEngine()
        await self._send(encode([AllBlocksCleared()]))
        with self._events.reader() as reader:
            async for message in reader.messages():
                async for batch in _batches(engine, message):
                    await self._send(batch)

    async def _send(self, batch: bytes) -> None:
        number, self._next = self._next, self._next + 1
        self._kept.append((number, batch))
        await self._publisher.send_multipart((self._topic, _to_bytes(number), batch))

    async def _replay(self) -> None:
        while True:
            peer, *question = await self._replayer.recv_multipart()
            if len(question) != 2 or len(question[1]) != _NUMBER_BYTES:  # noqa: PLR2004 - empty, number
                log.warning("a request to replay KV events is malformed", num_frames=len(question))
                continue
            first = int.from_bytes(question[1], "big")
            if self._kept and (first >= self._kept[0][0] or self._kept[0][0] == self._first):
                for number, batch in list(self._kept):
                    if number >= first:
                        await self._answer(peer, number, batch)
                        await asyncio.sleep(0)  # sending alone lets no other task run
            else:
                # The batches after this one may repeat changes that the snapshot includes.
                last = self._next - 1
                async for batch in self._snapshot():
                    await self._answer(peer, last, batch)
            await self._replayer.send_multipart((peer, b"", _END, b""))

    async def _answer(self, peer: bytes, number: int, batch: bytes) -> None:
        await self._replayer.send_multipart((peer, b"", _to_bytes(number), batch))

    async def _snapshot(self) -> AsyncIterator[bytes]:
        engine = AsOneEngine()
        yield encode([AllBlocksCleared()])
        with self._events.reader() as reader:
            lacking = {*reader.workers}
            if not lacking:
                return
            async for message in reader.messages():
                async for batch in _batches(engine, message):
                    yield batch
                if message.events and message.events[-1].HasField("end"):
                    lacking.discard(message.worker)
                if not lacking:
                    return


async def _batches(engine: AsOneEngine, message: WatchKvResponse) -> AsyncIterator[bytes]:
    """Convert a worker's events to encoded batches; let other tasks run after each batch."""
    for events in engine.apply(message):
        if events:
            yield encode(events)
        await asyncio.sleep(0)


def _to_bytes(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")
