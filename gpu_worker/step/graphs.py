"""Decode steps captured as graphs at the start, one for each size of batch, and replayed.

A graph runs the same kernels on the same addresses. So a step's inputs are copied to where the
graphs look for them, in one copy, and its hidden states lie where the graphs leave them; kernels
read how much there is to do on the device. A step of fewer sequences than its graph has is filled
up with *padding rows*: of length 0, stored nowhere, whose results nobody reads.

Symbols: `S` sequences of a graph, `N` of a step, `M` blocks of the longest block table, `E` hidden
size.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from contract.limits import Limits
from gpu_worker.models.attention import AttentionMetadata
from gpu_worker.step.rows import Rows, ScheduledRows
from gpu_worker.step.upload import packed_bytes, upload_into
from kernels import PAD_SLOT


class Forward(Protocol):
    """What of a model a graph has: `Decoder.forward`."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: Any,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states `[T, E]`: a graph's metadata wants all."""


class GraphBackend(Protocol):
    """What captures."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], object]:
        """Capture what `compute` gives the device to do; what is returned does it again.

        `compute` is called more than once. It may raise anything if it cannot be captured.
        """


_STEP = 8


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes of batches that get a graph, ascending; the last is `max_num_seqs`.

    They double up to eight, then are eight apart, and from 128 on an eighth of themselves: steps
    are little larger than they need be, and captures few.
    """
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size += size if size < _STEP else max(_STEP, size // _STEP // _STEP * _STEP)
    return (*sizes, max_num_seqs)


class DecodeGraphs:
    """Computes steps in which every sequence decodes. One thread calls everything here.

    Callers are in `torch.inference_mode()`, and on the stream of all other computation: a step's
    inputs and results are overwritten by the next step's.
    """

    def __init__(
        self, forward: Forward, pool: Any, limits: Limits, last_token_ids: torch.Tensor
    ) -> None:
        """Take what the graphs will read and write, at the addresses that it has for good.

        Args:
            forward: the model's; captured with what it looks like now.
            pool: the KV memory.
            limits: the worker's.
            last_token_ids: int64[max_num_seqs] on the device: each row's newest sampled token.
        """
        self._forward = forward
        self._pool = pool
        self._block_size = limits.block_size
        self._last_token_ids = last_token_ids
        self._sizes = graph_sizes(limits.max_num_seqs)
        self._replays: dict[int, Callable[[], object]] = {}
        num_rows, width = limits.max_num_seqs, limits.max_blocks_per_row
        device = last_token_ids.device
        most = [*_padding(num_rows), np.empty((num_rows, width), np.int32)]
        self._inputs = torch.zeros(packed_bytes(most), dtype=torch.uint8, device=device)
        self._block_tables = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._hidden: torch.Tensor | None = None  # [max_num_seqs, E], from the first run on

    def capture(self, backend: GraphBackend, report: Callable[[float], None]) -> None:
        """Capture all sizes; `report` is told the share that is done. Whatever fails is raised.

        The largest comes first: the memory that it needs is enough for the others.
        """
        for done, size in enumerate(reversed(self._sizes)):
            report(done / len(self._sizes))
            self._replays[size] = backend.capture(self._computation(size))

    def rehearse(self) -> None:
        """Compute a step of the largest size without a graph, to see what memory it takes."""
        self._computation(self._sizes[-1])()

    def takes(self, scheduled: ScheduledRows) -> bool:
        """Whether it is a step of decodes alone."""
        return 0 < scheduled.num_decodes == len(scheduled.rows)

    def replay(self, rows: Rows, scheduled: ScheduledRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step that `takes`; nothing here waits for the device.

        Args:
            rows: the rows, after `apply`.
            scheduled: what `apply` returned.

        Returns:
            The final hidden states, `[N, E]`, and the rows they are of, int64[N]; both on the
            device, and there until the next step is.
        """
        num_seqs = len(scheduled.rows)
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        positions = scheduled.starts
        blocks = rows.block_tables[scheduled.rows, positions // self._block_size].astype(np.int64)
        width = int(positions.max()) // self._block_size + 1
        row_numbers, places, slot_mapping, seq_lens = inputs = _padding(size)
        row_numbers[:num_seqs] = scheduled.rows
        places[:num_seqs] = positions
        slot_mapping[:num_seqs] = blocks * self._block_size + positions % self._block_size
        seq_lens[:num_seqs] = positions + 1
        tables = rows.block_tables[scheduled.rows, :width]
        on_device = upload_into(self._inputs, [*inputs, tables])
        # Their width changes, the graphs' does not: what lies beyond is old, and never read.
        self._block_tables[:num_seqs, :width].copy_(on_device[-1])
        self._replays[size]()
        assert self._hidden is not None, "a graph was captured"
        return self._hidden[:num_seqs], on_device[0][:num_seqs]

    def _computation(self, size: int) -> Callable[[], None]:
        """What a graph of S = `size` has: from the inputs in their places to the hidden states."""
        rows, positions, slot_mapping, seq_lens = upload_into(self._inputs, _padding(size))
        metadata = AttentionMetadata(
            slot_mapping=slot_mapping,
            block_tables=self._block_tables[:size],
            seq_lens=seq_lens,
            query_start_loc=self._query_start_loc[: size + 1],
            max_query_len=1,
            num_decodes=size,
        )

        def compute() -> None:
            token_ids = self._last_token_ids.index_select(0, rows)
            hidden = self._forward(token_ids, positions, self._pool, metadata)
            if self._hidden is None:
                self._hidden = hidden.new_empty(self._sizes[-1], hidden.shape[1])
            self._hidden[:size].copy_(hidden)

        return compute


def _padding(size: int) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """The inputs of `size` padding rows: rows, positions, slots, int64; lengths, int32."""
    return [
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.full(size, PAD_SLOT, np.int64),
        np.zeros(size, np.int32),
    ]
