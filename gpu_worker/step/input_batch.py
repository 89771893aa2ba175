"""Gathers a step's model inputs from the rows.

Symbols: `T` tokens, `S` sequences, `N` tokens that sample, `M` blocks of the longest block table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from contract.arrays import Int32Array, Int64Array
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.step_adapters import NO_ADAPTERS, StepAdapters, step_adapters
from gpu_worker.memory.transfer import upload
from gpu_worker.models.attention import AttentionMetadata, WantedTokens
from gpu_worker.step.rows import Rows, ScheduledRows

_NONE: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """One step's model inputs, on the device; decodes come first."""

    token_ids: torch.Tensor
    """int64[T]."""
    positions: torch.Tensor
    """int64[T]: each token's index in its sequence."""
    metadata: AttentionMetadata
    """Its wanted tokens are those before the sampled ones."""
    sampling_rows: torch.Tensor
    """int64[N]: the row of each sampled token."""


def build_input_batch(
    rows: Rows,
    scheduled: ScheduledRows,
    last_token_ids: torch.Tensor,
    block_size: int,
    *,
    is_all_known: bool = False,
    adapters: Mapping[int, Adapter] = NO_ADAPTERS,
) -> InputBatch:
    """Gather a step's inputs, without waiting for the device.

    Args:
        rows: The rows, after `apply`.
        scheduled: What `apply` returned; at least one token.
        last_token_ids: int64[max_num_seqs] on the device: each row's newest sampled token.
        block_size: Token slots of a block.
        is_all_known: Whether `rows` has the values of all tokens; `last_token_ids` is then not
            read.
        adapters: The worker's adapters, by number.
    """
    lens, num_decodes = scheduled.lens, scheduled.num_decodes
    num_on_device = 0 if is_all_known else num_decodes
    seq_lens = scheduled.starts + lens  # [S]
    if num_decodes == len(lens):  # each has one token, as in most steps
        row_of_token, positions = scheduled.rows, scheduled.starts  # [T]
        starts, max_query_len = np.arange(num_decodes + 1, dtype=np.int32), 1
    else:
        starts, max_query_len = np.zeros(len(lens) + 1, np.int32), int(lens.max())
        np.cumsum(lens, out=starts[1:])
        row_of_token = np.repeat(scheduled.rows, lens)
        positions = np.arange(starts[-1]) + np.repeat(scheduled.starts - starts[:-1], lens)
    places, offsets = np.divmod(positions, block_size)  # [T]: in block table, in block
    blocks = rows.block_tables[row_of_token, places].astype(np.int64)  # [T]
    max_num_blocks = -(-int(seq_lens.max()) // block_size)
    slots = blocks * block_size + offsets  # [T]
    arrays: list[npt.NDArray[Any]] = [
        positions,
        slots,
        _token_ids(rows, row_of_token[num_on_device:], positions[num_on_device:]),
        scheduled.rows[:num_on_device],
        scheduled.rows[scheduled.sampling],
        rows.block_tables[scheduled.rows, :max_num_blocks],
        seq_lens.astype(np.int32),
        starts,
    ]
    numbers = rows.adapter[row_of_token] if adapters else _NONE  # [T]
    of_all = step_adapters(numbers, adapters, last_token_ids.device)
    of_wanted_ones: StepAdapters | None = None
    wanted_starts: Int32Array | None = None
    if len(scheduled.sampling) < len(positions):
        places, wanted_starts = _places_before_sampled(scheduled, starts)
        if of_all is not None:
            of_wanted_ones = step_adapters(numbers[places], adapters, last_token_ids.device)
        arrays += [places, slots[places], wanted_starts]
    (
        positions_t,
        slot_mapping,
        chunk_token_ids,
        decode_rows,
        sampling_rows,
        block_tables,
        seq_lens_t,
        query_start_loc,
        *of_wanted,
    ) = upload(arrays, last_token_ids.device)
    metadata = AttentionMetadata(
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        seq_lens=seq_lens_t,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        num_decodes=num_decodes,
        adapters=of_all,
    )
    if wanted_starts is not None:
        wanted_lens = np.diff(wanted_starts)
        wanted = _wanted(metadata, wanted_lens, of_wanted_ones, *of_wanted)
        metadata = replace(metadata, wanted=wanted)
    token_ids = last_token_ids.index_select(0, decode_rows)
    if len(chunk_token_ids):
        token_ids = torch.cat([token_ids, chunk_token_ids])
    return InputBatch(
        token_ids=token_ids,
        positions=positions_t,
        metadata=metadata,
        sampling_rows=sampling_rows,
    )


def _token_ids(rows: Rows, row_of_token: Int64Array, positions: Int64Array) -> Int64Array:
    """int64[len(positions)]: tokens whose values the rows have."""
    if not len(positions):
        return _NONE
    return rows.token_ids[row_of_token, positions].astype(np.int64)


def _wanted(
    metadata: AttentionMetadata,
    lens: Int32Array,  # [S]: wanted tokens of each sequence
    adapters: StepAdapters | None,
    places: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> WantedTokens:
    alone = replace(
        metadata,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc,
        max_query_len=int(lens.max()),
        num_decodes=int(np.logical_and.accumulate(lens == 1).sum()),
        adapters=adapters,
    )
    return WantedTokens(places, alone)


def _places_before_sampled(
    scheduled: ScheduledRows, starts: Int32Array
) -> tuple[Int64Array, Int32Array]:
    """The tokens before the sampled ones: each sequence's last in the step, or none.

    Args:
        scheduled: The step.
        starts: int32[S + 1], where each sequence's tokens start in the batch.

    Returns:
        int64[N], their indexes in the batch; and int32[S + 1], where each sequence's start among
        them.
    """
    firsts = (starts[:-1] - scheduled.starts)[scheduled.sampling]  # [N]: of position 0
    lens = np.bincount(scheduled.sampling, minlength=len(scheduled.rows))
    wanted_starts = np.zeros_like(starts)
    np.cumsum(lens, out=wanted_starts[1:])
    return firsts + scheduled.positions - 1, wanted_starts
