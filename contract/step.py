"""One step: the scheduler's plan for a worker, and the worker's result.

A *row* is the number of a running sequence in the worker's batch, in [0, max_num_seqs); the
scheduler assigns the rows. When all known tokens of a row are computed, the row samples a new
token. From then on the row *decodes*: every step computes the last token and samples the next,
until the sequence stops or reaches its maximum length.

A plan contains only changes. Once a row decodes, plans name the row only to append blocks to its
block table, or to release the row. `contract.codec.step` turns plans and results into the messages
of `worker.proto`.

Arrays are int32. Two arrays that one docstring describes together, such as `copy_src_block_ids` and
`copy_dst_block_ids`, are parallel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NewType

import numpy as np

from contract.arrays import Float32Array, Int32Array, Labels, no_floats, no_ints, no_labels
from contract.hashing import BlockHash
from contract.sampling import SamplingParams

StepId = NewType("StepId", int)
"""The number of a step; greater than the numbers of all earlier steps of the same core."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputState:
    """One output of a beam search, finished or not, stored as its difference from the best beam."""

    num_shared_tokens: int
    """How many tokens this output and the best beam have in common at their beginning, the prompt
    included."""
    token_ids: Int32Array
    """The tokens after the shared ones. These tokens are few, because beams branch off late."""
    logprob: np.float32
    """The sum of the log-probabilities of the output's tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchState:
    """The state of a beam search, except the search's parameters and the best beam's tokens."""

    beams: tuple[OutputState, ...]
    """Best first."""
    hypotheses: tuple[OutputState, ...]
    """The complete outputs, best first."""


@dataclass(frozen=True, slots=True, eq=False)
class NewSequence:
    """A sequence that gets a row in this step."""

    seq_id: int
    row: int
    token_ids: Int32Array
    """All known tokens: those of the prompt, then those that earlier steps have sampled, if any."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """How many of `token_ids` have valid KV in `block_ids`; fewer than `len(token_ids)`."""
    block_ids: Int32Array
    """The block table, with room for all known tokens. For every `block_size` tokens the table has
    one entry per KV group, in the order of `Limits.kv_windows`. An entry is 0 if no later token
    sees the block's tokens, or if `Plan.placements` will set the entry."""
    sampling: bytes | SamplingParams
    """At the scheduler: a serialized `quire.v1.SamplingParams`, which the scheduler does not parse.
    At the worker: the parsed parameters."""
    max_total_tokens: int
    """The length, prompt and output together, at which the sequence stops decoding."""
    output_index: int = 0
    """The index of the output in its request; the worker adds it to the seed."""
    traceparent: str = ""
    identity: bytes = b""
    """Identifies the sequence to a later scheduler. Empty: the worker does not report the sequence
    to a later scheduler."""
    search: SearchState | None = None
    """If the sequence is the best beam of a search: the state of that search, sent as `note`. Set
    only at the scheduler."""
    note: bytes = b""
    """The serialized `search`, which the worker keeps for a later scheduler. Set only at the
    worker."""
    adapter: int = 0
    """The number of the sequence's LoRA adapter in `Limits.adapters`; 0: none. Set only at the
    worker."""

    @property
    def params(self) -> SamplingParams:
        """The parsed `sampling`; raises TypeError at the scheduler, which has only the bytes."""
        if isinstance(self.sampling, bytes):
            raise TypeError("sampling parameters are serialized; only a worker parses them")
        return self.sampling


