"""Computes steps of few tokens with CUDA graphs, which contain everything except attention.

Except for attention, the kernels and shapes of a forward pass depend only on the number of a step's
tokens. So for some numbers of tokens, the forward pass is captured in pieces. The attention of each
layer separates two pieces, so there is one piece more than there are layers. A step of any prompts
and decodes replays the pieces for the smallest captured number that is at least the step's number
of tokens. *Padding tokens* make up the difference: their KV is stored nowhere, and their results
are ignored. Between the pieces, attention is launched for the step's sequences, without the
padding tokens.

Symbols: `T` tokens that a graph computes, `N` tokens and `S` sequences of a step, `R` rows, `E`
hidden size.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from contract.worker_limits import Limits
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.memory.transfer import packed_bytes, upload_into
from gpu_worker.models.attention import AttentionMetadata, Prepare
from gpu_worker.step.graphs.cuda_graphs import (
    Between,
    Forward,
    GraphBackend,
    PiecesError,
    do_nothing,
)
from gpu_worker.step.input_batch import (
    gather,
    known_token_ids,
    places_before_sampled,
    with_groups,
)
from gpu_worker.step.rows import Rows, ScheduledRows
from kernels import PAD_SLOT

_MAX_TOKENS: Final = 512
"""Larger steps gain nothing from graphs: with an 8B model, an H200 computes such a step for longer
than the host takes to launch its kernels. Estimated, not measured."""
_LEAST: Final = 16
_PER_DOUBLING: Final = 4


def piece_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the sizes for which graphs are captured, in tokens, ascending.

    The sizes are 8, the multiples of 16 up to 128, the multiples of 32 from there to 256, and the
    multiples of 64 from there on. The last size is `max_num_batched_tokens`, or `_MAX_TOKENS` if
    that is less. So if a step has 64 tokens or more, less than a fifth of the tokens that its
    graphs compute are padding.
    """
    most = min(max_num_batched_tokens, _MAX_TOKENS)
    sizes, size = [_LEAST // 2], _LEAST
    while size < most:
        sizes.append(size)
        size += max(_LEAST, (1 << (size.bit_length() - 1)) // _PER_DOUBLING)
    return (*(each for each in sizes if each < most), most)


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A step's results, on the device; valid until the next step."""

    hidden: torch.Tensor
    """`[N, E]`: the final hidden states of all tokens."""
    places: torch.Tensor
    """int64[*]: the index in `hidden` of the token right before each sampled token."""
    sampling_rows: torch.Tensor
    """int64[*]: the row of each sampled token."""


class PiecewiseGraphs:
    """Computes steps of few tokens. Callers use `PiecewiseGraphs` as they use `DecodeGraphs`."""

    def __init__(
        self,
        forward: Forward,
        pool: Any,
        limits: Limits,
        last_token_ids: torch.Tensor,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """See `DecodeGraphs`."""
        self._forward = forward
        self._pool = pool
        self._limits = limits
        self._last_token_ids = last_token_ids
        self._adapters = adapters
        self._num_groups = len(limits.kv_windows)
        self.sizes = piece_sizes(limits.max_num_batched_tokens)
        self._replays: dict[int, Callable[[], object]] = {}
        largest, num_rows = self.sizes[-1], limits.max_num_seqs
        most: list[npt.NDArray[Any]] = [
            *self._padding(largest),
            *(np.empty(largest, np.int64) for _ in range(2)),
            *(np.empty(num_rows + 1, np.int32) for _ in range(2)),
            *(
                np.empty((num_rows, limits.max_blocks_per_row), np.int32)
                for _ in range(self._num_groups)
            ),
        ]
        self._inputs = torch.zeros(
            packed_bytes(most), dtype=torch.uint8, device=last_token_ids.device
        )
        self._hidden: torch.Tensor | None = None  # [the largest T, E], after the first run
        self._step: AttentionMetadata | None = None
        """The metadata of the step that is replayed; None before the first step. Graphs are
        captured before the first step, so captures compute no attention."""

    def capture(self, backend: GraphBackend, report: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first; see `DecodeGraphs.capture`.

        Raises:
            PiecesError: Not every layer attends through `models.attention`, or the model does not
                return one hidden state per token.
        """
        for done, size in enumerate(reversed(self.sizes)):
            report(done / len(self.sizes))
            self.capture_size(size, backend)

    def capture_size(self, size: int, backend: GraphBackend) -> None:
        """Capture one of `sizes`; errors of the backend pass through."""
        self._replays[size] = backend.capture(self._computation(size, backend))

    def rehearse(self) -> None:
        """Compute the largest size without graphs or attention, for measuring its memory."""
        self._computation(self.sizes[-1], None)(lambda _: None)

    def takes(self, scheduled: ScheduledRows) -> bool:
        """Whether the step has at least one token, and no more than the largest of `sizes`."""
        return 0 < scheduled.num_tokens <= self.sizes[-1]

    def replay(
        self,
        rows: Rows,
        scheduled: ScheduledRows,
        before_launch: Callable[[], None] = do_nothing,
        *,
        is_all_known: bool,
    ) -> Replayed:
        """Compute a step for which `takes` is true, without waiting for the device.

        Args:
            rows: The rows, after `apply`.
            scheduled: The result of `apply`.
            before_launch: Called right before the first graph is launched.
            is_all_known: Whether `rows` has the ids of all of the step's tokens. If not, the ids of
                decoding rows are only on the device.
        """
        host = gather(rows, scheduled, self._limits.block_size)
        num_tokens = len(host.positions)
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        num_on_device = 0 if is_all_known else scheduled.num_decodes
        padded = self._padding(size)
        sources, given, positions, *slots = padded[: 3 + self._num_groups]
        sources[:num_on_device] = scheduled.rows[:num_on_device]
        given[num_on_device:num_tokens] = known_token_ids(
            rows, host.row_of_token[num_on_device:], host.positions[num_on_device:]
        )
        positions[:num_tokens] = host.positions
        for of_group, slot_mapping in zip(host.slots, slots, strict=True):
            slot_mapping[:num_tokens] = of_group
        if self._adapters is not None:
            padded[-2:] = self._adapters.group(rows.adapter[host.row_of_token], size)
        places, _ = places_before_sampled(scheduled, host.starts)
        sampling_rows = scheduled.rows[scheduled.sampling]
        arrays: list[npt.NDArray[Any]] = [
            *padded,
            places,
            sampling_rows,
            host.seq_lens,
            host.starts,
            *host.tables,
        ]
        on_device = upload_into(self._inputs, arrays)
        slots_t = on_device[3 : 3 + self._num_groups]
        places_t, sampling_rows_t, seq_lens, query_start_loc, *tables = on_device[len(padded) :]
        metadata = AttentionMetadata(
            slot_mapping=slots_t[0],
            block_tables=tables[0],
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            max_query_len=host.max_query_len,
            num_decodes=scheduled.num_decodes,
        )
        self._step = with_groups(metadata, slots_t, tables)
        before_launch()
        self._replays[size]()
        assert self._hidden is not None, "graphs were captured"
        return Replayed(self._hidden[:num_tokens], places_t, sampling_rows_t)

    def _computation(self, size: int, backend: GraphBackend | None) -> Callable[[Between], None]:
        """Return the computation of T = `size` tokens, from inputs to hidden states."""
        sources, given, positions, *others = upload_into(self._inputs, self._padding(size))
        slots, grouping = others[: self._num_groups], others[self._num_groups :]
        adapters = None if self._adapters is None else self._adapters.onto_tokens(*grouping)
        # A graph must not capture the values that describe the sequences. On the meta device they
        # have no values, so a model that reads them fails.
        unknown = torch.empty(2, 1, dtype=torch.int32, device="meta")
        attended: set[int] = set()

        def compute(between: Between) -> None:
            attended.clear()

            def attend_between(
                layer: int, query: torch.Tensor, out: torch.Tensor, prepare: Prepare
            ) -> None:
                attended.add(layer)
                if backend is not None:
                    query, out = backend.alias(query), backend.alias(out)
                attend_to = prepare(query, out)
                between(lambda: self._step and attend_to(self._step))

            metadata = AttentionMetadata(
                slot_mapping=slots[0],
                block_tables=unknown[:1],
                seq_lens=unknown[0],
                query_start_loc=unknown[:, 0],
                max_query_len=size,
                num_decodes=0,
                adapters=adapters,
                attend_between=attend_between,
            )
            metadata = with_groups(metadata, slots, [unknown[:1]] * len(slots))
            known = torch.cat([self._last_token_ids, given])
            token_ids = known.index_select(0, sources)
            hidden = self._forward(token_ids, positions, self._pool, metadata)
            num_layers = len(self._pool.groups.group_of)
            if len(attended) != num_layers or len(hidden) != size:
                raise PiecesError(
                    f"the forward pass of {size} tokens attends in {len(attended)} of"
                    f" {num_layers} layers, and returns hidden states of {len(hidden)} tokens"
                )
            if self._hidden is None:
                self._hidden = hidden.new_empty(self.sizes[-1], hidden.shape[1])
            self._hidden[:size].copy_(hidden)

        return compute

    def _padding(self, size: int) -> list[npt.NDArray[Any]]:
        """Make the inputs of T = `size` padding tokens: sources, token ids, positions, slots.

        Each array is int64[T]. A source says where a token's id is. Source r is the newest sampled
        token of row r, and source R + i is element i of the token ids. There are slots for each KV
        group. With adapters, the results of `AdapterSlots.group` follow.
        """
        nothing = np.empty(0, np.int64)
        grouping = () if self._adapters is None else self._adapters.group(nothing, size)
        return [
            np.arange(size) + self._limits.max_num_seqs,
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            *(np.full(size, PAD_SLOT, np.int64) for _ in range(self._num_groups)),
            *grouping,
        ]
