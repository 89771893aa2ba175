"""Errors of the core: refused requests, and broken invariants."""


class RequestRefusedError(Exception):
    """The core did not accept a request; nothing changed."""


class QueueFullError(RequestRefusedError):
    """The queue is full; a later retry may succeed."""


class TooManySequencesError(RequestRefusedError):
    """A request has more sequences than may ever wait in the queue."""


class RequestTooLongError(RequestRefusedError):
    """A request could never finish, even alone."""


class DeadlineError(RequestRefusedError):
    """A request's deadline has passed, or could not be met even if nothing else ran."""


class ResizeRefusedError(Exception):
    """The pool cannot have this size now; nothing changed."""


class MigrationRefusedError(Exception):
    """A request cannot move between cores now; nothing changed."""


class BrokenInvariantError(AssertionError):
    """The core or its caller has a bug; continuing could corrupt an output."""
