"""Pending messages to one scheduler."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from quire.v1 import scheduler_pb2
from router.live.live_request import LiveRequest
from router.schedulers.wire import submit_to_proto

_HEARTBEAT: Final = scheduler_pb2.ConnectRequest(heartbeat=scheduler_pb2.RouterHeartbeat())


class SchedulerOutbox:
    """Queues the messages to one scheduler. Only `next` waits.

    A request is serialized when it is sent, and dropped if it ends before that. So while a
    scheduler does not read its messages, the queue stays small.
    """

    def __init__(self) -> None:
        self._submits: dict[int, LiveRequest] = {}
        """Maps the first sequence key of each pending request to the request."""
        self._cancels: list[int] = []
        self._messages: deque[scheduler_pb2.ConnectRequest] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._submits) + len(self._cancels) + len(self._messages)

    def submit(self, live: LiveRequest) -> None:
        self._submits[live.record.first_seq_key] = live
        self._filled.set()

    def drop(self, live: LiveRequest) -> bool:
        """Remove a request; return False if it was sent already and must be cancelled."""
        return self._submits.pop(live.record.first_seq_key, None) is not None

    def cancel(self, seq_keys: list[int]) -> None:
        """Cancel sequences that the scheduler knows."""
        self._cancels += seq_keys
        self._filled.set()

    def leave(self, seq_keys: Iterable[int]) -> None:
        """Tell the scheduler that a request's client has left, and that the request continues.

        `seq_keys` are the keys of the request's live sequences.
        """
        leave = scheduler_pb2.Leave(seq_keys=seq_keys)
        self._messages.append(scheduler_pb2.ConnectRequest(leave=leave))
        self._filled.set()

    def resume(self, request_id: str, tenant: str, first_seq_key: int) -> None:
        """Ask the scheduler to continue a resumable request on this router's stream.

        This or another router has submitted the request. The scheduler gets this message after all
        earlier `leave` messages, one of which may be for the same request.
        """
        resume = scheduler_pb2.Resume(
            request_id=request_id, tenant=tenant, first_seq_key=first_seq_key
        )
        self._messages.append(scheduler_pb2.ConnectRequest(resume=resume))
        self._filled.set()

    def unpin(self, request_id: str, tenant: str) -> None:
        """Drop the pins of a request's prompt."""
        unpin = scheduler_pb2.Unpin(request_id=request_id, tenant=tenant)
        self._messages.append(scheduler_pb2.ConnectRequest(unpin=unpin))
        self._filled.set()

    def send_heartbeat(self) -> None:
        """Queue a heartbeat, unless one is pending."""
        if _HEARTBEAT not in self._messages:
            self._messages.append(_HEARTBEAT)
            self._filled.set()

    async def next(self) -> scheduler_pb2.ConnectRequest:
        """Return the next message; wait until there is one.

        Cancellations come first, because they make room at the scheduler.
        """
        while not self:
            self._filled.clear()
            await self._filled.wait()
        if self._cancels:
            seq_keys, self._cancels = self._cancels, []
            return scheduler_pb2.ConnectRequest(cancel=scheduler_pb2.Cancel(seq_keys=seq_keys))
        if self._messages:
            return self._messages.popleft()
        live = self._submits.pop(next(iter(self._submits)))
        return submit_to_proto(live, asyncio.get_running_loop().time())
