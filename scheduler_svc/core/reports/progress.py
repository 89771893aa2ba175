"""Tells how far a request got at a lost worker, to find requests that crash workers."""

from enum import Enum
from typing import TYPE_CHECKING

from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.sequence import RUNNING, Sequence

if TYPE_CHECKING:
    from scheduler_svc.core.scheduler import Scheduler


class Progress(Enum):
    """The progress of a request since its sequences last got rows."""

    WAITED = "waited"
    """No sequence of the request is running, or no plan has named a running one yet."""
    NONE = "none"
    """Plans have named running sequences of the request, but none of them has gained a token."""
    SOME = "some"
    """A running sequence of the request has gained a token."""


def read_progress(core: "Scheduler", request: Request) -> Progress:
    keys = range(request.first_seq_key, request.first_seq_key + request.n)
    seqs: list[Sequence] = []
    for seq in core.live.find(request.source, keys):
        seqs += [seq] if seq.group is None else seq.group.seqs
    running = [seq for seq in seqs if seq.status in RUNNING]
    if any(_has_gained(core, seq) for seq in running):
        return Progress.SOME
    return Progress.NONE if any(seq.announced for seq in running) else Progress.WAITED


def _has_gained(core: "Scheduler", seq: Sequence) -> bool:
    if seq.group is not None:  # a beam gets a new row with all its tokens in each step
        return len(seq.token_ids) > seq.num_prompt_tokens
    # `token_ids` has the tokens that the sequence had when it got its row.
    return seq.row is not None and core.rows.num_tokens(seq.row) > len(seq.token_ids)
