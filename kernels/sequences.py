"""The sequences whose KV a step's attention reads.

Symbols: `S` sequences, `M` max blocks per sequence.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from kernels.checks import check_tensor

MAX_SHARED: Final = 8
"""The limit on groups in `SharedPrefixes`."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Groups of a step's sequences; the sequences of a group begin with the same blocks.

    Decode attention reads these blocks once for all sequences of the group.
    `gpu_worker.step.shared_prefixes` finds the groups.
    """

    seqs: torch.Tensor
    """int32[S]: the indices of the sequences of the first group, then of the second, and so on; the
    elements after the last group are not read."""
    starts: torch.Tensor
    """int32[MAX_SHARED + 1]: where each group's sequences start in `seqs`."""
    lens: torch.Tensor
    """int32[MAX_SHARED]: how many positions the sequences of each group share, a multiple of the
    block size; 0 in each element after the last group."""
    len_of_seq: torch.Tensor
    """int32[S]: how many positions each sequence shares with its group, always fewer than the
    sequence's length; 0: the sequence has no group."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of a step; all layers use the same object, whose tensors are checked once."""

    block_tables: torch.Tensor
    """int32[S, M]: the blocks of each sequence."""
    seq_lens: torch.Tensor
    """int32[S]: the length of each sequence."""
    query_start_loc: torch.Tensor | None = None
    """int32[S + 1]: where each sequence's query tokens start; None: each sequence has one query
    token."""
    max_query_len: int = 1
    shared: SharedPrefixes | None = None
    """Prefixes that sequences share; None: attention reads each sequence's blocks separately."""
    scratch: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Scratch memory for partial results, by shape; launches use the same memory one after another.
    For a CUDA graph, the memory must be allocated within the capture, so that the graph keeps it.
    """

    def room(self, *shape: int) -> torch.Tensor:
        """Return float32 scratch memory, the same for all calls with this `shape`."""
        if shape not in self.scratch:
            device = self.seq_lens.device
            self.scratch[shape] = torch.empty(shape, dtype=torch.float32, device=device)
        return self.scratch[shape]

    def __post_init__(self) -> None:
        """Check the tensors.

        Raises:
            ValueError: shapes, dtypes, devices or strides do not fit.
        """
        num_seqs, tables = len(self.block_tables), self.block_tables
        check_tensor("block_tables", tables, tuple(tables.shape[:2]), torch.int32, tables)
        check_tensor("seq_lens", self.seq_lens, (num_seqs,), torch.int32, tables)
        starts = self.query_start_loc
        if starts is not None:
            check_tensor("query_start_loc", starts, (num_seqs + 1,), torch.int32, tables)
