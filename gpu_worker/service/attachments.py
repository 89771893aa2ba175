"""Tracks which scheduler is attached: the worker obeys only the scheduler with the newest epoch."""

from dataclasses import dataclass

from contract.errors import InvalidArgumentError, QuireError, StaleEpochError, UnavailableError
from contract.liveness.epoch import check_epoch
from contract.state import Holdings


@dataclass(slots=True)
class Attachment:
    """A scheduler's claim on the worker; it ends when this or another scheduler attaches."""

    number: int
    epoch: int
    has_stream: bool = False
    """Whether a batch has come on an `Execute` stream of this attachment; batches on a second
    stream are refused."""
    num_open_streams: int | None = None
    """Number of open `Execute` streams of this attachment; None: no stream was opened yet."""
    last_step_id: int = 0
    """The step of the last batch received."""
    done_step_id: int = 0
    """The step of the last result sent."""
    holdings: Holdings | None = None
    """The rows and blocks that the worker held when the attachment began; kept until the
    attachment's first step."""


class Attachments:
    """Keeps the newest attachment, and refuses calls for older attachments."""

    def __init__(self) -> None:
        self.newest: Attachment | None = None
        self.num_heartbeats = 0
        """Number of `Attach` calls, batches and heartbeats that the worker has accepted."""
        self.is_cut_off = False
        """Whether the newest scheduler's last heartbeat said that none of its routers sends
        heartbeats to the scheduler."""

    def begin(self, epoch: int) -> Attachment:
        """Begin a scheduler's attachment. A scheduler may attach again.

        Raises:
            InvalidArgumentError: The epoch, which is a time, is 0 or too far in the future.
            StaleEpochError: A scheduler with a newer epoch has attached.
        """
        before = self.newest
        check_epoch(epoch)
        if before is not None and epoch < before.epoch:
            raise _stale(epoch, before.epoch)
        self.newest = Attachment(0 if before is None else before.number + 1, epoch)
        self.num_heartbeats += 1
        self.is_cut_off = False
        return self.newest

    def on_heartbeat(self, epoch: int, *, is_cut_off: bool) -> None:
        """Count a heartbeat and store `is_cut_off`, if `epoch` is the newest epoch."""
        if self.newest is not None and epoch == self.newest.epoch:
            self.num_heartbeats += 1
            self.is_cut_off = is_cut_off

    def of(self, epoch: int) -> Attachment:
        """Return the newest attachment; its scheduler must have the epoch `epoch`.

        Raises:
            InvalidArgumentError: No scheduler with this epoch has attached.
            StaleEpochError: A scheduler with a newer epoch has attached.
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
        """Check that `attachment` is still the newest.

        A call that lasts long checks this again before each part of its work.

        Raises:
            StaleEpochError: A scheduler with a newer epoch has attached.
            UnavailableError: A scheduler with the same epoch has attached again.
        """
        if attachment is not self.newest:
            raise self.superseded(attachment)

    def superseded(self, attachment: Attachment | None) -> QuireError:
        """Return the error for a caller whose `attachment` was replaced by a new attachment.

        `attachment` is None if the caller is an `Execute` stream that has received no batch yet.
        """
        assert self.newest is not None, "a scheduler has attached"
        newest = self.newest.epoch
        if attachment is not None and attachment.epoch < newest:
            return _stale(attachment.epoch, newest)
        return UnavailableError(f"epoch {newest} has attached since the stream was opened")


def _stale(epoch: int, newest: int) -> QuireError:
    return StaleEpochError(f"epoch is {epoch}; epoch {newest} has attached since")
