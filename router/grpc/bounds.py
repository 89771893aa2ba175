"""Checks clients' gRPC requests before parsing: size, the tenant's quota, number of fields."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from contract.errors import InvalidArgumentError, QuireError
from router.request.cells import Cells
from rpc.status import invalid_message, rewrapped

MAX_FIELDS: Final = 16_384
"""Limit on the fields of one message and its submessages, together. A packed list is one field."""
MAX_SMALL_BYTES: Final = 64 * 1024
"""Limit on a message's size, for methods whose requests have no prompt, text or tokens."""
_MAX_VARINT_BYTES: Final = 10

_GENERATE_MANY: Final = "/quire.v1.InferenceService/GenerateMany"
_MOST_ENVELOPE_FIELDS: Final = 8
"""`_begins_nothing` reads at most this many fields of a message. A valid `GenerateMany` message has
at most 6."""
_RESUME_AND_LEAVE: Final = (3 << 3 | 2, 4 << 3 | 2)
"""The tags of the fields `resume` and `leave` of `GenerateManyRequest`."""
_GENERATING: Final = frozenset(
    (
        "/quire.v1.InferenceService/Generate",
        _GENERATE_MANY,
        "/quire.v1.InferenceService/GenerateOnce",
        "/quire.v1.InferenceService/Embed",
        "/openengine.v1.Inference/Generate",
        "/vllm.grpc.engine.VllmEngine/Generate",
        "/vllm.grpc.engine.VllmEngine/Embed",
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/ModelStreamInfer",
    )
)
_LARGE: Final = _GENERATING | {
    "/quire.v1.InferenceService/Tokenize",
    "/quire.v1.InferenceService/Detokenize",
}


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """What a `GenerateMany` call receives in place of a request that was refused.

    The other requests of the call continue.
    """

    number: int
    error: QuireError


class RequestBounds(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Checks requests before they are parsed: their size and fields, and the caller's quota.

    `KeyInterceptor` must run first, because it finds out who the caller is.
    """

    def __init__(self, cells: Cells, max_bytes: int) -> None:
        """`max_bytes` limits messages that may have a prompt, text or tokens (`--max-body-mb`)."""
        self._cells = cells
        self._max_bytes = max_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return a handler that checks each request of the call before parsing the request."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method
        return rewrapped(
            handler,
            lambda behavior: behavior,
            wrap_deserializer=lambda parse: self._bounded(method, parse),
        )

    def _bounded(self, method: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def check(data: bytes) -> None:
            self._check_size(method, len(data))
            if method in _GENERATING and not (method == _GENERATE_MANY and _begins_nothing(data)):
                self._cells.check_quota(len(data))
            check_num_fields(data, _request_type(method))

        def bounded(data: bytes) -> Any:
            try:
                check(data)
                return parse(data)
            except (QuireError, DecodeError) as error:
                if method == _GENERATE_MANY and (number := _first_number(data)) is not None:
                    if isinstance(error, DecodeError):
                        error = invalid_message(error)
                    return RefusedRequest(number, error.with_traceback(None))
                raise

        return bounded

    def _check_size(self, method: str, num_bytes: int) -> None:
        if method in _LARGE:
            most, setting = self._max_bytes, " (--max-body-mb)"
        else:
            most, setting = min(MAX_SMALL_BYTES, self._max_bytes), ""
        if num_bytes > most:
            raise InvalidArgumentError(
                "request", f"has {num_bytes} bytes; it must have at most {most}{setting}"
            )


def _first_number(data: bytes) -> int | None:
    """Return the value of field 1 (`number`, a varint) if the message begins with it."""
    if data[:1] != b"\x08":
        return None
    try:
        return _varint(data, 1)[0]
    except IndexError:
        return None


def _begins_nothing(data: bytes) -> bool:
    """Whether a `GenerateMany` message needs no quota, because it resumes or ends a request."""
    at = 0
    try:
        for _ in range(_MOST_ENVELOPE_FIELDS):
            tag, at = _varint(data, at)
            if tag in _RESUME_AND_LEAVE:
                return True
            match tag & 7:
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(data, at)
                    at += size
                case 5:
                    at += 4
    except IndexError:
        pass
    return False


def _request_type(method: str) -> Descriptor:
    name = method.removeprefix("/").replace("/", ".")
    found = descriptor_pool.Default().FindMethodByName(name)
    message: Descriptor = found.input_type
    return message


def check_num_fields(data: bytes, kind: Descriptor, most: int = MAX_FIELDS) -> None:
    """Check that a serialized message, including its submessages, has at most `most` fields.

    Malformed bytes pass this check; the parser refuses them.

    Raises:
        InvalidArgumentError: The message has more fields.
    """
    if len(data) <= 2 * most:  # a field has at least two bytes
        return
    num_fields = 0
    at, end, message = 0, len(data), kind
    outer: list[tuple[int, int, Descriptor]] = []
    """For each message around the current one: the index of its next field, the index of its end,
    and its type."""
    while True:
        if at >= end:
            if not outer:
                return
            at, end, message = outer.pop()
            continue
        num_fields += 1
        if num_fields > most:
            raise InvalidArgumentError(
                "request",
                f"has more than {most} fields, including those of its submessages, which is the"
                " limit (lists of numbers must be packed)",
            )
        try:
            tag, at = _varint(data, at)
            match tag & 7:  # the wire type; the start and end of a group have no value
                case 0:  # varint
                    _, at = _varint(data, at)
                case 1:  # 64 bits
                    at += 8
                case 2:  # a length and its bytes
                    size, at = _varint(data, at)
                    field = message.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        outer.append((at + size, end, message))
                        end, message = min(at + size, end), field.message_type
                    else:
                        at += size
                case 5:  # 32 bits
                    at += 4
        except IndexError:
            at = end  # the parser will refuse the message


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at index `at`, and the index behind the varint.

    Raises IndexError if the varint is malformed.
    """
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte <= 0x7F:  # noqa: PLR2004 - the highest bit means that another byte follows
            return value, at + i + 1
    raise IndexError
