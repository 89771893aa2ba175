"""Which sequences of a request have not ended, and how they end when the request fails."""

from scheduler_svc.core.events import Finished
from scheduler_svc.core.request import FinishReason, Request, SeqKey


def live_outputs(request: Request) -> list[int]:
    """Return the output indices of the sequences of `request` that have not ended."""
    outputs = request.outputs
    return [i for i in range(request.n) if not outputs or not outputs[i].finished]


def num_live_seqs(request: Request) -> int:
    """Return how many sequences of `request` have not ended."""
    return len(live_outputs(request))


def live_seq_keys(request: Request) -> list[SeqKey]:
    """Return the keys of the sequences of `request` that have not ended."""
    return [SeqKey(request.first_seq_key + index) for index in live_outputs(request)]


def end_with_error(request: Request, error: str) -> tuple[Finished, ...]:
    """Return the ends of those sequences, for `error`."""
    return tuple(
        Finished(request.source, key, FinishReason.ERROR, error=error)
        for key in live_seq_keys(request)
    )
