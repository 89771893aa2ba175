"""Gathers the model's inputs for a step from `Rows`, the state of the running sequences.

Symbols: `T` tokens, `S` sequences, `N` sampled tokens, `M` blocks of the longest block table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from contract.arrays import Int32Array, Int64Array
from contract.worker_limits import Chunk
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.lora.step_adapters import NO_ADAPTERS, step_adapters
from gpu_worker.memory.transfer import upload
from gpu_worker.models.attention import AttentionMetadata, WantedTokens
from gpu_worker.models.decoder_layer import LayerAdapters
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
    """`metadata.wanted` selects the tokens right before sampled tokens; None: these are all of the
    step's tokens."""
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
    """int32[S + 1]: where each sequence's tokens start among the step's tokens."""
    max_query_len: int
    slots: tuple[Int64Array, ...]
    """By KV group: int64[T]."""
    tables: tuple[Int32Array, ...]
    """By KV group: int32[S, M]."""
    pieces: tuple["ChunkPieces | None", ...]
    """By KV group: the pieces of sequences, or None if the group has no chunked attention. If a
    group has pieces, its entry in `tables` has a block table for each piece, not for each
    sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPieces:
    """A step's sequences, cut where attention chunks end.

    Chunked attention treats each piece as a sequence.

    Symbols: `C` pieces.
    """

    seq_lens: Int32Array
    """int32[C]: tokens from the beginning of the piece's chunk to the end of the piece."""
    starts: Int32Array
    """int32[C + 1]: where each piece's tokens start in the step."""
    seqs: Int64Array
    """int64[C]: the sequence of each piece."""
    first_blocks: Int64Array
    """int64[C]: the index of the chunk's first block in the sequence's block table."""

    def tables(self, tables: Int32Array, block_size: int) -> Int32Array:
        """Return int32[C, M]: each piece's block table, from the first block of its chunk on."""
        width = -(-int(self.seq_lens.max()) // block_size)
        indices = self.first_blocks[:, None] + np.arange(width)
        # Entries beyond a sequence's end are not read.
        indices = np.minimum(indices, tables.shape[1] - 1)
        of_pieces: Int32Array = tables[self.seqs[:, None], indices]
        return of_pieces


def cut_at_chunks(
    firsts: Int64Array, lens: Int64Array, chunk_size: int, block_size: int
) -> ChunkPieces:
    """Cut a step's tokens into pieces, each within one chunk of chunked attention.

    Args:
        firsts: int64[S]: the number of each sequence's tokens before the step.
        lens: int64[S]: the number of each sequence's tokens in the step; may be 0.
        chunk_size: Number of tokens in a chunk; a multiple of `block_size`.
        block_size: Token slots of a block.
    """
    first_chunks, ends = firsts // chunk_size, firsts + lens
    num_pieces = np.where(lens > 0, -(-ends // chunk_size) - first_chunks, 0)
    seqs = np.repeat(np.arange(len(lens)), num_pieces)
    within = np.arange(len(seqs)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    begins = (first_chunks[seqs] + within) * chunk_size
    piece_ends = np.minimum(ends[seqs], begins + chunk_size)
    starts = np.zeros(len(seqs) + 1, np.int32)
    np.cumsum(piece_ends - np.maximum(firsts[seqs], begins), out=starts[1:])
    return ChunkPieces((piece_ends - begins).astype(np.int32), starts, seqs, begins // block_size)


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
    pieces: list[ChunkPieces | None] = []
    for group, window in enumerate(rows.windows):
        blocks = rows.block_tables[row_of_token, places * num_groups + group].astype(np.int64)
        slots.append(blocks * block_size + offsets)
        table, of_group = rows.block_tables[scheduled.rows, group:width:num_groups], None
        if isinstance(window, Chunk):
            of_group = cut_at_chunks(scheduled.starts, lens, window.num_tokens, block_size)
            table = of_group.tables(table, block_size)
        tables.append(table)
        pieces.append(of_group)
    return HostInputs(
        row_of_token,
        positions,
        seq_lens.astype(np.int32),
        starts,
        max_query_len,
        tuple(slots),
        tuple(tables),
        tuple(pieces),
    )


def build_input_batch(
    rows: Rows,
    scheduled: ScheduledRows,
    last_token_ids: torch.Tensor,
    block_size: int,
    *,
    is_all_known: bool = False,
    adapters: Mapping[int, Adapter] = NO_ADAPTERS,
    slots: AdapterSlots | None = None,
) -> InputBatch:
    """Gather a step's inputs, without waiting for the device.

    Args:
        rows: The rows, after `Rows.apply` for this step.
        scheduled: The result of `Rows.apply`; has at least one token.
        last_token_ids: int64[max_num_seqs] on the device: each row's newest sampled token.
        block_size: Token slots of a block.
        is_all_known: Whether `rows` has the ids of all of the step's tokens. If not, the ids of
            decoding rows are read from `last_token_ids`.
        adapters: The worker's adapters, by number.
        slots: The adapters' slots on a GPU.
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
    pieces = [each for each in host.pieces if each is not None]
    for each in pieces:
        arrays += [each.seq_lens, each.starts]
    numbers = rows.adapter[host.row_of_token] if adapters else _NONE  # [T]
    of_all = step_adapters(numbers, adapters, last_token_ids.device, slots)
    of_wanted_ones: LayerAdapters | None = None
    wanted_starts: Int32Array | None = None
    of_pieces: list[Int64Array] = []
    if len(scheduled.sampling) < len(positions):
        places, wanted_starts = places_before_sampled(scheduled, host.starts)
        if of_all is not None:
            of_wanted_ones = step_adapters(numbers[places], adapters, last_token_ids.device, slots)
        arrays += [places, wanted_starts, *(of_group[places] for of_group in host.slots)]
        # The wanted tokens of a piece are its last ones.
        of_pieces = [np.searchsorted(places, each.starts) for each in pieces]
        arrays += [each.astype(np.int32) for each in of_pieces]
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
    num_pieces = 2 * num_groups + 2 * len(pieces)
    pieces_t, of_wanted = by_group[2 * num_groups : num_pieces], by_group[num_pieces:]
    metadata = AttentionMetadata(
        slot_mapping=slots_t[0],
        block_tables=tables_t[0],
        seq_lens=seq_lens_t,
        query_start_loc=query_start_loc,
        max_query_len=host.max_query_len,
        num_decodes=scheduled.num_decodes,
        adapters=of_all,
    )
    metadata = with_groups(metadata, slots_t, tables_t, has_chunks=bool(pieces))
    chunked = [group for group, each in enumerate(host.pieces) if each is not None]
    cut = {
        group: replace(metadata.by_group[group], seq_lens=seq_lens, query_start_loc=starts)
        for group, seq_lens, starts in zip(chunked, pieces_t[::2], pieces_t[1::2], strict=True)
    }
    metadata = _with_pieces(metadata, cut)
    if wanted_starts is not None:
        wanted = _wanted(metadata, wanted_starts, of_wanted_ones, *of_wanted[: 2 + num_groups])
        starts_t = zip(chunked, of_wanted[2 + num_groups :], of_pieces, strict=True)
        cut = {
            group: replace(
                wanted.metadata.by_group[group],
                seq_lens=cut[group].seq_lens,
                query_start_loc=starts,
                num_decodes=_num_decodes(of_piece),
            )
            for group, starts, of_piece in starts_t
        }
        wanted = replace(wanted, metadata=_with_pieces(wanted.metadata, cut))
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
    metadata: AttentionMetadata,
    slots: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    *,
    has_chunks: bool = False,
) -> AttentionMetadata:
    """Add the slots and block tables of each KV group to `metadata`.

    If there is only one group, and it has no chunked attention, `metadata` has them already.
    """
    if len(slots) == 1 and not has_chunks:
        return metadata
    by_group = tuple(
        replace(metadata, slot_mapping=of_group, block_tables=table)
        for of_group, table in zip(slots, tables, strict=True)
    )
    return replace(metadata, by_group=by_group)


def _with_pieces(
    metadata: AttentionMetadata, cut: Mapping[int, AttentionMetadata]
) -> AttentionMetadata:
    if not cut:
        return metadata
    by_group = (cut.get(group, each) for group, each in enumerate(metadata.by_group))
    return replace(metadata, by_group=tuple(by_group))


def _num_decodes(starts: Int32Array | Int64Array) -> int:
    """Return the number of leading sequences that have one token each."""
    return int(np.logical_and.accumulate(np.diff(starts) == 1).sum())


def known_token_ids(rows: Rows, row_of_token: Int64Array, positions: Int64Array) -> Int64Array:
    """Return the ids of tokens, int64[len(positions)], from `rows`, which must have these ids."""
    if not len(positions):
        return _NONE
    return rows.token_ids[row_of_token, positions].astype(np.int64)


def _wanted(
    metadata: AttentionMetadata,
    starts: Int32Array,  # [S + 1]: where each sequence's tokens start among all wanted ones
    adapters: LayerAdapters | None,
    places: torch.Tensor,
    query_start_loc: torch.Tensor,
    *slots: torch.Tensor,  # by KV group
) -> WantedTokens:
    alone = replace(
        metadata,
        slot_mapping=slots[0],
        by_group=(),
        query_start_loc=query_start_loc,
        max_query_len=int(np.diff(starts).max()),
        num_decodes=_num_decodes(starts),
        adapters=adapters,
    )
    tables = [each.block_tables for each in metadata.by_group]
    return WantedTokens(places, with_groups(alone, slots, tables, has_chunks=bool(tables)))


def places_before_sampled(
    scheduled: ScheduledRows, starts: Int32Array
) -> tuple[Int64Array, Int32Array]:
    """Find the tokens of the batch after which a token is sampled.

    Args:
        scheduled: The step.
        starts: int32[S + 1], where each sequence's tokens start in the batch.

    Returns:
        int64[N], the indexes of these tokens in the batch; and int32[S + 1], where each sequence's
        part of the indexes starts.
    """
    firsts = (starts[:-1] - scheduled.starts)[scheduled.sampling]  # [N]: where position 0 would be
    lens = np.bincount(scheduled.sampling, minlength=len(scheduled.rows))
    wanted_starts = np.zeros_like(starts)
    np.cumsum(lens, out=wanted_starts[1:])
    return firsts + scheduled.positions - 1, wanted_starts
