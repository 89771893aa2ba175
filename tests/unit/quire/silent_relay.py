"""A relay that a test can make silent: its connections stay open, but forward nothing."""

import asyncio
import contextlib
from typing import Self


class SilentRelay:
    """Forwards bytes both ways between its own Unix socket and another. While it is silent, it
    keeps bytes back, and forwards them afterwards.
    """

    def __init__(self, path: str, target_path: str) -> None:
        self.target = f"unix:{path}"
        self.speaks = asyncio.Event()
        self.speaks.set()
        self._path = path
        self._target_path = target_path
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_unix_connection(self._target_path)
        for source, sink in ((reader, back_writer), (back_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pass(source, sink)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                while data := await source.read(2**16):
                    await self.speaks.wait()
                    sink.write(data)
                    await sink.drain()
            finally:
                sink.close()
