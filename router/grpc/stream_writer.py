"""Writes the messages of one call, without a task switch for each."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from contract.errors import UnavailableError
from router.grpc.call import CallContext


class StreamWriter:
    """Writes messages to a call; it is the `Room` of the request that the call reads.

    gRPC takes one message at a time, and the request merges the events that come while one is being
    written. So a client that does not read costs no memory here.

    The coroutine of gRPC's `write` is driven by hand: it begins in `put`, and ends in a callback of
    the future that it waits for. A task that waits for each event and each write would take longer
    than everything else that the router does for a token.
    """

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._writing: Coroutine[Any, Any, None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._error: UnavailableError | None = None

    def has_room(self) -> bool:
        return self._writing is None

    async def wait_for_room(self) -> None:
        """Wait until the message is written; raises UnavailableError if the client is gone."""
        await self._has_room.wait()
        if self._error is not None:
            raise self._error

    def put(self, message: bytes) -> None:
        """Begin to write; call this only while there is room."""
        if self._error is not None:
            raise self._error
        assert self._writing is None, "gRPC takes one message at a time"
        self._writing = self._context.write(message)
        self._go_on()

    def _go_on(self, _: object = None) -> None:
        assert self._writing is not None
        try:
            waits_for = self._writing.send(None)
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - see `wait_for_room`
            self._error = UnavailableError("the client is gone")
            self._error.__cause__ = error
        else:
            # asyncio's protocol: what drives a coroutine acknowledges the future that it yields.
            waits_for._asyncio_future_blocking = False  # noqa: SLF001
            waits_for.add_done_callback(self._go_on)
            self._has_room.clear()
            return
        self._writing = None
        self._has_room.set()
