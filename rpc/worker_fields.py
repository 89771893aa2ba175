"""Fields of requests that a worker alone honours, where others take the same message."""

from contract.errors import InvalidArgumentError


def refuse_epoch(epoch: int) -> None:
    """Check that a request names no scheduler's reign, which only a worker compares.

    Raises:
        InvalidArgumentError: It does.
    """
    if epoch:
        raise InvalidArgumentError(
            "epoch", f"is {epoch}; only workers are asked in a scheduler's reign: leave it unset"
        )
