"""What the core decides for one step, and what it is told of the step's result.

A row is the place of a running sequence in the worker, in [0, max_num_seqs). All arrays are
one-dimensional int32; arrays named in one docstring are parallel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from contract.hashing import BlockHash
from scheduler_svc.core.beams.search import SearchState
from scheduler_svc.core.request import FinishReason, SeqId, SeqKey, SourceId

StepId = NewType("StepId", int)
"""One schedule, execute, update turn; strictly increasing."""

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


_NO_INTS: Int32Array = np.empty(0, np.int32)


def ints(values: Sequence[int]) -> Int32Array:
    """Return int32[N]; most lists of a step are empty, and share one array."""
    return np.array(values, np.int32) if values else _NO_INTS


def _no_ints() -> Int32Array:
    return _NO_INTS


@dataclass(frozen=True, slots=True, eq=False)
class NewSequence:
    """A sequence that gets a row, in full."""

    seq_id: SeqId
    row: int
    token_ids: Int32Array
    """All known tokens: prompt, then output if it ran before."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """How many of them have valid KV in the blocks; less than all."""
    block_ids: Int32Array
    """The block table: room for all known tokens."""
    sampling: bytes
    output_index: int
    max_total_tokens: int
    traceparent: str
    identity: bytes = b""
    """By which a later scheduler knows it again; empty: it is not to be told of it."""
    search: SearchState | None = None
    """How far the search is whose best beam it is. For a later scheduler."""


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
    """Blocks copied to the host with the next plan; none: it computes again."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What changes before a step, and what it computes beyond the rows that decode."""

    step_id: StepId
    released_rows: Int32Array
    """Rows whose sequence is gone; before anything else."""
    new_sequences: tuple[NewSequence, ...]
    appended_rows: Int32Array
    """Rows that get a block at the end of their table, with `appended_block_ids`."""
    appended_block_ids: Int32Array
    copy_src_block_ids: Int32Array
    """Blocks copied to `copy_dst_block_ids` before the step computes."""
    copy_dst_block_ids: Int32Array
    chunk_rows: Int32Array
    """Rows that compute `chunk_lens` known tokens each."""
    chunk_lens: Int32Array
    num_decodes: int
    """Rows that decode, one token each and its drafts, without being named."""
    num_scheduled_tokens: int
    """Tokens this step computes in all, besides drafts."""
    swap_out_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Device blocks copied to `swap_out_dst_block_ids` before anything else in the step."""
    swap_out_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    swap_in_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks copied to `swap_in_dst_block_ids`; they are there when the step is done. Not in
    a step that swaps out."""
    swap_in_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    renamed_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Device blocks that every table, those of this plan included, names
    `renamed_dst_block_ids` from now on; their content is among what is copied."""
    renamed_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    disk_store_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks to store in disk blocks `disk_store_dst_block_ids`; they are read before this
    step writes any, and some later outcome says when the store has ended."""
    disk_store_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    disk_load_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Disk blocks to load to host blocks `disk_load_dst_block_ids`; likewise."""
    disk_load_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    labelled_block_ids: Int32Array = field(default_factory=_no_ints)
    """Device blocks whose content, as it is before this step, is named by `labels`."""
    labels: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 32), np.uint8))
    """uint8[N, 32]: hashes."""
    pins: tuple[tuple[BlockHash, float], ...] = ()
    """Names of contents that are kept in the prefix cache, and for how many seconds; of each prompt
    from its beginning. For a later scheduler."""
    turns: tuple[Started | Preempted, ...] = ()
    """What traced sequences got and lost since the plan before, in order; nothing of searches. For
    the trace, not for the worker."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What a step produced, as the worker reports it."""

    step_id: StepId
    sampled_rows: Int32Array
    """Rows that sampled a token, with `sampled_token_ids`; one with several is there as often, in a
    run."""
    sampled_token_ids: Int32Array
    stopped_rows: Int32Array
    """Those of `sampled_rows` whose last token ends the sequence."""
    failed_rows: Int32Array
    """Rows that could not sample: their logits are not finite."""
    failed_swap_in_block_ids: Int32Array = field(default_factory=_no_ints)
    """Those of the plan's `swap_in_dst_block_ids` whose content is not to be trusted."""
    stored_disk_block_ids: Int32Array = field(default_factory=_no_ints)
    """Disk blocks whose store, of this or an earlier step, has ended well by now."""
    failed_disk_block_ids: Int32Array = field(default_factory=_no_ints)
    """Disk blocks whose store has failed; they hold nothing."""
    loaded_host_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks whose load has ended well."""
    failed_host_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks whose load has failed; they hold nothing."""
    candidate_rows: Int32Array = field(default_factory=_no_ints)
    """Those of `sampled_rows` that are beams."""
    candidate_counts: Int32Array = field(default_factory=_no_ints)
    """Parallel to it: how many of the likeliest tokens follow for each, best first."""
    candidate_token_ids: Int32Array = field(default_factory=_no_ints)
    candidate_logprobs: Float32Array = field(default_factory=lambda: np.empty(0, np.float32))
    """Parallel to `candidate_token_ids`."""
    stuck_rows: Int32Array = field(default_factory=_no_ints)
    """Rows that could not sample: their grammar admits no token."""


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
    """A sequence's prompt is computed and stays in the prefix cache, as its request wanted."""

    source: SourceId
    seq_key: SeqKey
    num_tokens: int
    """How many of its first tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended; it will not be heard of again."""

    source: SourceId
    seq_key: SeqKey
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    """For a person; set if the reason is ERROR."""
    token_ids: tuple[int, ...] = ()
    """What a search found for this output, of which nothing was heard before."""
    cumulative_logprob: float | None = None
    """Of `token_ids`: the sum of their log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """What the sources must hear after a step's result was applied.

    `sources`, `seq_keys`, `token_ids` and `result_index` are parallel, one entry for each new
    token. `result_index` is the token's place in `StepOutcome.sampled_rows`.
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
    logprobs: tuple[tuple[int, bytes], ...] = ()
    """Of tokens that no step has brought: their `result_index`, and `HeldRow.logprobs`."""
