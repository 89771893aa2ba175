"""How the messages of a gRPC call are written."""

import asyncio

import pytest

from contract.errors import UnavailableError
from router.grpc.stream_writer import StreamWriter


class Context:
    """A call whose writes wait for the client to read, or end at once."""

    def __init__(self, *, waits: bool = True) -> None:
        self.written: list[bytes] = []
        self.client = asyncio.get_running_loop().create_future() if waits else None
        self.error: BaseException | None = None

    async def write(self, message: bytes) -> None:
        if self.error is not None:
            raise self.error
        if self.client is not None:
            await self.client
        self.written.append(message)

    def read(self) -> None:
        """Let the client read what is being written."""
        assert self.client is not None
        self.client.set_result(None)
        self.client = asyncio.get_running_loop().create_future()


async def test_there_is_no_room_until_the_client_has_read():
    context = Context()
    writer = StreamWriter(context)
    assert writer.has_room()
    writer.put(b"a")
    assert not writer.has_room()
    waiting = asyncio.create_task(writer.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    context.read()
    await waiting
    assert writer.has_room()
    writer.put(b"b")
    context.read()
    await writer.wait_for_room()
    assert context.written == [b"a", b"b"]


async def test_a_write_that_ends_at_once_leaves_room():
    writer = StreamWriter(context := Context(waits=False))
    for message in (b"a", b"b"):
        writer.put(message)
        assert writer.has_room()
    assert context.written == [b"a", b"b"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), asyncio.CancelledError()], ids=str)
async def test_a_call_that_has_ended_refuses_each_further_message(error):
    writer = StreamWriter(context := Context())
    context.error = error
    writer.put(b"a")
    with pytest.raises(UnavailableError, match="client is gone"):
        await writer.wait_for_room()
    with pytest.raises(UnavailableError, match="client is gone"):
        writer.put(b"b")


async def test_a_client_that_leaves_during_a_write_ends_the_wait():
    writer = StreamWriter(context := Context())
    writer.put(b"a")
    waiting = asyncio.create_task(writer.wait_for_room())
    await asyncio.sleep(0)
    context.client.set_exception(RuntimeError("broken"))
    with pytest.raises(UnavailableError, match="client is gone"):
        await waiting
