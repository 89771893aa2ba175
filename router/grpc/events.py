"""Writes a request's events to a gRPC call.

On Quire's own gRPC server, the task that receives tokens from the scheduler also writes them, so no
other task has to wake.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from contract.outputs import Event
from router.grpc.call import CallContext
from router.live.live_request import LiveRequest
from rpc.http2.call import Call


async def write_events(
    live: LiveRequest,
    context: CallContext,
    messages_of: Callable[[Event], Iterable[Message]],
    write: Callable[[Any], Awaitable[None]] | None = None,
) -> None:
    """Write the messages that `messages_of` makes of each event, until the last event.

    If `messages_of` raises an error, the stream ends with this error. With grpcio, `write` is used
    instead of `context.write`, if it is given. If several requests share a call, `write` must make
    them take turns, because grpcio allows only one write at a time.
    """
    if isinstance(context, Call):
        call: Call = context

        def put(event: Event) -> None:
            for message in messages_of(event):
                call.put(message)

        await live.send_to(put, call)
        return
    write = context.write if write is None else write
    async for event in live:
        for message in messages_of(event):
            await write(message)
