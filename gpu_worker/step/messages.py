"""What a step asks of the worker and what it answers: the contract's values, free of protobuf.

Arrays are one-dimensional int32 unless they say otherwise. A *row* is the place of a live sequence
in the worker, in [0, max_num_seqs).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from contract.errors import QuireError
from contract.lora import LoraAdapter
from contract.sampling import SamplingParams

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


LABEL_BYTES = 32


def _no_ints() -> Int32Array:
    return np.empty(0, np.int32)


def _no_labels() -> npt.NDArray[np.uint8]:
    return np.empty((0, LABEL_BYTES), np.uint8)


class BrokenInvariantError(QuireError):
    """Scheduler and worker disagree about what the worker holds: INTERNAL."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker has room for; batches are checked against it."""

    max_num_seqs: int
    """Rows."""
    max_model_len: int
    """Tokens of one row, prompt and output."""
    max_num_batched_tokens: int
    """Tokens that one step may compute; at least `max_num_seqs`."""
    num_blocks: int
    block_size: int
    """Token slots of one block."""
    vocab_size: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    adapters: Mapping[LoraAdapter, int] = field(default_factory=dict)
    """The LoRA adapters that a new row may have, and the number of each, at least 1."""
    num_saturating_tokens: int | None = None
    """Prompt tokens that keep the device busy with arithmetic; None: `max_num_batched_tokens`."""

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of a row that has `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """A sequence that gets a row, in full."""

    seq_id: int
    row: int
    token_ids: Int32Array
    """All known tokens: prompt, then output if it ran before."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """How many of `token_ids` have valid KV in the blocks; less than all."""
    block_ids: Int32Array
    """The block table: room for all known tokens."""
    sampling: SamplingParams
    max_total_tokens: int
    """The length, prompt and output, at which it stops decoding."""
    adapter: int = 0
    """The number of its LoRA adapter, as `Limits.adapters` has them; 0: it has none."""
    traceparent: str = ""
    identity: bytes = b""
    """What a later scheduler knows it by; empty: it is not told of it."""
    note: bytes = b""
    """What it is told with it."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """What changes before a step and what it computes; the order is that of worker.proto."""

    step_id: int
    num_decodes: int
    """Rows that decode, as the scheduler counts them."""
    released_rows: Int32Array = field(default_factory=_no_ints)
    new_rows: tuple[NewRow, ...] = ()
    appended_rows: Int32Array = field(default_factory=_no_ints)
    """Rows that get one more block, parallel to `appended_block_ids`."""
    appended_block_ids: Int32Array = field(default_factory=_no_ints)
    copy_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Blocks whose contents go to `copy_dst_block_ids` before anything is computed."""
    copy_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    chunk_rows: Int32Array = field(default_factory=_no_ints)
    """Rows that compute `chunk_lens` known tokens each."""
    chunk_lens: Int32Array = field(default_factory=_no_ints)
    swap_out_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Device blocks whose contents go to host blocks, `swap_out_dst_block_ids`, before any
    other move of blocks."""
    swap_out_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    swap_in_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks whose contents go to device blocks, `swap_in_dst_block_ids`, by the time that the
    next step computes."""
    swap_in_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    renamed_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Device blocks that every block table, with this step's changes, names
    `renamed_dst_block_ids` from now on."""
    renamed_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    disk_store_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks to store in disk blocks, `disk_store_dst_block_ids`; read before anything is
    written in this step."""
    disk_store_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    disk_load_src_block_ids: Int32Array = field(default_factory=_no_ints)
    """Disk blocks to load to host blocks, `disk_load_dst_block_ids`."""
    disk_load_dst_block_ids: Int32Array = field(default_factory=_no_ints)
    labelled_block_ids: Int32Array = field(default_factory=_no_ints)
    """Device blocks whose content, as it is before this step, gets a name."""
    labels: npt.NDArray[np.uint8] = field(default_factory=_no_labels)
    """uint8[N, 32], parallel to it."""
    pins: tuple[tuple[bytes, float], ...] = ()
    """Labels that the scheduler keeps for a time, and for how many seconds from now on."""
    serialize: Callable[[], bytes] | None = None
    """Gives the message that it came in, for other ranks of a group; None: it came in none."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprob:
    """The log-probability of one sampled token, and of the likeliest at its position."""

    index: int
    """Its place in `StepOutput.sampled_rows`."""
    logprob: float
    top_token_ids: Int32Array
    """Best first."""
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a part of a row's prompt."""

    row: int
    position: int
    """Of the first token told of, in the prompt."""
    logprobs: tuple[TokenLogprob, ...]
    """Of this token and those after it."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What one step produced."""

    step_id: int
    sampled_rows: Int32Array
    """Rows that sampled a token, parallel to `sampled_token_ids`; several, because of drafts, in a
    run."""
    sampled_token_ids: Int32Array
    stopped_rows: Int32Array
    """Those of `sampled_rows` whose last token is an end token."""
    failed_rows: Int32Array
    """Rows that ended because their logits are not finite."""
    logprobs: tuple[TokenLogprob, ...]
    num_computed_tokens: int
    """Tokens that went through the model."""
    execute_s: float
    """Seconds from taking the step up to having its result."""
    stuck_rows: Int32Array = field(default_factory=_no_ints)
    """Rows that ended because their grammar cannot be followed any further."""
    failed_swap_in_block_ids: Int32Array = field(default_factory=_no_ints)
    """Those of the step's `swap_in_dst_block_ids` whose content is not to be trusted."""
    stored_disk_block_ids: Int32Array = field(default_factory=_no_ints)
    """Disk blocks whose store, of this or an earlier step, has ended well by now."""
    failed_disk_block_ids: Int32Array = field(default_factory=_no_ints)
    """Disk blocks whose store has failed; they hold nothing."""
    loaded_host_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks whose load has ended well."""
    failed_host_block_ids: Int32Array = field(default_factory=_no_ints)
    """Host blocks whose load has failed; they hold nothing."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    head_start_s: float = 0.0
    """Seconds for which nothing should be computed after it, for it to get through; see
    `head_start`."""
