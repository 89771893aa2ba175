"""Counts how many workers in a row were lost while they ran a request and added no token to it.

After several such losses, the request may be their cause.
"""

from scheduler_svc.core.interface.events import Finished
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.reports.progress import Progress
from scheduler_svc.domain import live_seq_keys


class CrashCounter:
    """The crash counts of the requests at one worker."""

    def __init__(self) -> None:
        self._key_to_count: dict[tuple[SourceId, SeqKey], int] = {}
        """Has only live sequences whose count is above 0."""

    def set(self, request: Request, num_crashes: int) -> None:
        """Set the count of a request that comes from another worker."""
        for key in live_seq_keys(request) if num_crashes else ():
            self._key_to_count[request.source, key] = num_crashes

    def take(self, request: Request) -> int:
        """Remove and return the count of a request that leaves this worker."""
        keys = live_seq_keys(request)
        return max(self._key_to_count.pop((request.source, key), 0) for key in keys)

    def take_after_loss(self, request: Request, progress: Progress) -> int:
        """Remove a request's count after this worker was lost; return the count with this loss."""
        num_crashes = self.take(request)
        match progress:
            case Progress.SOME:
                return 0
            case Progress.NONE:
                return num_crashes + 1
            case Progress.WAITED:
                return num_crashes

    def on_finished(self, finished: tuple[Finished, ...]) -> None:
        """Forget the counts of finished sequences."""
        for item in finished:
            self._key_to_count.pop((item.source, item.seq_key), None)

    def drop_source(self, source: SourceId) -> None:
        """Forget the sequences of `source`, a router's stream that has ended."""
        self._key_to_count = {k: n for k, n in self._key_to_count.items() if k[0] != source}
