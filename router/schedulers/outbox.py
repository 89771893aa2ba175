"""What one scheduler must be told and has not been yet, as little as that can be."""

import asyncio
from collections import deque
from collections.abc import Iterable

from quire.v1 import scheduler_pb2
from router.request.live import LiveRequest
from router.schedulers.wire import submit_to_proto


class Outbox:
    """Requests to submit, in order, and sequences to cancel; none of its methods waits but `next`.

    A request is written as it is when its turn comes, and one that ends before that is dropped: a
    scheduler that does not read costs the memory of the requests that are live, and a few bytes for
    each sequence that it knows and has yet to hear the end of, and each call that waits to resume.
    """

    def __init__(self) -> None:
        """Empty; belongs to the running event loop."""
        self._submits: dict[int, LiveRequest] = {}
        """By the first sequence key."""
        self._cancels: list[int] = []
        self._messages: deque[scheduler_pb2.ConnectRequest] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """How many requests and sequences there are."""
        return len(self._submits) + len(self._cancels) + len(self._messages)

    def submit(self, live: LiveRequest) -> None:
        """Puts a request at the end."""
        self._submits[live.record.first_seq_key] = live
        self._filled.set()

    def drop(self, live: LiveRequest) -> bool:
        """Forgets a request; False if the scheduler has been told of it, and must hear a cancel."""
        return self._submits.pop(live.record.first_seq_key, None) is not None

    def cancel(self, seq_keys: list[int]) -> None:
        """Adds sequences that the scheduler has been told of."""
        self._cancels += seq_keys
        self._filled.set()

    def leave(self, seq_keys: Iterable[int]) -> None:
        """Adds a request that its client has left, by what it has live; the scheduler knows it."""
        leave = scheduler_pb2.Leave(seq_keys=seq_keys)
        self._messages.append(scheduler_pb2.ConnectRequest(leave=leave))
        self._filled.set()

    def resume(self, request_id: str, tenant: str, first_seq_key: int) -> None:
        """Adds a request to take over; behind those that are left, which may be the same one."""
        resume = scheduler_pb2.Resume(
            request_id=request_id, tenant=tenant, first_seq_key=first_seq_key
        )
        self._messages.append(scheduler_pb2.ConnectRequest(resume=resume))
        self._filled.set()

    async def next(self) -> scheduler_pb2.ConnectRequest:
        """Waits for something to say and takes it: cancels first, since they make room."""
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
