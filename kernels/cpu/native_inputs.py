"""What a native decoder computes in one step.

Symbols: `T` tokens, `S` sequences, `E` hidden size, `P` block size, `M` blocks of the longest block
table.
"""

from dataclasses import dataclass
from typing import Final

import torch

from kernels.checks import check_tensor

_DTYPE: Final = torch.bfloat16
_UNPADDED: Final = ("hidden", "positions", "slot_mapping", "seq_lens", "query_start_loc")
"""Those of `NativeInputs` whose shapes follow from T and S."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeInputs:
    """One step's batch; on the CPU, contiguous."""

    hidden: torch.Tensor
    """bfloat16[T, E]: the tokens' embeddings."""
    positions: torch.Tensor
    """int64[T]."""
    slot_mapping: torch.Tensor
    """int64[T]: `block * P + offset`, or PAD_SLOT."""
    block_tables: torch.Tensor
    """int32[S, M]."""
    seq_lens: torch.Tensor
    """int32[S]."""
    query_start_loc: torch.Tensor
    """int32[S + 1]."""

    def check(self, hidden_size: int) -> None:
        """Raise ValueError if C would read something else than what the fields say."""
        num_tokens, (num_seqs, width) = self.hidden.shape[0], self.block_tables.shape
        check_tensor("hidden", self.hidden, (num_tokens, hidden_size), _DTYPE, self.hidden)
        for name, dtype, shape in (
            ("positions", torch.int64, (num_tokens,)),
            ("slot_mapping", torch.int64, (num_tokens,)),
            ("block_tables", torch.int32, (num_seqs, width)),
            ("seq_lens", torch.int32, (num_seqs,)),
            ("query_start_loc", torch.int32, (num_seqs + 1,)),
        ):
            check_tensor(name, getattr(self, name), shape, dtype, self.hidden)

    def copied(self, width: int) -> "NativeInputs":
        """The same in memory of its own, with room for tables of `width` blocks."""
        room = self.block_tables.new_zeros(len(self.block_tables), width)
        room[:, : self.block_tables.shape[1]] = self.block_tables
        others = (getattr(self, name).clone() for name in _UNPADDED)
        return NativeInputs(block_tables=room, **dict(zip(_UNPADDED, others, strict=True)))

    def fill(self, inputs: "NativeInputs") -> None:
        """Take over what `inputs` of the same T and S, and tables no wider, contain."""
        self.block_tables[:, : inputs.block_tables.shape[1]] = inputs.block_tables
        for name in _UNPADDED:
            getattr(self, name).copy_(getattr(inputs, name))
