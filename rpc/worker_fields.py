"""Request fields that only workers honour, in messages that other processes take, too."""

from contract.errors import InvalidArgumentError


def refuse_epoch(epoch: int) -> None:
    """Raise InvalidArgumentError if a request names an epoch, which only workers compare."""
    if epoch:
        raise InvalidArgumentError(
            "epoch", f"is {epoch}; it is for calls of workers: leave it unset"
        )
