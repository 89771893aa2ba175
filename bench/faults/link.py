"""A link between two processes that can be cut, or made silent."""

import asyncio
import contextlib
from pathlib import Path

_CHUNK_BYTES = 2**16


class Link:
    """Listens on one Unix socket, and passes bytes in both directions to and from another."""

    def __init__(self, listen: Path, target: Path) -> None:
        self._listen = listen
        self._target = target
        self._connections: set[asyncio.Task[None]] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._listen)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = tuple(self._connections)
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self) -> None:
        """Cut every connection. Bytes in transit are lost; new connections work."""
        for connection in tuple(self._connections):
            connection.cancel()

    async def silence(self, seconds: float) -> None:
        """For `seconds`, pass on nothing on any connection, as if the network were down."""
        self._passes.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._passes.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            back_reader, back_writer = await asyncio.open_unix_connection(self._target)
            writers.append(back_writer)
            ways = [
                asyncio.ensure_future(self._pass(reader, back_writer)),
                asyncio.ensure_future(self._pass(back_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the target is not there: the caller sees its connection closed
        finally:
            for each in writers:
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
