"""Gathers a step's model inputs from the rows.

Symbols: `T` tokens, `S` sequences, `N` tokens that sample, `M` blocks of the longest block table.
"""

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
class HostInputs:
    """One step's inputs on the host, apart from token ids."""

    row_of_token: Int64Array
    """int64[T]."""
    positions: Int64Array
    """int64[T]."""
    seq_lens: Int32Array
    """int32[S]: tokens of each sequence, including this step's."""
    starts: Int32Array
    """int32[S + 1]: where each sequence's tokens start."""
    max_query_len: int
    slots: tuple[Int64Array, ...]
    """By KV group: int64[T]."""
    tables: tuple[Int32Array, ...]
    """By KV group: int32[S, M]."""


def gather(rows: Rows, scheduled: ScheduledRows, block_size: int) -> HostInputs:
    """Gather a step's inputs from the rows; see `build_input_batch`."""
    lens, num_decodes = scheduled.lens, scheduled.num_decodes
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
    num_groups = rows.num_groups
    width = -(-int(seq_lens.max()) // block_size) * num_groups
    slots: list[Int64Array] = []
    tables: list[Int32Array] = []
    for group in range(num_groups):
        blocks = rows.block_tables[row_of_token, places * num_groups + group].astype(np.int64)
        slots.append(blocks * block_size + offsets)
        tables.append(rows.block_tables[scheduled.rows, group:width:num_groups])
    return HostInputs(
        row_of_token,
        positions,
        seq_lens.astype(np.int32),
        starts,
        max_query_len,
        tuple(slots),
        tuple(tables),
    )


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
    host = gather(rows, scheduled, block_size)
    num_groups, positions = rows.num_groups, host.positions
    num_on_device = 0 if is_all_known else scheduled.num_decodes
    arrays: list[npt.NDArray[Any]] = [
        positions,
        known_token_ids(rows, host.row_of_token[num_on_device:], positions[num_on_device:]),
        scheduled.rows[:num_on_device],
        scheduled.rows[scheduled.sampling],
        host.seq_lens,
        host.starts,
        *host.slots,
        *host.tables,
    ]
    numbers = rows.adapter[host.row_of_token] if adapters else _NONE  # [T]
    of_all = step_adapters(numbers, adapters, last_token_ids.device)
    of_wanted_ones: StepAdapters | None = None
    wanted_starts: Int32Array | None = None
    if len(scheduled.sampling) < len(positions):
        places, wanted_starts = places_before_sampled(scheduled, host.starts)
        if of_all is not None:
            of_wanted_ones = step_adapters(numbers[places], adapters, last_token_ids.device)
        arrays += [places, wanted_starts, *(of_group[places] for of_group in host.slots)]
    (
        positions_t,
        chunk_token_ids,
        decode_rows,
        sampling_rows,
        seq_lens_t,
        query_start_loc,
        *by_group,
    ) = upload(arrays, last_token_ids.device)
    slots_t, tables_t = by_group[:num_groups], by_group[num_groups : 2 * num_groups]
    of_wanted = by_group[2 * num_groups :]
    metadata = AttentionMetadata(
        slot_mapping=slots_t[0],
        block_tables=tables_t[0],
        seq_lens=seq_lens_t,
        query_start_loc=query_start_loc,
        max_query_len=host.max_query_len,
        num_decodes=scheduled.num_decodes,
        adapters=of_all,
    )
    metadata = with_groups(metadata, slots_t, tables_t)
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


def with_groups(
    metadata: AttentionMetadata, slots: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]
) -> AttentionMetadata:
    """Add the slots and block tables of each KV group, if there are several groups."""
    if len(slots) == 1:
        return metadata
    by_group = tuple(
        replace(metadata, slot_mapping=of_group, block_tables=table)
        for of_group, table in zip(slots, tables, strict=True)
    )
    return replace(metadata, by_group=by_group)


def known_token_ids(rows: Rows, row_of_token: Int64Array, positions: Int64Array) -> Int64Array:
    """int64[len(positions)]: tokens whose values the rows have."""
    if not len(positions):
        return _NONE
    return rows.token_ids[row_of_token, positions].astype(np.int64)


def _wanted(
    metadata: AttentionMetadata,
    lens: Int32Array,  # [S]: wanted tokens of each sequence
    adapters: StepAdapters | None,
    places: torch.Tensor,
    query_start_loc: torch.Tensor,
    *slots: torch.Tensor,  # by KV group
) -> WantedTokens:
    alone = replace(
        metadata,
        slot_mapping=slots[0],
        by_group=(),
        query_start_loc=query_start_loc,
        max_query_len=int(lens.max()),
        num_decodes=int(np.logical_and.accumulate(lens == 1).sum()),
        adapters=adapters,
    )
    tables = [each.block_tables for each in metadata.by_group]
    return WantedTokens(places, with_groups(alone, slots, tables))


def places_before_sampled(
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
