"""The stream to one router, with its pending messages in bounded memory."""

import asyncio
from collections import deque
from collections.abc import Iterable

from contract.errors import InvalidArgumentError, TooBusyError
from contract.liveness.heartbeat import Heartbeat
from quire.v1 import scheduler_pb2
from scheduler_svc.core.interface.request import SeqKey, SourceId
from scheduler_svc.wire.router import merge_step_outputs

_MESSAGE_OVERHEAD_BYTES = 256
"""Added to the size of each pending message, so that the limit also bounds the number of tiny
messages."""


class RouterStream:
    """The pending messages to one router, and the keys of its live sequences.

    A step's outputs become one message, if the router has read all earlier messages. Otherwise they
    wait, and are merged with the outputs of the next steps into one message. If the pending
    messages exceed the limit `max_backlog_bytes`, the stream ends.
    """

    def __init__(
        self,
        source: SourceId,
        router_id: str,
        max_backlog_bytes: int,
        max_model_len: int | None = None,
    ) -> None:
        self.source = source
        self.router_id = router_id
        self.heartbeat: Heartbeat | None = None
        """Measures the router's silence; None: the router has sent no heartbeat yet."""
        self._max_backlog_bytes = max_backlog_bytes
        self._max_model_len = max_model_len
        self._is_unloaded = False
        self._live_seq_keys: set[SeqKey] = set()
        self._replies: deque[scheduler_pb2.ConnectResponse] = deque()
        self._outputs: list[scheduler_pb2.StepOutput] = []
        self._backlog_bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def on_heartbeat(self) -> None:
        """Begin to measure the router's silence at its first heartbeat."""
        if self.heartbeat is None:
            self.heartbeat = Heartbeat()

    def on_message(self) -> None:
        """Count any message as a heartbeat, because a heartbeat may wait behind other messages."""
        if self.heartbeat is not None:
            self.heartbeat.on_message()

    @property
    def has_ended(self) -> bool:
        """Whether the stream accepts no more messages."""
        return self._ended

    @property
    def live_seq_keys(self) -> frozenset[SeqKey]:
        return frozenset(self._live_seq_keys)

    def claim(self, seq_keys: Iterable[SeqKey]) -> None:
        """Reserve keys for new sequences; a key is free again when its sequence finishes.

        Raises:
            InvalidArgumentError: A live sequence already has one of the keys.
        """
        keys = set(seq_keys)
        for key in keys & self._live_seq_keys:
            raise InvalidArgumentError(
                "first_seq_key",
                f"is {min(keys)}, for {len(keys)} sequences; sequence {key} is live",
            )
        self._live_seq_keys |= keys

    def release(self, seq_keys: Iterable[SeqKey]) -> None:
        """Free the keys of a request that was refused, or that another stream has resumed."""
        self._live_seq_keys.difference_update(seq_keys)

    def deliver(self, output: scheduler_pb2.StepOutput) -> None:
        """Send the outputs of one step, or news such as a new length limit, to the router."""
        self._live_seq_keys.difference_update(SeqKey(end.seq_key) for end in output.finished)
        if self._has_room(output):
            self._outputs.append(output)

    def publish_max_model_len(self, max_model_len: int) -> None:
        """Send the limit on the tokens of a request, if the limit has changed."""
        if max_model_len != self._max_model_len:
            self._max_model_len = max_model_len
            self.deliver(scheduler_pb2.StepOutput(max_model_len=max_model_len))

    def publish_unloaded(self, *, is_unloaded: bool) -> None:
        """Send `is_unloaded`, the value of `Roster.is_unloaded`, if it has changed."""
        if is_unloaded != self._is_unloaded:
            self._is_unloaded = is_unloaded
            self.deliver(scheduler_pb2.StepOutput(is_unloaded=is_unloaded))

    def send_heartbeat(self) -> None:
        """Send an empty output, unless a message is pending anyway."""
        if not (self._replies or self._outputs):
            self.deliver(scheduler_pb2.StepOutput())

    def refuse(self, refused: scheduler_pb2.Refused) -> None:
        self._reply(scheduler_pb2.ConnectResponse(refused=refused))

    def send_resumed(self, resumed: scheduler_pb2.Resumed) -> None:
        """Send a request that the router has resumed, and the tokens that its outputs have."""
        self._reply(scheduler_pb2.ConnectResponse(resumed=resumed))

    def end(self, error: Exception | None = None) -> None:
        """End the stream after its pending messages, with `error` or normally."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    async def next_message(self) -> scheduler_pb2.ConnectResponse | None:
        """Wait for the next message to send, and return it; None: the stream ends normally.

        Raises:
            Exception: The stream ends with this error. An error other than QuireError is a bug.
        """
        while not (self._replies or self._outputs or self._ended):
            self._wake.clear()
            await self._wake.wait()
        if self._replies:
            reply = self._replies.popleft()
            self._backlog_bytes -= _size_bytes(reply)
            return reply
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._backlog_bytes -= sum(map(_size_bytes, outputs))
            return scheduler_pb2.ConnectResponse(step=merge_step_outputs(outputs))
        if self._error is not None:
            raise self._error
        return None

    def _reply(self, reply: scheduler_pb2.ConnectResponse) -> None:
        if self._has_room(reply):
            self._replies.append(reply)

    def _has_room(self, message: scheduler_pb2.StepOutput | scheduler_pb2.ConnectResponse) -> bool:
        if self._ended:
            return False
        self._backlog_bytes += _size_bytes(message)
        if self._backlog_bytes > self._max_backlog_bytes:
            self._replies.clear()
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


def _size_bytes(message: scheduler_pb2.ConnectResponse | scheduler_pb2.StepOutput) -> int:
    return message.ByteSize() + _MESSAGE_OVERHEAD_BYTES
