"""Events of sequences, which the core reports to their sources after a step, and to traces."""

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
    """Tokens whose KV it does not have to compute."""
    num_swapped_in_blocks: int
    """Host blocks that are copied to its device blocks before it computes."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A traced sequence lost its row and device blocks."""

    source: SourceId
    seq_key: SeqKey
    num_computed_tokens: int
    """Tokens whose KV it had at that time."""
    num_swapped_out_blocks: int
    """Blocks that the next plan copies to the host. 0: the sequence computes its tokens again, or
    its KV is on the host already."""


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
    """How many of its first tokens are pinned."""


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
    """For a beam search: the output, whose tokens were not reported before."""
    cumulative_logprob: float | None = None
    """The sum of the log-probabilities of `token_ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """The events for the sources after a step's result.

    `sources`, `seq_keys`, `token_ids` and `result_index` are parallel, one entry for each new
    token. `result_index` is the token's index in `Result.sampled_rows`.
    """

    sources: npt.NDArray[np.int32]
    seq_keys: npt.NDArray[np.uint64]
    token_ids: Int32Array
    result_index: Int32Array
    admitted: tuple[Admitted, ...]
    """Sequences that left the queue since the last events."""
    finished: tuple[Finished, ...]
    pinned: tuple[Pinned, ...] = ()
    """Sequences whose prompt was pinned since the last events."""
    logprobs: tuple[tuple[int, StepLogprob], ...] = ()
    """For tokens that come from `HeldRow`, not from a step: pairs of `result_index` and
    log-probability."""
