"""The messages that a client sends on one stream."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Final

import grpc

from rpc.http2.headers import ENCODING_TO_WBITS

WINDOW_BYTES: Final = 65_535
"""What a client may send on a stream before the handler reads; HTTP/2's default."""

_PREFIX_BYTES: Final = 5
_QUICK_BYTES: Final = 256 * 1024
"""What is inflated on the event loop; a longer message continues in a thread."""


class RefusedMessageError(Exception):
    """A client's message ends its call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Inbox:
    """Collects bytes, and takes messages out of them.

    The client may send `WINDOW_BYTES` that no handler reads. While a handler waits for a message,
    the client may send all of it, except that few messages larger than that may come at once.
    """

    def __init__(
        self,
        max_bytes: int,
        encoding: str,
        allow: Callable[[int], None],
        room: asyncio.Semaphore,
    ) -> None:
        """`allow` lets the client send more bytes; it has `WINDOW_BYTES` at first.

        A message larger than that has a place in `room` while it comes.
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
        """Bytes that the reader waits for."""
        self._reader: asyncio.Future[None] | None = None

    def feed(self, data: bytes, num_window_bytes: int) -> None:
        """Take bytes from the client; padding is only in `num_window_bytes`."""
        self._data += data
        self._num_allowed -= num_window_bytes
        self._wake()

    def end(self) -> None:
        """Note that the client sends no more."""
        self._has_ended = True
        self._wake()

    async def read(self) -> bytes | None:
        """Return the next message; None: there is no other.

        Raises:
            RefusedMessageError: The message is too large, or is none.
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
                    await self._wait_for(size)
            else:
                await self._wait_for(size)
        is_compressed = self._data[0]
        message = bytes(memoryview(self._data)[_PREFIX_BYTES:size])
        del self._data[:size]
        self._allow_up_to(WINDOW_BYTES - len(self._data))
        return await self._inflated(message) if is_compressed else message

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
            if not reader.done():  # cancelled
                reader.set_result(None)

    def _size(self) -> int:
        """Return the size of the next message with its prefix, as far as it is known."""
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
        """Let the client send so many bytes.

        Small differences wait, as each costs a frame, unless it may not send `at_least`.
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
    """Return the next bytes of `inflater`, which has had its input."""
    parts: list[bytes] = []
    while num_bytes > 0 and (part := inflater.decompress(inflater.unconsumed_tail, num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
