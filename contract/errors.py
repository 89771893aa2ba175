"""Every error that a client may see, each with its gRPC and HTTP status.

The services raise these errors. Interceptors and HTTP middleware turn each error into its status,
with `google.rpc` details. An exception of another class is a bug and becomes INTERNAL.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

import grpc

_MAX_SHOWN: Final = 128
"""An error message repeats at most this many characters of a client's text."""


class QuireError(Exception):
    """Base of all errors that a client may see. The message is for people."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class InvalidArgumentError(QuireError):
    """The client sent a wrong value. The message names the field, the value and the limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, problem: str) -> None:
        """`problem` follows the field's name in the message: "is 3.5; it must be in [0, 1]"."""
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class ContextLengthError(InvalidArgumentError):
    """The prompt, or the prompt with `max_tokens` more tokens, does not fit the model's context."""


class UnauthenticatedError(QuireError):
    """The call has no credentials, or wrong ones."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class PermissionDeniedError(QuireError):
    """The credentials are valid but do not allow the call."""

    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class NotFoundError(QuireError):
    """The client named something that does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class ModelNotFoundError(NotFoundError):
    """The client named a model that is not served."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        names = ", ".join(map(repr, served))
        verb = "is" if len(served) == 1 else "are"
        super().__init__(f"model {name[:_MAX_SHOWN]!r} is not served; {names} {verb}")


class AlreadyExistsError(QuireError):
    """The client wants to create something under an id or a key that is already in use."""

    code = grpc.StatusCode.ALREADY_EXISTS
    http_status = 409


class AbortedError(QuireError):
    """Another call has resumed or aborted the request of this call."""

    code = grpc.StatusCode.ABORTED
    http_status = 409


class TooBusyError(QuireError):
    """A bounded queue is full; the client should retry after `retry_after_s`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaError(TooBusyError):
    """The caller's quota is used up; other callers may still be served."""


class UnavailableError(QuireError):
    """The process is starting, draining, or cut off from a process that it needs."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class DeadlineExceededError(QuireError):
    """The client's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class FailedPreconditionError(QuireError):
    """The state of the service does not allow the call; a retry does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 412


class StaleEpochError(FailedPreconditionError):
    """A newer scheduler has taken over from the calling scheduler, which must exit."""


class UnimplementedError(QuireError):
    """The call is valid, but asks for something that this model or service cannot do."""

    code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400


class InconsistentPlanError(QuireError):
    """A plan contradicts the state of the worker, because of a bug. The status is INTERNAL."""
