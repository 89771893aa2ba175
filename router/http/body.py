"""Reads and parses the bodies of calls.

Large bodies are parsed in a thread, so that other calls do not wait. A body must pass these checks,
in this order: its size, the tenant's quota, its size after decompression, and its number of JSON
values (`strict_json`). The first check that fails ends the work on the body.
"""

import zlib
from dataclasses import dataclass, field
from typing import Final, TypeVar

from aiohttp import web
from pydantic import ValidationError

from contract.errors import InvalidArgumentError
from router.http.errors import (
    BodyTooLargeError,
    UnsupportedMediaTypeError,
    error_from_validation,
)
from router.http.strict_json import Schema, excerpt, parse_json
from router.request.cells import Cells
from router.text.fair_threads import TextThreads
from rpc.http_server import MALFORMED

S = TypeVar("S", bound=Schema)

MAX_PARSED_AT_ONCE_BYTES: Final = 16 * 1024
"""Larger bodies are parsed in a thread, since they may take longer than a millisecond."""
MAX_PENDING: Final = 1024
"""Limit on the bodies that are being parsed in the thread or that wait for it."""

_JSON: Final = "application/json"
_CODING_TO_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def _thread() -> TextThreads:
    return TextThreads("body", num_threads=1, max_pending=MAX_PENDING)


def check_kind(request: web.Request) -> None:
    """Raise UnsupportedMediaTypeError if the call has a body whose Content-Type is not JSON.

    This protects the router from web pages of other sites. Before a browser sends JSON for such a
    page, it asks the router for permission (CORS), and the router does not give it. A browser sends
    some other types without asking. So routes call this function even if they ignore the body.
    """
    if request.can_read_body:
        _check_content_type(request)


def _check_content_type(request: web.Request) -> None:
    if request.content_type != _JSON:
        raise UnsupportedMediaTypeError(
            f"Content-Type is {excerpt(request.content_type)}; it must be {_JSON}"
        )


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies for the routes of one router."""

    cells: Cells
    max_bytes: int
    """Limit on a body's size, before and after decompression (`--max-body-mb`)."""
    may_be_compressed: bool = False
    """Whether compressed bodies are accepted (`--accept-compressed`)."""
    _threads: TextThreads = field(default_factory=_thread)

    async def read(self, request: web.Request, schema: type[S], *, generates: bool = False) -> S:
        """Read and parse a call's body; may raise QuireError.

        If `generates` is true, the tenant's quota is checked before the body is parsed. The quota
        must have room for the fewest tokens that a body of this size can have.
        """
        _check_content_type(request)
        coding = self._coding(request)
        declared = request.content_length
        if declared is not None:
            self._check_size(declared, f"{declared}")
            if generates:
                self.cells.check_quota(declared)
        body = await self._read_bytes(request)
        if generates and declared is None:
            self.cells.check_quota(len(body))
        if coding is None and len(body) <= MAX_PARSED_AT_ONCE_BYTES:
            return _parse(body, schema)
        return await self._threads.run(lambda: _parse(self._decompressed(body, coding), schema))

    def _coding(self, request: web.Request) -> str | None:
        coding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if coding in ("identity", ""):
            return None
        if not self.may_be_compressed:
            raise UnsupportedMediaTypeError(
                f"Content-Encoding is {excerpt(coding)}; it must be absent, because this router"
                " does not decompress bodies (--accept-compressed)"
            )
        if coding not in _CODING_TO_WINDOW_BITS:
            raise UnsupportedMediaTypeError(
                f"Content-Encoding is {excerpt(coding)}; it must be gzip or deflate, or absent"
            )
        return coding

    async def _read_bytes(self, request: web.Request) -> bytes:
        body = bytearray()
        try:
            async for piece in request.content.iter_any():
                body += piece
                self._check_size(len(body))
        except web.RequestPayloadError as error:
            MALFORMED.inc()
            raise InvalidArgumentError("body", f"cannot be read: {error}") from error
        return bytes(body)

    def _decompressed(self, body: bytes, coding: str | None) -> bytes:
        if coding is None:
            return body
        stream = zlib.decompressobj(_CODING_TO_WINDOW_BITS[coding])
        try:
            text = stream.decompress(body, self.max_bytes + 1)
        except zlib.error as error:
            raise InvalidArgumentError("body", f"is not {coding}: {error}") from error
        self._check_size(len(text))
        if not stream.eof or stream.unused_data:
            raise InvalidArgumentError("body", f"is not one whole {coding} stream")
        return text

    def _check_size(self, num_bytes: int, shown: str = "more") -> None:
        if num_bytes > self.max_bytes:
            raise BodyTooLargeError(
                f"body has {shown} bytes; it must have at most {self.max_bytes} (--max-body-mb)"
            )


def _parse(body: bytes, schema: type[S]) -> S:
    value = parse_json(body)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise error_from_validation(error) from error
