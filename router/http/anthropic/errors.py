"""Errors in Anthropic's shape: JSON and HTTP status."""

from typing import Final

from contract.errors import ContextLengthError, QuireError, QuotaError, TooBusyError

ROOT: Final = "/v1/messages"
"""Errors at this path, and at paths below it, have Anthropic's shape."""

REQUEST_ID_HEADER: Final = "request-id"

OVERLOADED: Final = 529
"""Anthropic's status for an overloaded service; 429 is for a client that exceeds its quota."""

_TOO_LONG: Final = "prompt is too long"
"""Clients shorten the conversation if an error has these words."""

_STATUS_TO_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_LOWEST_SERVER_ERROR: Final = 500


def status_of(error: QuireError) -> int:
    if isinstance(error, TooBusyError) and not isinstance(error, QuotaError):
        return OVERLOADED
    return error.http_status


def error_json(error: QuireError, request_id: str) -> dict[str, object]:
    """Return the JSON of an error, for a response's body or an event."""
    status = status_of(error)
    default = "invalid_request_error" if status < _LOWEST_SERVER_ERROR else "api_error"
    message = str(error)
    if isinstance(error, ContextLengthError):
        message = f"{_TOO_LONG}: {message}"
    return {
        "type": "error",
        "error": {"type": _STATUS_TO_TYPE.get(status, default), "message": message},
        "request_id": request_id,
    }
