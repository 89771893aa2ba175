"""What a request's refusal by the core is to the client."""

from contract.errors import DeadlineExceededError, InvalidArgumentError, QuireError, TooBusyError
from scheduler_svc.core.errors import (
    DeadlineError,
    NoPrefixCacheError,
    QueueFullError,
    RequestRefusedError,
)


def refusal_from_core(error: RequestRefusedError) -> QuireError:
    """Return the error with the status that says whose fault it is."""
    match error:
        case QueueFullError():
            return TooBusyError(str(error))
        case DeadlineError():
            return DeadlineExceededError(str(error))
        case NoPrefixCacheError():
            return InvalidArgumentError("cache_pin_s", str(error).removeprefix("cache_pin_s "))
        case _:
            return InvalidArgumentError("request", f"cannot be served: {error}")
