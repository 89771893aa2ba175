"""A request as the scheduler has it: one prompt, `n` sequences."""

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
"""A sequence's key at its source; unique within the source."""


@dataclass(frozen=True, slots=True)
class OutputSoFar:
    """What one sequence of a resubmitted request has produced already."""

    token_ids: npt.NDArray[np.int32]
    finished: bool


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and how many sequences continue it.

    Sequence i has the key `first_seq_key + i`.
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
    """Serialized sampling parameters, for the worker; the core does not read them."""
    cache_salt: str = ""
    traceparent: str = ""
    min_tokens: int = 0
    """Fewest tokens that each sequence produces, unless it is cancelled."""
    priority: int = 0
    """Higher is sooner."""
    tenant: str = ""
    deadline: float | None = None
    """When it expires, in the caller's seconds; None: never."""
    reads_prefix_cache: bool = True
    """Whether it may use KV that others computed; else its whole prompt is computed."""
    cache_pin_s: float | None = None
    """How long the prompt's full blocks are pinned in the prefix cache after they are computed;
    None: not at all."""
    beam: BeamParams | None = None
    """Search for the `n` likeliest outputs instead of drawing them. Then `sampling` asks the worker
    for candidates and has no end tokens."""
    outputs: tuple[OutputSoFar, ...] = ()
    """Empty, or one per sequence when the request was live before; without tokens in a search."""
