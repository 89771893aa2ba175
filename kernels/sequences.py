"""The sequences of a launch of attention."""

from dataclasses import dataclass, field
from typing import Final

import torch

from kernels.checks import check_tensor

MAX_SHARED: Final = 8
"""The largest number of groups in `SharedPrefixes`."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Groups of sequences that begin with the same blocks; decodes read these once per group.

    `gpu_worker.step.shared_prefixes` finds them.
    """

    seqs: torch.Tensor
    """int32[S]: the sequences of the first group, then of the second, and so on; the rest is not
    read."""
    starts: torch.Tensor
    """int32[MAX_SHARED + 1]: where each group's sequences start in `seqs`."""
    lens: torch.Tensor
    """int32[MAX_SHARED]: how many positions each group shares, in whole blocks; 0: no such group.
    """
    len_of_seq: torch.Tensor
    """int32[S]: how many positions each sequence shares with its group, fewer than its length; 0:
    the sequence has no group."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of a step, made and checked once for all layers."""

    block_tables: torch.Tensor
    """int32[S, M]."""
    seq_lens: torch.Tensor
    """int32[S]."""
    query_start_loc: torch.Tensor | None = None
    """int32[S + 1]; None: one token each."""
    max_query_len: int = 1
    shared: SharedPrefixes | None = None
    """None: each sequence attends to all of its blocks by itself."""
    scratch: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Scratch memory for partial results, by shape; launches use it one after another. For a CUDA
    graph, it must be allocated within the capture, so that the graph keeps the memory."""

    def room(self, *shape: int) -> torch.Tensor:
        """Return scratch memory, float32 of this shape: the same for all calls with this shape."""
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
