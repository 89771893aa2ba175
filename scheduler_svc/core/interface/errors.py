"""Errors of the core: refused calls, and broken invariants."""


class RequestRefusedError(Exception):
    """The core did not accept a request; nothing changed."""


class QueueFullError(RequestRefusedError):
    """The queue is full; a later retry may succeed."""


class TooManySequencesError(RequestRefusedError):
    """A request has more sequences than the queue can hold even when it is empty."""


class RequestTooLongError(RequestRefusedError):
    """A request is too long to finish, even if it ran alone."""


class DeadlineError(RequestRefusedError):
    """A request's deadline has passed, or could not be met even if nothing else ran."""


class ResizeRefusedError(Exception):
    """The device pool cannot get the requested size now; nothing changed."""


class MigrationRefusedError(Exception):
    """A request cannot move between cores now; nothing changed."""


class BrokenInvariantError(AssertionError):
    """The core or its caller has a bug; continuing could corrupt an output."""
