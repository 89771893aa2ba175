"""Captures decode steps as CUDA graphs, one per batch size, and replays them.

A graph always runs the same kernels on the same addresses. Inputs are uploaded to fixed addresses
in one copy. Block tables are already on the device, in `DeviceTables`, and are copied from there.
The graph's logits and most likely tokens appear at fixed addresses, too. A graph also fixes the
arguments of its kernels, so the kernels read the lengths of the sequences from the device's memory.
A step with fewer sequences than its graph is filled up with *padding rows* of length 0. Their KV is
stored nowhere, and their results are ignored.

Symbols: `S` sequences of a graph, `N` sequences of a step, `G` KV groups, `M` blocks of the longest
block table, `E` hidden size, `V` vocabulary size.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from contract.worker_limits import Limits
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.memory.transfer import packed_bytes, upload, upload_into
from gpu_worker.models.attention import AttentionMetadata, Decoder
from gpu_worker.step.graphs.cuda_graphs import Between, GraphBackend, do_nothing
from gpu_worker.step.graphs.device_tables import DeviceTables
from gpu_worker.step.input_batch import with_groups
from gpu_worker.step.rows import Rows, ScheduledRows
from gpu_worker.step.shared_prefixes import find_shared
from kernels import PAD_SLOT, ops
from kernels.sequences import SharedPrefixes

_STEP = 8
_T = TypeVar("_T")


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes that get a graph, ascending; the last is `max_num_seqs`.

    The sizes double up to 8, then grow by 8, and from 128 on by an eighth, which keeps both the
    padding and the number of captures low.
    """
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size += size if size < _STEP else max(_STEP, size // _STEP // _STEP * _STEP)
    return (*sizes, max_num_seqs)


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """The results of a graph."""

    hidden: torch.Tensor
    """`[N, E]`: the final hidden states."""
    rows: torch.Tensor
    """int64[N]: the row of each sequence."""
    logits: torch.Tensor
    """`[N, V]`."""
    likeliest: tuple[torch.Tensor, torch.Tensor] | None
    """The result of `ops.greedy` for the logits; None in all pipeline stages but the last."""


class DecodeGraphs:
    """Computes steps in which every sequence decodes. Used by one thread.

    Callers are in `torch.inference_mode()`, on the CUDA stream of all other computation. Each step
    overwrites the inputs and results of the step before.
    """

    def __init__(
        self,
        model: Decoder,
        pool: Any,
        limits: Limits,
        last_token_ids: torch.Tensor,
        adapters: AdapterSlots | None = None,
        *,
        shares_prefixes: bool = False,
    ) -> None:
        """Allocate the graphs' inputs and outputs, at fixed addresses.

        Args:
            model: The model; graphs compute its forward pass and its logits.
            pool: The KV memory.
            limits: The worker's limits.
            last_token_ids: int64[max_num_seqs] on the device: each row's newest sampled token.
            adapters: The slots of the adapters that the graphs apply; None: the graphs are for rows
                without adapters.
            shares_prefixes: Whether sequences attend once to blocks that they share; possible only
                with one KV group.
        """
        self._shares_prefixes = shares_prefixes
        self._model = model
        self._pool = pool
        self._block_size = limits.block_size
        self._last_token_ids = last_token_ids
        self._adapters = adapters
        self.sizes = graph_sizes(limits.max_num_seqs)
        self._replays: dict[int, Callable[[], object]] = {}
        num_rows = limits.max_num_seqs
        self._num_groups = len(limits.kv_windows)
        device = last_token_ids.device
        self._tables = DeviceTables(limits, device)
        self._max_news = num_rows * self._num_groups  # the most that one step appends
        most = [
            *self._padding(num_rows),
            *(np.empty(self._max_news, dtype) for dtype in (np.int64, np.int32)),
        ]
        self._inputs = torch.zeros(packed_bytes(most), dtype=torch.uint8, device=device)
        self._block_tables = torch.zeros(  # [G, max_num_seqs, M]
            self._num_groups, num_rows, limits.max_blocks_per_row, dtype=torch.int32, device=device
        )
        self._query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        # Hidden states, and what `ops.greedy` found in their logits. Empty before the first run,
        # which has the largest size.
        self._results: tuple[torch.Tensor, ...] = ()
        self._logits: dict[int, torch.Tensor] = {}  # by size, in the graphs' own memory

    def capture(self, backend: GraphBackend, report: Callable[[float], None]) -> None:
        """Capture all sizes, and report the fraction done; errors of the backend pass through.

        The largest size is captured first, because all smaller sizes can use its memory.
        """
        for done, size in enumerate(reversed(self.sizes)):
            report(done / len(self.sizes))
            self._replays[size] = backend.capture(self._computation(size, backend))

    def rehearse(self) -> None:
        """Compute a step of the largest size without a graph, for measuring its memory."""
        self._computation(self.sizes[-1], None)(lambda work: work())

    def takes(self, scheduled: ScheduledRows) -> bool:
        """Whether all sequences of the step decode."""
        return 0 < scheduled.num_decodes == len(scheduled.rows)

    def replay(
        self,
        rows: Rows,
        scheduled: ScheduledRows,
        before_launch: Callable[[], None] = do_nothing,
    ) -> Decoded:
        """Compute a step for which `takes` is true, without waiting for the device.

        Args:
            rows: The rows, after `apply`.
            scheduled: The result of `apply`.
            before_launch: Called right before the graph is launched.

        Returns:
            The results, on the device; valid until the next step.
        """
        num_seqs = len(scheduled.rows)
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        positions = scheduled.starts  # [N]: a decode's only token
        blocks = rows.blocks_of(scheduled.rows, positions // self._block_size).astype(np.int64)
        width = int(positions.max()) // self._block_size + 1
        row_numbers, places, seq_lens, *rest = inputs = self._padding(size)
        slot_mappings, shared, _ = self._parted(rest)
        row_numbers[:num_seqs] = scheduled.rows
        places[:num_seqs] = positions
        seq_lens[:num_seqs] = positions + 1
        offsets = positions % self._block_size
        for group, slot_mapping in enumerate(slot_mappings):
            of_group = blocks[group :: self._num_groups]
            slot_mapping[:num_seqs] = of_group * self._block_size + offsets
        if self._adapters is not None:
            inputs[-2:] = self._adapters.group(rows.adapter[scheduled.rows], size)
        if shared:
            tables = rows.block_tables[scheduled.rows, :width]  # [N, width]; there is one group
            found = find_shared(tables, seq_lens[:num_seqs], self._block_size)
            for padded, array in zip(shared, found, strict=True):
                padded[: len(array)] = array
        news = self._tables.news(rows, scheduled.rows)
        if news and len(news[0]) > self._max_news:  # some rows are new on the device
            self._tables.write(*upload(news, self._inputs.device))
            news = ()
        on_device = upload_into(self._inputs, [*inputs, *news])
        if news:
            self._tables.write(*on_device[-2:])
        self._tables.know(rows, scheduled.rows)
        # The step's tables are narrower than the graphs': columns beyond `width` are stale, and
        # never read.
        self._tables.gather(on_device[0][:num_seqs], self._block_tables[:, :num_seqs, :width])
        before_launch()
        self._replays[size]()
        hidden, *maxima = (each[:num_seqs] for each in self._results)
        likeliest = (maxima[0], maxima[1]) if maxima else None
        return Decoded(hidden, on_device[0][:num_seqs], self._logits[size][:num_seqs], likeliest)

    def _computation(self, size: int, backend: GraphBackend | None) -> Callable[[Between], None]:
        """Return the computation of a graph with S = `size`, from inputs to likeliest tokens."""
        rows, positions, seq_lens, *rest = upload_into(self._inputs, self._padding(size))
        slots, shared, grouping = self._parted(rest)
        adapters = None if self._adapters is None else self._adapters.onto_tokens(*grouping)
        tables = [of_group[:size] for of_group in self._block_tables]

        def compute(_: Between) -> None:
            # The metadata is made within the capture, and so is the workspace of its kernels.
            metadata = AttentionMetadata(
                slot_mapping=slots[0],
                block_tables=tables[0],
                seq_lens=seq_lens,
                query_start_loc=self._query_start_loc[: size + 1],
                max_query_len=1,
                num_decodes=size,
                adapters=adapters,
                shared=SharedPrefixes(*shared) if shared else None,
            )
            metadata = with_groups(metadata, slots, tables)
            token_ids = self._last_token_ids.index_select(0, rows)
            hidden = self._model.forward(token_ids, positions, self._pool, metadata)
            logits = self._model.logits(hidden)
            self._logits[size] = logits if backend is None else backend.alias(logits)
            results = [hidden]
            if logits.shape[1]:  # only the last stage of a pipeline has logits
                results += ops.greedy(logits)
            if not self._results:
                num_rows = self.sizes[-1]
                self._results = tuple(each.new_empty(num_rows, *each.shape[1:]) for each in results)
            for result, each in zip(self._results, results, strict=True):
                result[:size].copy_(each)

        return compute

    def _parted(self, rest: list[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """Split `rest`, the inputs after the lengths, into slots, shared prefixes and adapters."""
        end = len(rest) - (0 if self._adapters is None else 2)
        return rest[: self._num_groups], rest[self._num_groups : end], rest[end:]

    def _padding(self, size: int) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """Make the inputs of padding rows: rows and positions int64[S], lengths int32[S], slots.

        The slots are one int64[S] per KV group. If prefixes are shared, the fields of
        `SharedPrefixes` follow. If there are adapters, the results of `AdapterSlots.group` come
        last.
        """
        shared: list[np.ndarray[Any, np.dtype[Any]]] = []
        if self._shares_prefixes:
            nothing = np.zeros((size, 1), np.int32), np.zeros(size, np.int32)
            shared = list(find_shared(*nothing, self._block_size))
        no_rows = np.empty(0, np.int64)
        grouping = () if self._adapters is None else self._adapters.group(no_rows, size)
        return [
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.zeros(size, np.int32),
            *(np.full(size, PAD_SLOT, np.int64) for _ in range(self._num_groups)),
            *shared,
            *grouping,
        ]
