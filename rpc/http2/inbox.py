"""Reads the messages that a client sends on one stream."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Final

import grpc

from rpc.http2.headers import ENCODING_TO_WBITS

WINDOW_BYTES: Final = 65_535
"""Maximum number of bytes that a client may send on a stream before the handler reads; HTTP/2's
default."""
_LARGE_S: Final = 60.0
"""Longest time for a message larger than `WINDOW_BYTES` to arrive. Only a few such messages may
arrive on a connection at once, so without this limit slow messages could block all others."""

_PREFIX_BYTES: Final = 5
_QUICK_BYTES: Final = 256 * 1024
"""The event loop inflates a message only up to this many bytes; a thread inflates its rest."""


class RefusedMessageError(Exception):
    """A client's message is invalid or too large; its call must end with `code` and `details`."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Inbox:
    """Collects received bytes and splits them into messages.

    The client may send `WINDOW_BYTES` bytes that no handler has read yet. To read a larger message,
    a handler first waits while too many other large messages are arriving (`room` in `__init__`),
    and then lets the client send the whole message.
    """

    def __init__(
        self,
        max_bytes: int,
        encoding: str,
        allow: Callable[[int], None],
        room: asyncio.Semaphore,
    ) -> None:
        """At first the client may send `WINDOW_BYTES`; each call `allow(n)` allows n bytes more.

        The inboxes of a connection share `room`, which limits how many messages larger than
        `WINDOW_BYTES` arrive on the connection at the same time.
        """
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._wbits = ENCODING_TO_WBITS[encoding]
        self._allow = allow
        self._room = room
        self._data = bytearray()
        self._num_allowed = WINDOW_BYTES
        """Bytes that the client may still send."""
        self._has_ended = False
        self._num_wanted = 0
        """While `_reader` is set: the number of bytes in `_data` at which to wake the reader."""
        self._reader: asyncio.Future[None] | None = None

    def feed(self, data: bytes, num_window_bytes: int) -> None:
        """Add bytes from the client; `num_window_bytes` also counts their padding."""
        self._data += data
        self._num_allowed -= num_window_bytes
        self._wake()

    def end(self) -> None:
        """Record that the client has sent its last message."""
        self._has_ended = True
        self._wake()

    async def read(self) -> bytes | None:
        """Return the next message; None: the client has sent all its messages.

        Raises:
            RefusedMessageError: The message is invalid or too large.
        """
        while len(self._data) < (size := self._size()):
            if self._has_ended:
                if self._data:
                    raise RefusedMessageError(
                        grpc.StatusCode.INTERNAL, "the request ends within a message"
                    )
                return None
            if size > WINDOW_BYTES:
                async with self._room:
                    await self._wait_for_large(size)
            else:
                await self._wait_for(size)
        is_compressed = self._data[0]
        message = bytes(memoryview(self._data)[_PREFIX_BYTES:size])
        del self._data[:size]
        self._allow_up_to(WINDOW_BYTES - len(self._data))
        return await self._inflated(message) if is_compressed else message

    async def _wait_for_large(self, size: int) -> None:
        try:
            async with asyncio.timeout(_LARGE_S):
                await self._wait_for(size)
        except TimeoutError:
            raise RefusedMessageError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"a message above {WINDOW_BYTES} bytes took more than {_LARGE_S:g} s to arrive",
            ) from None

    async def _wait_for(self, size: int) -> None:
        if self._has_ended or len(self._data) >= size:
            return
        self._num_wanted = size
        num_missing = size - len(self._data)
        self._allow_up_to(max(WINDOW_BYTES, num_missing), at_least=num_missing)
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None and (self._has_ended or len(self._data) >= self._num_wanted):
            self._reader = None
            if not reader.done():  # a cancelled reader is done
                reader.set_result(None)

    def _size(self) -> int:
        """Return the size of the next message with its prefix, which contains the message's length.

        While the prefix itself is incomplete, return the prefix's size.

        Raises:
            RefusedMessageError: The prefix is invalid, or the message is too large.
        """
        if len(self._data) < _PREFIX_BYTES:
            return _PREFIX_BYTES
        num_bytes = int.from_bytes(self._data[1:_PREFIX_BYTES], "big")
        if num_bytes > self._max_bytes:
            raise self._too_large(num_bytes)
        if self._data[0] > int(self._wbits > 0):
            raise RefusedMessageError(
                grpc.StatusCode.INTERNAL,
                f"a message has the compression flag {self._data[0]}, but the call's grpc-encoding"
                f" is {self._encoding}",
            )
        return _PREFIX_BYTES + num_bytes

    def _allow_up_to(self, num_bytes: int, *, at_least: int = 0) -> None:
        """Raise the number of bytes that the client may still send to `num_bytes`; never lower it.

        Telling the client costs a frame. So a small increase is left to a later call if the client
        may still send `at_least` bytes without it.
        """
        more = num_bytes - self._num_allowed
        if self._has_ended or more <= 0:
            return
        if more >= WINDOW_BYTES // 2 or self._num_allowed < at_least:
            self._num_allowed += more
            self._allow(more)

    async def _inflated(self, data: bytes) -> bytes:
        inflater = zlib.decompressobj(self._wbits)
        most = self._max_bytes + 1
        try:
            message = inflater.decompress(data, min(_QUICK_BYTES, most))
            if not inflater.eof and len(message) < most:
                message += await asyncio.to_thread(_rest, inflater, most - len(message))
        except zlib.error as error:
            raise RefusedMessageError(
                grpc.StatusCode.INTERNAL, f"a message is not {self._encoding}: {error}"
            ) from None
        if len(message) > self._max_bytes:
            raise self._too_large(len(message))
        if not inflater.eof:
            raise RefusedMessageError(
                grpc.StatusCode.INTERNAL, f"a message ends within its {self._encoding}"
            )
        return message

    def _too_large(self, num_bytes: int) -> RefusedMessageError:
        return RefusedMessageError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({num_bytes} vs. {self._max_bytes})",
        )


def _rest(inflater: "zlib._Decompress", num_bytes: int) -> bytes:
    """Return up to `num_bytes` more bytes from input that `inflater` already has."""
    parts: list[bytes] = []
    while num_bytes > 0 and (part := inflater.decompress(inflater.unconsumed_tail, num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
