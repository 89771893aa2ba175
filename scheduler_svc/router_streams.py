"""The routers' streams: what is on its way to each, in bounded memory."""

import asyncio
from collections import deque
from collections.abc import Mapping

from quire.v1 import scheduler_pb2
from rpc.errors import InvalidArgumentError, QuireError, TooBusyError
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.holding import live_seq_keys
from scheduler_svc.wire.router import merge_step_outputs, refused_to_proto

_MESSAGE_OVERHEAD_BYTES = 256
"""What a pending message costs beyond its own bytes, so that many tiny ones count as well."""


class RouterStream:
    """What one router has not been sent yet.

    A router that reads at the pace of the steps gets one message for each. For one that reads more
    slowly the outputs of several steps become one message; one that lets more than
    `max_backlog_bytes` pile up loses its stream.
    """

    def __init__(self, source: SourceId, router_id: str, max_backlog_bytes: int) -> None:
        self.source = source
        self.router_id = router_id
        self._max_backlog_bytes = max_backlog_bytes
        self._live_seq_keys: set[SeqKey] = set()
        self._refusals: deque[scheduler_pb2.Refused] = deque()
        self._outputs: list[scheduler_pb2.StepOutput] = []
        self._backlog_bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def claim(self, request: Request) -> None:
        """Take the keys of a request's sequences, until each is finished or all are released.

        Raises:
            InvalidArgumentError: A live sequence has such a key. The core would mix them up.
        """
        keys = live_seq_keys(request)
        for key in keys:
            if key in self._live_seq_keys:
                raise InvalidArgumentError(
                    "first_seq_key",
                    f"is {request.first_seq_key} with n = {request.n}; sequence {key} is live",
                )
        self._live_seq_keys.update(keys)

    def release(self, request: Request) -> None:
        """Give up the keys of a request that is not accepted."""
        self._live_seq_keys.difference_update(live_seq_keys(request))

    def deliver(self, output: scheduler_pb2.StepOutput) -> None:
        """Send the news of one step."""
        self._live_seq_keys.difference_update(SeqKey(end.seq_key) for end in output.finished)
        if self._has_room(output):
            self._outputs.append(output)

    def refuse(self, refused: scheduler_pb2.Refused) -> None:
        """Send a refusal."""
        if self._has_room(refused):
            self._refusals.append(refused)

    def end(self, error: Exception | None = None) -> None:
        """End the stream behind what is pending, with `error` or well."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    async def next_message(self) -> scheduler_pb2.ConnectResponse | None:
        """Wait for the next message to send; None: the stream ends well.

        Raises:
            Exception: The stream ends with this error; one that is no QuireError is a bug's.
        """
        while not (self._refusals or self._outputs or self._ended):
            self._wake.clear()
            await self._wake.wait()
        if self._refusals:
            refused = self._refusals.popleft()
            self._backlog_bytes -= _size_bytes(refused)
            return scheduler_pb2.ConnectResponse(refused=refused)
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._backlog_bytes -= sum(map(_size_bytes, outputs))
            return scheduler_pb2.ConnectResponse(step=merge_step_outputs(outputs))
        if self._error is not None:
            raise self._error
        return None

    def _has_room(self, message: scheduler_pb2.StepOutput | scheduler_pb2.Refused) -> bool:
        if self._ended:
            return False
        self._backlog_bytes += _size_bytes(message)
        if self._backlog_bytes > self._max_backlog_bytes:
            self._refusals.clear()
            self._outputs.clear()
            self._backlog_bytes = 0
            self.end(
                TooBusyError(
                    f"router {self.router_id!r} does not read: its backlog is more than "
                    f"{self._max_backlog_bytes} bytes"
                )
            )
            return False
        self._wake.set()
        return True


class RouterStreams:
    """All streams that are open, by source."""

    def __init__(self, max_backlog_bytes: int) -> None:
        self._max_backlog_bytes = max_backlog_bytes
        self._streams: dict[SourceId, RouterStream] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, router_id: str) -> RouterStream:
        """Open a stream under a source of its own; the number is never used again."""
        self._num_opened += 1
        source = SourceId(self._num_opened)
        stream = RouterStream(source, router_id, self._max_backlog_bytes)
        self._streams[source] = stream
        return stream

    def close(self, stream: RouterStream) -> None:
        """Forget a stream; what is sent to it from now on is lost."""
        del self._streams[stream.source]

    def deliver(self, outputs: Mapping[SourceId, scheduler_pb2.StepOutput]) -> None:
        """Send each source its news; of those that are gone, nobody hears."""
        for source, output in outputs.items():
            if (stream := self._streams.get(source)) is not None:
                stream.deliver(output)

    def refuse(self, request: Request, error: QuireError) -> None:
        """Tell a request's source that it is not accepted."""
        if (stream := self._streams.get(request.source)) is not None:
            stream.release(request)
            stream.refuse(refused_to_proto(request.first_seq_key, error))

    def end_all(self, error: QuireError) -> None:
        """End all streams behind what is pending."""
        for stream in self._streams.values():
            stream.end(error)


def _size_bytes(message: scheduler_pb2.StepOutput | scheduler_pb2.Refused) -> int:
    return message.ByteSize() + _MESSAGE_OVERHEAD_BYTES
