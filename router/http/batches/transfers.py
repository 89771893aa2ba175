"""Receives and sends files through temporary files; memory holds one piece per transfer."""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

from aiohttp import BodyPartReader, ClientConnectionResetError, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from contract.errors import InvalidArgumentError
from router.http.errors import BodyTooLargeError, UnsupportedMediaTypeError
from router.http.strict_json import excerpt
from rpc.http_server import MALFORMED

MAX_FILE_BYTES: Final = 64 * 2**20
_MAX_BODY_BYTES: Final = MAX_FILE_BYTES + 2**16
"""Limit on a whole body: the file, other parts, boundaries and headers."""
_MAX_LINES: Final = 64
"""Limit on the lines of boundaries and headers in a body; the contents of parts do not count."""
_MAX_FIELD_BYTES: Final = 64
_READ_BYTES: Final = 2**16
_PIECE_BYTES: Final = 2**20
_UPLOAD_S: Final = 600.0
_PIECE_S: Final = 60.0
"""How long a client may take to read a piece of a file (`_PIECE_BYTES`). The piece's last bytes do
not count, because the router buffers them."""
_ENCODINGS: Final = ("Content-Encoding", "Content-Transfer-Encoding")
_UNENCODED: Final = ("identity", "binary", "8bit", "7bit")


@asynccontextmanager
async def temporary_file() -> AsyncIterator[BinaryIO]:
    """Yield an empty file, which is deleted at the end of the `async with` block."""
    file = cast("BinaryIO", await asyncio.to_thread(tempfile.TemporaryFile))
    try:
        yield file
    finally:
        await asyncio.to_thread(file.close)


@dataclass(frozen=True, slots=True)
class Upload:
    """A received file, without its contents, and the form's other fields."""

    name: str
    num_bytes: int
    digest: bytes
    """SHA-256 of the contents."""
    fields: Mapping[str, str]


async def receive(request: web.Request, to: BinaryIO, names: Collection[str]) -> Upload:
    """Write an uploaded file to `to`; `names` are the other fields that the form may have.

    Raises:
        BodyTooLargeError: The file or the body is too large.
        InvalidArgumentError: The body is malformed, takes too long, or has wrong fields.
        UnsupportedMediaTypeError: The body is not multipart/form-data, or a part is encoded.
    """
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaTypeError(
            f"Content-Type is {excerpt(request.content_type)}; it must be multipart/form-data"
        )
    if (declared := request.content_length) is not None:
        _check_size("the body", declared, _MAX_BODY_BYTES)
    try:
        async with asyncio.timeout(_UPLOAD_S):
            return await _receive(request, to, names)
    except TimeoutError:
        raise InvalidArgumentError("body", f"took more than {_UPLOAD_S:g} s to arrive") from None
    except (ValueError, RuntimeError, HttpProcessingError, web.RequestPayloadError) as error:
        MALFORMED.inc()
        raise InvalidArgumentError("body", f"is not valid: {excerpt(str(error))}") from error


async def _receive(request: web.Request, to: BinaryIO, names: Collection[str]) -> Upload:
    received: tuple[str, int, bytes] | None = None
    fields: dict[str, str] = {}
    seen = set()
    reader = MultipartReader(request.headers, cast("Any", _Bounded(request)))
    async for part in reader:
        if not isinstance(part, BodyPartReader):
            raise InvalidArgumentError("body", "has nested parts, which are not supported")
        for header in _ENCODINGS:
            if (coding := part.headers.get(header, "binary").lower()) not in _UNENCODED:
                raise UnsupportedMediaTypeError(
                    f"{header} of {excerpt(part.name)} is {excerpt(coding)}; it must be absent"
                )
        if part.name is None:
            raise InvalidArgumentError("body", "has a part without a name")
        if part.name in seen:
            raise InvalidArgumentError(part.name, "is set twice")
        seen.add(part.name)
        if part.name == "file":
            received = (part.filename or "", *await _write(part, to))
        elif part.name in names:
            fields[part.name] = await _text(part, part.name)
        else:
            raise InvalidArgumentError(excerpt(part.name), "is set; there is no such field")
    if received is None:
        raise InvalidArgumentError("file", "is missing")
    return Upload(*received, fields)


async def _text(part: BodyPartReader, name: str) -> str:
    text = b""
    while chunk := await part.read_chunk(_READ_BYTES):
        text += chunk
        _check_size(name, len(text), _MAX_FIELD_BYTES)
    return text.decode(errors="replace")


async def _write(part: BodyPartReader, to: BinaryIO) -> tuple[int, bytes]:
    """Write a part's contents; return their number of bytes and their SHA-256."""
    num_bytes, piece, digest = 0, bytearray(), hashlib.sha256()

    def put(data: bytearray) -> None:
        digest.update(data)
        to.write(data)

    while chunk := await part.read_chunk(_READ_BYTES):
        num_bytes += len(chunk)
        _check_size("file", num_bytes, MAX_FILE_BYTES)
        piece += chunk
        if len(piece) >= _PIECE_BYTES:
            await asyncio.to_thread(put, piece)
            piece = bytearray()
    await asyncio.to_thread(put, piece)
    return num_bytes, digest.digest()


def _check_size(field: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise BodyTooLargeError(f"{field} has more than {most} bytes, which is the limit")


class _Bounded:
    """A body whose bytes and lines are counted while `MultipartReader` reads it."""

    def __init__(self, request: web.Request) -> None:
        self._content = request.content
        self._num_lines = 0
        self.at_eof = self._content.at_eof
        self.unread_data = self._content.unread_data

    async def read(self, num_bytes: int) -> bytes:
        data = await self._content.read(num_bytes)
        _check_size("the body", self._content.total_bytes, _MAX_BODY_BYTES)
        return data

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        self._num_lines += 1
        if self._num_lines > _MAX_LINES:
            raise InvalidArgumentError(
                "body", f"has more than {_MAX_LINES} boundaries and headers, which is the limit"
            )
        return await self._content.readline(max_line_length=max_line_length)


async def send(request: web.Request, response: web.StreamResponse, file: BinaryIO) -> None:
    """Write a file, from its beginning, to a response that has begun.

    Raises:
        ClientConnectionResetError: The client is gone, or reads too slowly.
    """
    await asyncio.to_thread(file.seek, 0)
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        try:
            async with asyncio.timeout(_PIECE_S):
                await response.write(piece)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # closing it would wait for the client, too
            raise ClientConnectionResetError(
                f"the client took more than {_PIECE_S:g} s to read a piece"
            ) from None
