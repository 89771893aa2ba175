"""The one error tree, and the one table from errors to gRPC and HTTP status.

Code of the services raises these; interceptors and HTTP middleware turn them into status with
`google.rpc` details. Anything else that escapes is INTERNAL: a bug.
"""

from typing import ClassVar

import grpc


class QuireError(Exception):
    """Base of all errors that a client may see. The message is for a person."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class InvalidArgumentError(QuireError):
    """The client's fault: names the field, the value and the limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, problem: str) -> None:
        """`problem` continues the field's name: "is 3.5; it must be in [0, 1]"."""
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class UnauthenticatedError(QuireError):
    """No credentials, or wrong ones."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class PermissionDeniedError(QuireError):
    """The credentials are right, and do not allow it."""

    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class NotFoundError(QuireError):
    """What the client names does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class AlreadyExistsError(QuireError):
    """What the client wants to make exists, such as a live request of the same id."""

    code = grpc.StatusCode.ALREADY_EXISTS
    http_status = 409


class AbortedError(QuireError):
    """Another call has taken over what this call was doing."""

    code = grpc.StatusCode.ABORTED
    http_status = 409


class TooBusyError(QuireError):
    """A bounded queue is full; `retry_after_s` says when to come back."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(QuireError):
    """Starting, draining, or cut off from a process it needs."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class DeadlineExceededError(QuireError):
    """The client's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class FailedPreconditionError(QuireError):
    """What the caller wants is not possible as things are; trying again does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 412


class StaleEpochError(FailedPreconditionError):
    """A newer scheduler has taken over; the caller must exit."""


class UnimplementedError(QuireError):
    """A known field or method that is not supported; refused by name."""

    code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400


class BrokenInvariantError(QuireError):
    """Scheduler and worker disagree about what the worker holds: INTERNAL."""
