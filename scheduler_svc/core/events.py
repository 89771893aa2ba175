"""What the core tells of its sequences: to their sources after a step, and to the trace."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array
from contract.step import TokenLogprob
from scheduler_svc.core.request import FinishReason, SeqKey, SourceId


@dataclass(frozen=True, slots=True)
class Started:
    """A traced sequence got a row and device blocks, for the first time or again."""

    source: SourceId
    seq_key: SeqKey
    num_computed_tokens: int
    """Tokens whose KV it need not compute."""
    num_swapped_in_blocks: int
    """Host blocks copied to its device blocks for that, before it is announced."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A traced sequence lost its row and device blocks."""

    source: SourceId
    seq_key: SeqKey
    num_computed_tokens: int
    """Tokens whose KV it had."""
    num_swapped_out_blocks: int
    """Blocks copied to the host with the next plan; 0: it computes again."""


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
    """A sequence's prompt is computed and stays in the prefix cache, as its request asked."""

    source: SourceId
    seq_key: SeqKey
    num_tokens: int
    """How many of its first tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended; this is its last event."""

    source: SourceId
    seq_key: SeqKey
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    """For a person; set if the reason is ERROR."""
    token_ids: tuple[int, ...] = ()
    """The output that a beam search found, whose tokens were not told before."""
    cumulative_logprob: float | None = None
    """The sum of the log-probabilities of `token_ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """What to tell the sources after a step's result was applied.

    `sources`, `seq_keys`, `token_ids` and `result_index` are parallel, one entry for each new
    token. `result_index` is the token's place in `Result.sampled_rows`.
    """

    sources: npt.NDArray[np.int32]
    seq_keys: npt.NDArray[np.uint64]
    token_ids: Int32Array
    result_index: Int32Array
    admitted: tuple[Admitted, ...]
    """Sequences that left the queue since the last news."""
    finished: tuple[Finished, ...]
    pinned: tuple[Pinned, ...] = ()
    """Sequences whose prompt was pinned since the last news."""
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    """The log-probabilities of tokens that no step has brought: `result_index`, and an entry of
    `HeldRow.logprobs`."""
