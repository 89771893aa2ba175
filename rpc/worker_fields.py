"""Checks of request fields that only workers accept."""

from contract.errors import InvalidArgumentError


def refuse_epoch(epoch: int) -> None:
    """Raise InvalidArgumentError if a request has an epoch; for processes other than workers."""
    if epoch:
        raise InvalidArgumentError(
            "epoch", f"is {epoch}; only calls to workers have an epoch, so leave it unset"
        )
