"""What a call with many answers says, one after another."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from rpc.status import calling


async def answers(call: grpc.aio.UnaryStreamCall[Any, Any]) -> AsyncGenerator[Any]:
    """Yield them as they come; the call ends with the generator, so see that it is closed.

    Raises:
        QuireError: What the peer said, or that it is lost.
    """
    try:
        with calling():
            while (answer := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                yield answer
    finally:
        call.cancel()
