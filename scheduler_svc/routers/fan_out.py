"""Sends each sequence's outputs to its router, and news, such as new adapters, to every router."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from contract.errors import QuireError
from contract.liveness.heartbeat import TICK_S
from contract.lora import LoraAdapter
from quire.v1 import scheduler_pb2
from scheduler_svc.core.interface.request import Request, SourceId
from scheduler_svc.domain import live_seq_keys
from scheduler_svc.routers.resumable import ResumableRequests
from scheduler_svc.routers.stream import RouterStream
from scheduler_svc.wire.router import adapters_to_proto, refused_to_proto

log = structlog.get_logger()

_ROOM_INTERVAL_S: Final = 0.02
"""Seconds between two reports of `QueueRoomReporter`; a step takes about as long."""


class RouterStreams:
    """The open streams of routers, by source, and the requests that another stream may resume."""

    def __init__(self, max_backlog_bytes: int, resumables: ResumableRequests | None = None) -> None:
        """Begin without streams. Without `resumables`, no request outlives its stream."""
        none = ResumableRequests(grace_s=0, max_bytes=0)
        self.resumables = none if resumables is None else resumables
        self._max_backlog_bytes = max_backlog_bytes
        self._streams: dict[SourceId, RouterStream] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, router_id: str, max_model_len: int | None = None) -> RouterStream:
        """Open a stream under a new source id, which no other stream will have.

        `max_model_len`, the limit on a request's tokens, is sent in the router's welcome message.
        """
        self._num_opened += 1
        source = SourceId(self._num_opened)
        stream = RouterStream(source, router_id, self._max_backlog_bytes, max_model_len)
        self._streams[source] = stream
        return stream

    def close(self, stream: RouterStream) -> None:
        """Forget a stream; later messages to it are dropped."""
        del self._streams[stream.source]

    def deliver(self, outputs: Mapping[SourceId, scheduler_pb2.StepOutput]) -> None:
        """Send the outputs of each source to the source's stream, if the stream is open.

        Outputs of resumable requests are also stored, for a stream that resumes the request later.
        If another stream has resumed a request, the request's outputs are sent to that stream.
        """
        for source, output in outputs.items():
            if (stream := self._streams.get(source)) is not None:
                stream.deliver(output)
            self.resumables.on_output(source, output)

    def refuse(self, request: Request, error: QuireError) -> None:
        """Send a request's refusal to its source."""
        self.resumables.refuse(request, error)
        if (stream := self._streams.get(request.source)) is not None:
            stream.release(live_seq_keys(request))
            stream.refuse(refused_to_proto(request.first_seq_key, error))

    def send_heartbeats(self) -> None:
        """Send a heartbeat to each router."""
        for stream in self._streams.values():
            stream.send_heartbeat()

    @property
    def are_silent(self) -> bool:
        """Whether there are routers, but all of them seem to hang or to be cut off.

        If so, another scheduler that the routers can reach should take over, because the routers'
        clients wait. Routers of earlier versions send no heartbeats and count as healthy.
        """
        heartbeats = [stream.heartbeat for stream in self._streams.values()]
        return bool(heartbeats) and all(each is not None and each.is_hanging for each in heartbeats)

    async def watch(self) -> None:
        """Measure how long each router has been silent, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            was_silent = self.are_silent
            for stream in self._streams.values():
                if stream.heartbeat is not None:
                    stream.heartbeat.on_tick()
            if self.are_silent and not was_silent:
                log.warning("all routers are silent", num_routers=len(self))

    def publish_room(self, num_seqs: int | None) -> None:
        """Tell each router how many more sequences may be submitted; None: no limit now."""
        room = scheduler_pb2.QueueRoom(num_sequences=num_seqs)
        for stream in self._streams.values():
            stream.deliver(scheduler_pb2.StepOutput(room=room))

    def publish_max_model_len(self, max_model_len: int) -> None:
        """Tell each router the limit on the tokens of a request, if the limit has changed."""
        for stream in self._streams.values():
            stream.publish_max_model_len(max_model_len)

    def publish_unloaded(self, *, is_unloaded: bool) -> None:
        """Tell each router whether no worker has a model loaded, if this has changed."""
        for stream in self._streams.values():
            stream.publish_unloaded(is_unloaded=is_unloaded)

    def publish_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """Tell each router which LoRA adapters requests may use from now on."""
        for stream in self._streams.values():
            stream.deliver(adapters_to_proto(adapters))

    def end_all(self, error: QuireError) -> None:
        """End each stream with `error` after its pending messages."""
        for stream in self._streams.values():
            stream.end(error)


class QueueRoomReporter:
    """Tells routers how many more sequences the queues can take, while the queues are nearly full.

    With these reports, routers can refuse requests early, before they tokenize them. A report is
    always slightly old, so the scheduler makes the final decision. Reports begin after a refusal,
    and end when the queue of some worker is half free.
    """

    def __init__(
        self, room: Callable[[], int], publish: Callable[[int | None], None], max_waiting: int
    ) -> None:
        """Make a reporter.

        Args:
            room: Returns how many more sequences may be submitted.
            publish: Called with the result of `room`, or with None if there is no limit now.
            max_waiting: The limit on waiting sequences at a worker.
        """
        self._room = room
        self._publish = publish
        self._enough = max(1, max_waiting // 2)
        self._refused = asyncio.Event()

    def on_refusal(self) -> None:
        """Called when a request was refused because of a full queue; starts the reports."""
        self._refused.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._refused.wait()
            last: int | None = None
            while (room := self._room()) < self._enough:
                # Repeat an unchanged number, because routers subtract the sequences they submit.
                if room or last != room:
                    self._publish(room)
                last = room
                await asyncio.sleep(_ROOM_INTERVAL_S)
            self._refused.clear()
            if last is not None:
                self._publish(None)
