"""How many workers in a row were lost with a request that gained nothing at them."""

from contract.step import Plan
from scheduler_svc.core.events import Finished
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.workers.progress import Progress, SequencesAtWorker
from scheduler_svc.workers.request_ends import live_seq_keys


class Losses:
    """Those of the requests at one worker. It forgets what ends there."""

    def __init__(self) -> None:
        self._at_worker = SequencesAtWorker()
        self._key_to_num: dict[tuple[SourceId, SeqKey], int] = {}
        """Only of live sequences that were lost before."""

    def sent(self, plan: Plan) -> None:
        """Follow a plan that was sent."""
        self._at_worker.sent(plan)

    def note(self, request: Request, num_losses: int) -> None:
        """Note how many there were before a live request came here."""
        for key in live_seq_keys(request) if num_losses else ():
            self._key_to_num[request.source, key] = num_losses

    def take(self, request: Request) -> int:
        """Return what was noted of a request, and forget it."""
        keys = live_seq_keys(request)
        return max(self._key_to_num.pop((request.source, key), 0) for key in keys)

    def take_after_loss(self, request: Request) -> int:
        """Return how many there are now that this worker is lost, and forget it."""
        num_losses = self.take(request)
        match self._at_worker.find(request):
            case Progress.SOME:
                return 0
            case Progress.NONE:
                return num_losses + 1
            case Progress.WAITED:
                return num_losses

    def finished(self, finished: tuple[Finished, ...]) -> None:
        """Forget sequences that have ended."""
        for item in finished:
            self._key_to_num.pop((item.source, item.seq_key), None)

    def drop_source(self, source: SourceId) -> None:
        """Forget everything of `source`."""
        self._key_to_num = {k: num for k, num in self._key_to_num.items() if k[0] != source}
