"""Parses and encodes gRPC's HTTP/2 headers: metadata, timeout, status."""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import quote

import grpc

Headers: TypeAlias = list[tuple[bytes, bytes]]
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_HIDDEN: Final = frozenset(
    (b"te", b"content-type", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-timeout", b"host")
)
"""Headers that are not metadata, besides HTTP/2's pseudo-headers such as `:path`."""
_KEY: Final = re.compile(r"[0-9a-z_.-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e]*")
_LINE_END: Final = re.compile(r"[\0\r\n]")
_SAFE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Characters that are not percent-encoded in a status message."""
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST_DETAILS: Final = 200
"""Maximum number of characters in a refusal's text, which quotes what the client has sent."""
_FIELD_BYTES: Final = 32
"""HTTP/2 counts this many bytes for each header, in addition to the bytes of name and value."""
_IDENTITY: Final = "identity"
ENCODING_TO_WBITS: Final = {_IDENTITY: 0, "deflate": 15, "gzip": 31}
"""zlib's `wbits` for each `grpc-encoding`; 0: messages are not compressed."""


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The parsed request headers of a call."""

    method: str
    """ "/package.Service/Method"."""
    metadata: Metadata
    encoding: str
    timeout_s: float | None


class RefusedRequestError(Exception):
    """The request headers are too large or invalid. `answer` has the headers of the response."""

    def __init__(self, answer: Headers) -> None:
        super().__init__()
        self.answer = answer


def first_headers(*, accepts_compressed: bool) -> Headers:
    """Return the headers before the first message of a response."""
    encodings = ENCODING_TO_WBITS if accepts_compressed else (_IDENTITY,)
    return [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-accept-encoding", ", ".join(encodings).encode()),
    ]


def read_request(headers: Headers, max_bytes: int, *, accepts_compressed: bool) -> RequestHeaders:
    """Parse the request headers of a call.

    Raises:
        RefusedRequestError: The call is refused; answer it with the headers in `answer`.
    """

    def refused(code: grpc.StatusCode, details: str) -> RefusedRequestError:
        first = first_headers(accepts_compressed=accepts_compressed)
        return RefusedRequestError([*first, *encode_status(code, details[:_MOST_DETAILS])])

    name_to_value = dict(headers)
    pseudo = [name for name, _ in headers if name.startswith(b":")]
    if len(pseudo) > len(_PSEUDO.intersection(pseudo)):  # proxies may read duplicates differently
        raise RefusedRequestError([(b":status", b"400")])
    if name_to_value.get(b":method") != b"POST" or b":path" not in name_to_value:
        raise RefusedRequestError([(b":status", b"405"), (b"allow", b"POST")])
    if not name_to_value.get(b"content-type", b"").startswith(b"application/grpc"):
        raise RefusedRequestError([(b":status", b"415")])
    num_bytes = sum(len(key) + len(value) + _FIELD_BYTES for key, value in headers)
    if num_bytes > max_bytes:
        raise refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"received metadata size exceeds limit ({num_bytes} vs. {max_bytes})",
        )
    encoding = name_to_value.get(b"grpc-encoding", _IDENTITY.encode()).decode("latin-1")
    if encoding != _IDENTITY and not accepts_compressed:
        raise refused(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding is {encoding[: _MOST_DETAILS // 2]}; it must be {_IDENTITY} or absent,"
            " because this router does not decompress messages (--accept-compressed)",
        )
    if encoding not in ENCODING_TO_WBITS:
        raise refused(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding is {encoding}; it must be one of {', '.join(ENCODING_TO_WBITS)}",
        )
    timeout = name_to_value.get(b"grpc-timeout")
    try:
        return RequestHeaders(
            name_to_value[b":path"].decode("latin-1"),
            tuple(_decoded(headers)),
            encoding,
            None if timeout is None else _seconds(timeout),
        )
    except ValueError as error:
        raise refused(grpc.StatusCode.INTERNAL, str(error)) from None


def _seconds(timeout: bytes) -> float:
    found = _TIMEOUT.fullmatch(timeout)
    if found is None:
        raise ValueError(f"grpc-timeout is {timeout!r}; it must be at most 8 digits and a unit")
    return int(found[1]) * _UNIT_S[found[2]]


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str | bytes]]:
    for key, value in headers:
        if key.startswith(b":") or key in _HIDDEN:
            continue
        name, text = key.decode("latin-1"), value.decode("latin-1").strip(" \t")
        if not _KEY.fullmatch(name) or _LINE_END.search(text):
            raise ValueError(f"metadata {name!r} has characters that are not allowed")
        if not name.endswith("-bin"):
            yield name, text
            continue
        for part in value.split(b","):  # peers may join the values of one key
            bare = part.strip().rstrip(b"=")
            try:
                yield name, base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
            except binascii.Error:
                raise ValueError(f"metadata {name} is not Base64") from None


def encode_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Headers:
    """Return metadata as headers.

    Raises:
        ValueError: A key or value is not allowed.
    """
    return [_encoded(key, value) for key, value in metadata]


def _encoded(key: str, value: str | bytes) -> tuple[bytes, bytes]:
    if not _KEY.fullmatch(key) or (key.startswith("grpc-") and key not in _OWN_KEYS):
        raise ValueError(f"metadata key {key!r} must not be sent")
    if key.endswith("-bin"):
        data = value.encode() if isinstance(value, str) else value
        return key.encode(), base64.b64encode(data).rstrip(b"=")
    text = value if isinstance(value, str) else value.decode("latin-1")
    if not _VALUE.fullmatch(text):
        raise ValueError(f"metadata {key} has characters that are not printable ASCII")
    return key.encode(), text.strip().encode()


_OWN_KEYS: Final = frozenset(("grpc-status-details-bin", "grpc-retry-pushback-ms"))


def encode_status(code: grpc.StatusCode, details: str) -> Headers:
    """Return the headers for a status."""
    headers = [(b"grpc-status", str(code.value[0]).encode())]
    if details:
        text = quote(details, safe=_SAFE, errors="replace").strip()
        headers.append((b"grpc-message", text.encode()))
    return headers
