"""One step: what the scheduler wants a worker to do, and what came of it.

A *row* is the place of a live sequence in the worker, in [0, max_num_seqs); the scheduler numbers
the rows. A plan names only what changes. A row that has computed its known tokens samples one more,
which is then known and not computed. From then on the row *decodes*: every step computes that one
token and samples the next, without the plan naming the row, until it is released. Arrays are int32;
arrays named in one docstring are parallel. `contract.codec.step` turns both into the messages of
`worker.proto`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NewType

import numpy as np

from contract.arrays import Float32Array, Int32Array, Labels, no_floats, no_ints, no_labels
from contract.hashing import BlockHash

StepId = NewType("StepId", int)
"""One turn of schedule, execute, update; strictly increasing."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputState:
    """One output of a beam search, finished or not, as it differs from the best beam."""

    num_shared_tokens: int
    """How many of the best beam's first tokens, the prompt included, it begins with."""
    token_ids: Int32Array
    """Those after them: few, since beams branched off not long ago."""
    logprob: np.float32
    """The sum of the log-probabilities of its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchState:
    """The state of a beam search, except its request and the best beam's tokens."""

    beams: tuple[OutputState, ...]
    """Best first; so are `hypotheses`, the outputs that have ended."""
    hypotheses: tuple[OutputState, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NewSequence:
    """A sequence that gets a row, in full."""

    seq_id: int
    row: int
    token_ids: Int32Array
    """All known tokens: the prompt, then the output if it ran before."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """How many of them have valid KV in the blocks; fewer than all."""
    block_ids: Int32Array
    """The block table: room for all known tokens."""
    sampling: Any
    """How tokens are drawn. The scheduler has the bytes of a `quire.v1.SamplingParams`, which it
    passes on unread; the worker has what `plan_from_proto` read from them."""
    max_total_tokens: int
    """The length, prompt and output, at which it stops decoding."""
    output_index: int = 0
    """The index of the output in its request; it is added to the seed."""
    traceparent: str = ""
    identity: bytes = b""
    """A later scheduler recognizes the sequence by this; empty: it is not reported to a later one.
    """
    search: SearchState | None = None
    """How far the beam search is whose best beam it is; sent as `note`. Only at the scheduler."""
    note: bytes = b""
    """The bytes of `search`, kept unread for a later scheduler. Only at the worker."""
    adapter: int = 0
    """The number of its LoRA adapter in `Limits.adapters`; 0: none. Only at the worker."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What changes before a step, and what it computes beyond the rows that decode.

    The parts apply in this order: rows are released, added, extended and renamed; labels are taken;
    disk moves start; swap-outs, swap-ins, then copies; then the step computes.
    """

    step_id: StepId
    num_decodes: int
    """How many rows decode. Each computes one token, and its draft tokens if there are any."""
    released_rows: Int32Array = field(default_factory=no_ints)
    """Rows whose sequence is gone; freed before anything else."""
    new_sequences: tuple[NewSequence, ...] = ()
    appended_rows: Int32Array = field(default_factory=no_ints)
    """Rows that get one more block at the end of their table, in `appended_block_ids`."""
    appended_block_ids: Int32Array = field(default_factory=no_ints)
    copy_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks copied to `copy_dst_block_ids` before the step computes."""
    copy_dst_block_ids: Int32Array = field(default_factory=no_ints)
    chunk_rows: Int32Array = field(default_factory=no_ints)
    """Rows that compute `chunk_lens` known tokens each."""
    chunk_lens: Int32Array = field(default_factory=no_ints)
    swap_out_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks copied to host blocks `swap_out_dst_block_ids` before any swap-in or copy."""
    swap_out_dst_block_ids: Int32Array = field(default_factory=no_ints)
    swap_in_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks copied to device blocks `swap_in_dst_block_ids`, which are valid from the next
    step on. Empty in a step that swaps out."""
    swap_in_dst_block_ids: Int32Array = field(default_factory=no_ints)
    renamed_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks that every block table, those of this plan included, calls
    `renamed_dst_block_ids` from now on; their contents are among the copies."""
    renamed_dst_block_ids: Int32Array = field(default_factory=no_ints)
    disk_store_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks to store in disk blocks `disk_store_dst_block_ids`. They are read before this
    step writes any; the result of this or a later step says that a store has ended."""
    disk_store_dst_block_ids: Int32Array = field(default_factory=no_ints)
    disk_load_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Disk blocks to load to host blocks `disk_load_dst_block_ids`; reported likewise."""
    disk_load_dst_block_ids: Int32Array = field(default_factory=no_ints)
    labelled_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks whose content, as it is before this step, gets the hashes `labels`."""
    labels: Labels = field(default_factory=no_labels)
    pins: tuple[tuple[BlockHash, float], ...] = ()
    """Hashes of contents that the scheduler keeps in the prefix cache, and for how many seconds
    from now on; of each prompt from its beginning. The worker only tells a later scheduler."""
    turns: tuple[Any, ...] = ()
    """The `Started` and `Preempted` of traced sequences since the plan before, in order. For the
    scheduler's spans; not sent."""
    serialize: Callable[[], bytes] | None = None
    """Returns the message in which the plan arrived, to pass it on to the other ranks of a group.
    Only at the worker; None: the plan did not arrive in a message."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes in all, besides drafts."""
        return self.num_decodes + (int(self.chunk_lens.sum()) if self.chunk_lens.size else 0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprob:
    """The log-probability of one token, and of the likeliest ones at its position."""

    index: int
    """Of a sampled token, its place in `Result.sampled_rows`."""
    logprob: float
    top_token_ids: Int32Array
    """Best first, with `top_logprobs`."""
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a part of a row's prompt."""

    row: int
    position: int
    """The first token's index in the prompt."""
    logprobs: tuple[TokenLogprob, ...]
    """Of this token and those after it."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What one step produced."""

    step_id: StepId
    sampled_rows: Int32Array = field(default_factory=no_ints)
    """Rows that sampled a token, with `sampled_token_ids`. With drafts a row may sample several; it
    then appears once per token, consecutively."""
    sampled_token_ids: Int32Array = field(default_factory=no_ints)
    stopped_rows: Int32Array = field(default_factory=no_ints)
    """Those of `sampled_rows` whose last token ends the sequence."""
    failed_rows: Int32Array = field(default_factory=no_ints)
    """Rows that ended because their logits are not finite."""
    stuck_rows: Int32Array = field(default_factory=no_ints)
    """Rows that ended because their grammar admits no token."""
    failed_swap_in_block_ids: Int32Array = field(default_factory=no_ints)
    """Those of the plan's `swap_in_dst_block_ids` whose content is corrupt."""
    stored_disk_block_ids: Int32Array = field(default_factory=no_ints)
    """Disk blocks whose store, of this or an earlier step, has succeeded since the last result."""
    failed_disk_block_ids: Int32Array = field(default_factory=no_ints)
    """Disk blocks whose store has failed; they hold nothing."""
    loaded_host_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks whose load has succeeded."""
    failed_host_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks whose load has failed; they hold nothing."""
    execute_s: float = 0.0
    """Seconds from taking the step up to having its result."""

    # At the worker only: the scheduler passes log-probabilities on as they came.
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_computed_tokens: int = 0
    """Tokens that went through the model; not sent."""
    head_start_s: float = 0.0
    """Seconds without computing after the step, so that its result gets through; not sent."""

    # At the scheduler only, which takes them from the log-probabilities of beams.
    candidate_rows: Int32Array = field(default_factory=no_ints)
    """Those of `sampled_rows` that are beams."""
    candidate_counts: Int32Array = field(default_factory=no_ints)
    """Parallel to it: how many of the likeliest tokens follow for each, best first."""
    candidate_token_ids: Int32Array = field(default_factory=no_ints)
    candidate_logprobs: Float32Array = field(default_factory=no_floats)
    """Parallel to `candidate_token_ids`."""
