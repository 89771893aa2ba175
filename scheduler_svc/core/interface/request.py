"""A request in the scheduler: one prompt and `n` sequences."""

from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

from contract.outputs import FinishReason
from contract.request import MAX_PRIORITY
from contract.sampling import EarlyStopping

__all__ = ["BeamParams", "FinishReason", "OutputSoFar", "Request", "SeqId", "SeqKey", "SourceId"]

SeqId = NewType("SeqId", int)
"""Identifies a sequence; unique over the life of a scheduler core."""

SourceId = NewType("SourceId", int)
"""Identifies a source, the stream of one router; `RouterStreams` assigns the numbers."""

SeqKey = NewType("SeqKey", int)
"""Identifies a sequence at its source; unique within the source."""


@dataclass(frozen=True, slots=True)
class OutputSoFar:
    """The tokens that a sequence of a resubmitted request produced before it was resubmitted."""

    token_ids: npt.NDArray[np.int32]
    finished: bool


@dataclass(frozen=True, slots=True)
class BeamParams:
    """The beam search parameters of a request."""

    width: int
    """Number of beams, and also of hypotheses to keep; at least 2."""
    end_token_ids: tuple[int, ...]
    """The tokens that end an output, without repeats."""
    length_penalty: float = 1.0
    """A hypothesis's score is its log-probability ÷ (number of output tokens ^ length_penalty)."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    @property
    def num_kept(self) -> int:
        """How many continuations (beams with one more token) a step of the search considers.

        Of each beam's continuations, at most `len(end_token_ids)` end with an end token. So at
        least `width` of the continuations considered do not.
        """
        return max(2, 1 + len(self.end_token_ids)) * self.width


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt, and `n` sequences that continue it.

    Sequence i has the key `first_seq_key + i`.
    """

    source: SourceId
    first_seq_key: SeqKey
    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    """int32[P], P >= 1."""
    n: int
    max_tokens: int
    """The limit on the tokens that each sequence may produce; at least 1."""
    sampling: bytes
    """Serialized sampling parameters for the worker; the core does not parse them."""
    cache_salt: str = ""
    traceparent: str = ""
    min_tokens: int = 0
    """The least number of tokens that each sequence produces, unless it is cancelled."""
    priority: int = 0
    """If the policy uses priorities, requests with a higher priority go first. Under other
    policies, only the lowest priority matters: requests with the lowest priority go last."""
    tenant: str = ""
    deadline: float | None = None
    """When the request expires, in seconds, by the same clock as the argument `now` of the core's
    methods; None: never."""
    reads_prefix_cache: bool = True
    """Whether the request may use cached KV; if not, its whole prompt is computed."""
    pools: bool = False
    """Whether the worker computes an embedding or a score of the prompt instead of drawing tokens.
    The core treats the request like one that asks for a single token. The request's sequence starts
    over when it loses its row or its scheduler, because the worker keeps the unfinished result with
    the row."""
    cache_pin_s: float | None = None
    """How long the prompt's full blocks are pinned after they are computed; None: no pin."""
    beam: BeamParams | None = None
    """If set, search for the `n` likeliest outputs instead of sampling. `sampling` then asks the
    worker for the likeliest next tokens, and has no end tokens."""
    outputs: tuple[OutputSoFar, ...] = ()
    """One entry per sequence of a resubmitted request. Empty for a new request. Also empty for a
    resubmitted request if none of its sequences had produced a token or ended. The entries of a
    beam search have no tokens, because its beams become outputs only when the search ends."""

    @property
    def is_background(self) -> bool:
        """Whether the request has the lowest priority, like every request from `/v1/batches`."""
        return self.priority == -MAX_PRIORITY
