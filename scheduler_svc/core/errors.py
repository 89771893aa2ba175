"""What the core raises: refusals of a request, and broken invariants."""


class RequestRefusedError(Exception):
    """A request is not accepted; nothing changed."""


class QueueFullError(RequestRefusedError):
    """The queue is full; later there may be room."""


class TooManySequencesError(RequestRefusedError):
    """A request has more sequences than the queue ever takes."""


class RequestTooLongError(RequestRefusedError):
    """A request could never finish, even alone."""


class NoPrefixCacheError(RequestRefusedError):
    """A request that wants its prompt pinned, where prefix caching is off."""


class DeadlineError(RequestRefusedError):
    """The deadline of a request has passed, or could not be met even if nothing else ran."""


class ResizeRefusedError(Exception):
    """A pool size that is not possible now; nothing changed."""


class MigrationRefusedError(Exception):
    """A request cannot be moved between cores now; nothing changed."""


class BrokenInvariantError(AssertionError):
    """The core or its caller has a bug; going on could corrupt an output."""
