"""Events of sequences, which the core reports after a step, for the routers and for traces."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array
from contract.step import StepLogprob
from scheduler_svc.core.interface.request import FinishReason, SeqKey, SourceId


@dataclass(frozen=True, slots=True)
class Started:
    """A traced sequence got a row and device blocks; this may happen again after a preemption."""

    source: SourceId
    seq_key: SeqKey
    num_computed_tokens: int
    """Tokens whose KV the sequence reuses instead of computing it."""
    num_swapped_in_blocks: int
    """Host blocks that are copied to the device before the sequence computes."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A traced sequence lost its row and device blocks."""

    source: SourceId
    seq_key: SeqKey
    num_computed_tokens: int
    """Tokens whose KV the sequence had when it was preempted."""
    num_swapped_out_blocks: int
    """Blocks that the next plan copies to the host. 0: the sequence will compute its tokens again,
    or its KV is already on the host."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence left the queue for the first time."""

    source: SourceId
    seq_key: SeqKey
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    queue_s: float


@dataclass(frozen=True, slots=True)
class Pinned:
    """A sequence's prompt has been computed and pinned in the prefix cache, as requested."""

    source: SourceId
    seq_key: SeqKey
    num_tokens: int
    """How many of the sequence's first tokens are pinned."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended; this is its last event."""

    source: SourceId
    seq_key: SeqKey
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    """The message, if the reason is ERROR."""
    token_ids: tuple[int, ...] = ()
    """For a beam search, all tokens of the output, because none of them was reported before.
    Otherwise empty."""
    cumulative_logprob: float | None = None
    """The sum of the log-probabilities of `token_ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """The events that the sources (routers) get after a step's result.

    `sources`, `seq_keys`, `token_ids` and `result_index` are parallel, one entry for each new
    token. `result_index` is the token's index in the result (`Result.sampled_token_ids`).
    """

    sources: npt.NDArray[np.int32]
    seq_keys: npt.NDArray[np.uint64]
    token_ids: Int32Array
    result_index: Int32Array
    admitted: tuple[Admitted, ...]
    """Sequences that left the queue for the first time since the last events."""
    finished: tuple[Finished, ...]
    pinned: tuple[Pinned, ...] = ()
    """Sequences whose prompt was pinned since the last events."""
    logprobs: tuple[tuple[int, StepLogprob], ...] = ()
    """Pairs of a `result_index` and a log-probability. Only a takeover fills this field, with
    `HeldRow.logprobs`. After a step the field is empty, because the log-probabilities of the step's
    result are forwarded without being parsed."""
