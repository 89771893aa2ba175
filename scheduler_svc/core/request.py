"""What a router asks of the scheduler: one prompt, `n` sequences."""

from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

from contract.outputs import FinishReason
from scheduler_svc.core.beams.search import BeamParams

__all__ = ["FinishReason", "OutputSoFar", "Request", "SeqId", "SeqKey", "SourceId"]

SeqId = NewType("SeqId", int)
"""A sequence, unique over the life of a scheduler core."""

SourceId = NewType("SourceId", int)
"""A router's stream, as the engine numbers them."""

SeqKey = NewType("SeqKey", int)
"""A sequence as its source names it; unique within the source."""


@dataclass(frozen=True, slots=True)
class OutputSoFar:
    """What one sequence of a resubmitted request had produced before."""

    token_ids: npt.NDArray[np.int32]
    finished: bool


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and how many sequences continue it.

    Sequence i is known to its source as `first_seq_key + i`.
    """

    source: SourceId
    first_seq_key: SeqKey
    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    """int32[P], P >= 1."""
    n: int
    max_tokens: int
    """Most tokens each sequence may produce; at least 1."""
    sampling: bytes
    """How tokens are drawn: for the worker; the core never looks inside."""
    cache_salt: str = ""
    traceparent: str = ""
    min_tokens: int = 0
    """Tokens that each sequence produces at least, unless it is cancelled."""
    priority: int = 0
    """Higher is sooner."""
    tenant: str = ""
    """Whom the request is for."""
    deadline: float | None = None
    """When nobody wants it any more, in the caller's seconds; None: never."""
    reads_prefix_cache: bool = True
    """Whether it may use KV that others computed; else its whole prompt is computed."""
    cache_pin_s: float | None = None
    """How long the prompt's full blocks stay in the prefix cache from when they are computed,
    whatever else is evicted; None: as long as others."""
    beam: BeamParams | None = None
    """Search for the `n` likeliest outputs instead of drawing them. Then `sampling` asks the worker
    for candidates, and says nothing of ends."""
    outputs: tuple[OutputSoFar, ...] = ()
    """Empty, or one per sequence when the request was live before. Those of a search are empty."""