# A plan is read-only, but its class is not frozen. A frozen dataclass sets each field by a call;
# these calls would take a twentieth of the time of planning a step.
@dataclass(slots=True, eq=False)
class Plan:
    """The changes to make before a step, and the chunks of prompts that the step computes.

    The worker applies a plan in this order: it releases, adds and extends rows; renames blocks in
    block tables; records labels; starts disk moves; swaps out or swaps in; copies blocks; computes.
    """

    step_id: StepId
    num_decodes: int
    """How many rows decode. Each computes one token, and its draft tokens if it has any."""
    released_rows: Int32Array = field(default_factory=no_ints)
    """Rows whose sequence has ended, was preempted or has moved to another worker, and the row of
    each beam that computes another token. Such a beam is in `new_sequences` again, with the same
    row. The worker frees the rows that are listed here before it adds new sequences."""
    new_sequences: tuple[NewSequence, ...] = ()
    appended_rows: Int32Array = field(default_factory=no_ints)
    """Rows whose block table gets one more block of each KV group at its end. `appended_block_ids`
    has these blocks, row after row, and for each row in the order of the KV groups."""
    appended_block_ids: Int32Array = field(default_factory=no_ints)
    placements: Int32Array = field(default_factory=no_ints)
    """Entries to set in block tables, as a flat list of triples: row, place, block. Used only for
    KV groups with a window: a prompt gets its blocks of such a group chunk by chunk."""
    copy_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks to copy to device blocks `copy_dst_block_ids` before the step computes."""
    copy_dst_block_ids: Int32Array = field(default_factory=no_ints)
    chunk_rows: Int32Array = field(default_factory=no_ints)
    """Rows that compute known tokens; `chunk_lens` has the number of tokens of each."""
    chunk_lens: Int32Array = field(default_factory=no_ints)
    swap_out_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks to copy to host blocks `swap_out_dst_block_ids`. The worker reads these device
    blocks before this step writes to any device block."""
    swap_out_dst_block_ids: Int32Array = field(default_factory=no_ints)
    swap_in_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks to copy to device blocks `swap_in_dst_block_ids`. The device blocks are valid
    from the next step on. Empty in a step that swaps out."""
    swap_in_dst_block_ids: Int32Array = field(default_factory=no_ints)
    renamed_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks whose contents the plan copies to device blocks `renamed_dst_block_ids`. In
    every block table, including those of `new_sequences`, the worker replaces each of these blocks
    by its copy. The plan lists the copies themselves in `copy_src_block_ids`."""
    renamed_dst_block_ids: Int32Array = field(default_factory=no_ints)
    disk_store_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks to write to disk blocks `disk_store_dst_block_ids`. The worker reads these host
    blocks before this step writes to any host block. The result of this or a later step reports the
    end of each write."""
    disk_store_dst_block_ids: Int32Array = field(default_factory=no_ints)
    disk_load_src_block_ids: Int32Array = field(default_factory=no_ints)
    """Disk blocks to read into host blocks `disk_load_dst_block_ids`. The result of this or a later
    step reports the end of each read."""
    disk_load_dst_block_ids: Int32Array = field(default_factory=no_ints)
    labelled_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks to label. The hashes `labels` are those of the contents before this step."""
    labels: Labels = field(default_factory=no_labels)
    pins: tuple[tuple[BlockHash, float], ...] = ()
    """Newly pinned blocks: each block's hash, and for how many seconds it stays in the prefix
    cache. Blocks of one prompt are in the prompt's order. The worker keeps the pins only to report
    them to a later scheduler."""
    trace_events: tuple[Any, ...] = ()
    """The events of traced sequences since the previous plan, in order: `Started` and `Preempted`
    of `scheduler_svc/core/interface/events.py`. The scheduler makes spans from these events. The
    worker does not get these events."""
    serialize: Callable[[], bytes] | None = None
    """Returns the bytes of the message in which the plan arrived. A worker of several processes
    sends these bytes to its other processes. Set only at the worker; None: there was no message."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens that the step computes; draft tokens are not counted."""
        return self.num_decodes + (int(self.chunk_lens.sum()) if self.chunk_lens.size else 0)


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprob:
    """The log-probability of one token, and of the likeliest tokens at its position."""

    index: int
    """For a sampled token: its index in `Result.sampled_rows`. Meaningless for a prompt's token."""
    logprob: float
    top_token_ids: Int32Array
    """Best first; parallel to `top_logprobs`."""
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a part of a row's prompt."""

    row: int
    position: int
    """The index of the part's first token in the prompt; at least 1, because the first token of the
    prompt has no log-probability."""
    logprobs: tuple[StepLogprob, ...]
    """One entry for each token of the part."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledRow:
    """The vector of a row whose prompt is computed: an embedding or a score."""

    row: int
    vector: bytes
    """float32, little-endian."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The result of one step."""

    step_id: StepId
    sampled_rows: Int32Array = field(default_factory=no_ints)
    """Rows that sampled a token; parallel to `sampled_token_ids`. With drafts a row may sample
    several tokens; the row then appears once for each, consecutively."""
    sampled_token_ids: Int32Array = field(default_factory=no_ints)
    stopped_rows: Int32Array = field(default_factory=no_ints)
    """Rows whose last sampled token ends the sequence; a subset of `sampled_rows`."""
    failed_rows: Int32Array = field(default_factory=no_ints)
    """Rows that ended because their logits are not finite."""
    stuck_rows: Int32Array = field(default_factory=no_ints)
    """Rows that ended because their grammar allows no token, or is too complex to follow."""
    failed_swap_in_block_ids: Int32Array = field(default_factory=no_ints)
    """Device blocks whose swap-in brought corrupt content; a subset of the plan's
    `swap_in_dst_block_ids`."""
    stored_disk_block_ids: Int32Array = field(default_factory=no_ints)
    """Disk blocks that have been written since the previous result. Each write began with this step
    or an earlier step."""
    failed_disk_block_ids: Int32Array = field(default_factory=no_ints)
    """Disk blocks that could not be written. The content of these blocks is invalid."""
    loaded_host_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks into which disk blocks have been read."""
    failed_host_block_ids: Int32Array = field(default_factory=no_ints)
    """Host blocks into which disk blocks could not be read. The content of these host blocks is
    invalid."""
    execute_s: float = 0.0
    """Seconds from the start of the step to its result. On a GPU, this time includes waiting for
    the previous step."""

    # Set only at the worker; the scheduler forwards vectors and log-probabilities without parsing
    # them.
    pooled: tuple[PooledRow, ...] = ()
    """The vectors of rows that pool. Each such row is in `sampled_rows` with a meaningless token,
    because the scheduler treats it as a sequence that draws one token."""
    logprobs: tuple[StepLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_computed_tokens: int = 0
    """Tokens that the step put through the model. Not sent to the scheduler."""
    head_start_s: float = 0.0
    """How long a worker on a CPU pauses after the step, in seconds. During the pause, the
    processes that deliver the result can use the worker's CPU cores. Not sent to the scheduler."""

    # Set only at the scheduler, which reads them from the log-probabilities of beams.
    candidate_rows: Int32Array = field(default_factory=no_ints)
    """Rows of beams that have candidates for their next token; a subset of `sampled_rows`."""
    candidate_counts: Int32Array = field(default_factory=no_ints)
    """Parallel to `candidate_rows`: how many candidates each row has in `candidate_token_ids`. The
    likeliest candidate of a row comes first."""
    candidate_token_ids: Int32Array = field(default_factory=no_ints)
    candidate_logprobs: Float32Array = field(default_factory=no_floats)
    """Parallel to `candidate_token_ids`."""
