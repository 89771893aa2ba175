"""Errors over HTTP: the JSON in the called API's shape, the status, and headers."""

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import structlog
from aiohttp import web
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from contract.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidArgumentError,
    ModelNotFoundError,
    NotFoundError,
    PermissionDeniedError,
    QuireError,
    TooBusyError,
    UnauthenticatedError,
    UnavailableError,
)
from contract.outputs import FinishReason, OutputFinished
from router.http.anthropic import errors as anthropic
from router.http.strict_json import excerpt, json_bytes

log = structlog.get_logger()

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID_PATTERN = "[!-~]{1,128}"

_STATUS_TO_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_STATUS_TO_CODE = {
    401: "invalid_api_key",
    404: "not_found",
    409: "already_exists",
    413: "body_too_large",
    429: "rate_limit_exceeded",
}
"""Maps a status to OpenAI's code, which strict clients parse; other statuses have no code."""


class MissingModelError(NotFoundError):
    """The model that a request names is not served, or is no longer served."""


_KIND_TO_CODE: Mapping[type[QuireError], str] = {
    ContextLengthError: "context_length_exceeded",  # a shorter conversation may help
    ModelNotFoundError: "model_not_found",
    MissingModelError: "model_not_found",
}
"""Maps some classes of errors to a more precise code than their status has."""

_FAILURES: tuple[type[QuireError], ...] = (
    DeadlineExceededError,
    PermissionDeniedError,
    TooBusyError,
    UnauthenticatedError,
    UnavailableError,
)
_CODE_TO_FAILURE = {failure.code.value[0]: failure for failure in _FAILURES}


class BodyTooLargeError(QuireError):
    """The body is too large."""

    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class UnsupportedMediaTypeError(QuireError):
    """The body's Content-Type or Content-Encoding is not supported."""

    http_status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE


class MethodNotAllowedError(QuireError):
    """The path exists, but does not support the method."""

    http_status = HTTPStatus.METHOD_NOT_ALLOWED


def error_json(error: QuireError) -> dict[str, object]:
    """Return the JSON of an error, for a response's body or an event."""
    status = error.http_status
    is_clients_fault = status < HTTPStatus.INTERNAL_SERVER_ERROR
    default_type = "invalid_request_error" if is_clients_fault else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": _STATUS_TO_TYPE.get(status, default_type),
            "param": error.field if isinstance(error, InvalidArgumentError) else None,
            "code": _KIND_TO_CODE.get(type(error), _STATUS_TO_CODE.get(status)),
        }
    }


def error_response(error: QuireError, *, path: str = "", request_id: str = "") -> web.Response:
    """Return the response for an error, in the shape of the API to which `path` belongs."""
    is_anthropic = path == anthropic.ROOT or path.startswith(f"{anthropic.ROOT}/")
    body = anthropic.error_json(error, request_id) if is_anthropic else error_json(error)
    response = web.Response(
        status=anthropic.status_of(error) if is_anthropic else error.http_status,
        body=json_bytes(body),
        content_type="application/json",
    )
    if is_anthropic:
        response.headers[anthropic.REQUEST_ID_HEADER] = request_id
    if isinstance(error, TooBusyError):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return response


def failure_response(error: Exception, *, path: str, request_id: str = "") -> web.Response:
    """Return the response for a handler's exception; log a bug, and hide its details."""
    if not isinstance(error, QuireError):
        log.error("request_failed", exc_info=error, path=path, request_id=request_id)
        error = QuireError("internal error")
    return error_response(error, path=path, request_id=request_id)


def error_from_validation(error: ValidationError) -> InvalidArgumentError:
    """Return an error that names a body's first invalid field, its value, and what is valid."""
    detail = error.errors(include_url=False, include_context=False)[0]
    field = _field_path(detail["loc"]) or "body"
    return InvalidArgumentError(field, _problem(detail))


def error_with_json_names(
    field_to_json: Mapping[str, str], error: InvalidArgumentError
) -> InvalidArgumentError:
    """Return the error, with the name that the field has in the client's JSON.

    Checks use names such as `sampling.max_tokens` and `prompt`, which a chat's body does not have.
    """
    problem = str(error).removeprefix(f"{error.field} ")
    name, bracket, index = error.field.removeprefix("sampling.").partition("[")
    return type(error)(field_to_json.get(name, name) + bracket + index, problem)


def _problem(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "union_tag_invalid":
        known = detail["msg"].rpartition("expected tags: ")[2].replace("'", '"')
        return f"has the type {excerpt(detail['input']['type'])}; it must be one of {known}"
    value = excerpt(detail["input"])
    if detail["type"] == "extra_forbidden":
        return f"is {value}; there is no such field"
    if detail["type"] in ("model_type", "dict_type"):
        return f"is {value}; it must be an object"
    expected = detail["msg"].replace("Input should be", "it must be")
    return f"is {value}; {expected[:1].lower()}{expected[1:]}"


def _field_path(location: Sequence[str | int]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def error_from_finished(finished: OutputFinished) -> QuireError | None:
    """Return the error of an output that failed; None if it succeeded."""
    match finished.finish_reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.DEADLINE:
            return DeadlineExceededError("the request's deadline passed before it was complete")
        case FinishReason.CANCELLED:
            return UnavailableError("the service cancelled the request before it was complete")
        case FinishReason.ERROR:
            if finished.error is None:
                return QuireError("the request failed")
            if finished.error.code == NotFoundError.code.value[0]:  # only a model can be missing
                return MissingModelError(finished.error.message)
            failure = _CODE_TO_FAILURE.get(finished.error.code, QuireError)
            return failure(finished.error.message)
