"""What the core raises: refusals of a request, and broken invariants."""


class RequestRefusedError(Exception):
    """A request that is not accepted; nothing changed."""


class QueueFullError(RequestRefusedError):
    """As many sequences wait as are allowed to; later there may be room."""


class RequestTooLongError(RequestRefusedError):
    """A request that could never finish, whatever else runs."""


class NoPrefixCacheError(RequestRefusedError):
    """A request that wants its prompt pinned in a prefix cache that there is not."""


class DeadlineError(RequestRefusedError):
    """A request whose deadline has passed, or cannot be met even if nothing else runs."""


class ResizeRefusedError(Exception):
    """A size that a pool cannot have as things are; nothing changed."""


class MigrationRefusedError(Exception):
    """A request that cannot be moved between cores as things are; nothing changed."""


class BrokenInvariantError(AssertionError):
    """The core or its caller has a bug; going on could corrupt an output."""
