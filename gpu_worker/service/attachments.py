"""Whose the worker is: one scheduler's at a time, that of the newest epoch."""

from dataclasses import dataclass

from contract.errors import InvalidArgumentError, QuireError, StaleEpochError, UnavailableError
from contract.state import Holdings


@dataclass(slots=True)
class Attachment:
    """One scheduler's claim, from its `Attach` to the next one."""

    number: int
    epoch: int
    has_stream: bool = False
    """Whether an `Execute` stream has sent a batch under it; there may be one such."""
    last_step_id: int = 0
    """Of the batches taken."""
    done_step_id: int = 0
    """Of the results sent."""
    holdings: Holdings | None = None
    """What there was when it began; None once it has sent a step, which changes it."""


class Attachments:
    """The newest attachment, and what the others are told: a scheduler may attach again."""

    def __init__(self) -> None:
        self.newest: Attachment | None = None

    def begin(self, epoch: int) -> Attachment:
        """Put the worker under a scheduler.

        Raises:
            InvalidArgumentError: The epoch is none.
            StaleEpochError: A newer one has attached.
        """
        before = self.newest
        if epoch == 0:
            raise InvalidArgumentError("epoch", "is 0; it must be at least 1")
        if before is not None and epoch < before.epoch:
            raise _stale(epoch, before.epoch)
        self.newest = Attachment(0 if before is None else before.number + 1, epoch)
        return self.newest

    def of(self, epoch: int) -> Attachment:
        """Return the newest attachment, which must be of `epoch`.

        Raises:
            InvalidArgumentError: That epoch has not attached.
            StaleEpochError: A newer one has.
        """
        newest = self.newest
        if newest is None:
            raise InvalidArgumentError("epoch", f"is {epoch}, which has not attached")
        if epoch < newest.epoch:
            raise _stale(epoch, newest.epoch)
        if epoch > newest.epoch:
            raise InvalidArgumentError(
                "epoch", f"is {epoch}, which has not attached; {newest.epoch} has"
            )
        return newest

    def require_newest(self, attachment: Attachment) -> None:
        """Refuse to go on for an attachment whose blocks are another's by now.

        Raises:
            StaleEpochError: They are a newer epoch's.
            UnavailableError: They are the same epoch's, which has attached again.
        """
        if attachment is not self.newest:
            raise self.superseded(attachment)

    def superseded(self, attachment: Attachment | None) -> QuireError:
        """What ends a stream when somebody attaches; None: it has not said whose it is."""
        assert self.newest is not None, "somebody has attached"
        newest = self.newest.epoch
        if attachment is not None and attachment.epoch < newest:
            return _stale(attachment.epoch, newest)
        return UnavailableError(f"epoch {newest} has attached since the stream was opened")


def _stale(epoch: int, newest: int) -> QuireError:
    return StaleEpochError(f"epoch is {epoch}; epoch {newest} has attached since")
