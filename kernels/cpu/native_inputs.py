"""What a native decoder computes in one step.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `E` hidden
size, `P` block size, `M` blocks of the longest block table.
"""

from dataclasses import dataclass
from typing import Final

import torch

from kernels.checks import check_tensor

_DTYPE: Final = torch.bfloat16
_UNPADDED: Final = ("hidden", "positions", "slot_mapping", "seq_lens", "query_start_loc")
"""Those of `NativeInputs` whose shapes follow from T and S."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeWanted:
    """The tokens whose final hidden states are wanted: the last of each sequence, or none."""

    places: torch.Tensor
    """int64[N]: among the step's tokens, ascending."""
    query_start_loc: torch.Tensor
    """int32[S + 1]: where each sequence's start among these."""


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
    wanted: NativeWanted | None = None
    """None: all."""

    @property
    def num_wanted(self) -> int | None:
        """N; None: all."""
        return None if self.wanted is None else len(self.wanted.places)

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
        if self.wanted is not None:
            places, starts = self.wanted.places, self.wanted.query_start_loc
            check_tensor("wanted.places", places, (len(places),), torch.int64, self.hidden)
            check_tensor(
                "wanted.query_start_loc", starts, (num_seqs + 1,), torch.int32, self.hidden
            )

    def copied(self, width: int) -> "NativeInputs":
        """The same in memory of its own, with room for tables of `width` blocks."""
        room = self.block_tables.new_zeros(len(self.block_tables), width)
        room[:, : self.block_tables.shape[1]] = self.block_tables
        others = {name: getattr(self, name).clone() for name in _UNPADDED}
        wanted = self.wanted
        if wanted is not None:
            wanted = NativeWanted(wanted.places.clone(), wanted.query_start_loc.clone())
        return NativeInputs(block_tables=room, wanted=wanted, **others)

    def fill(self, inputs: "NativeInputs") -> None:
        """Take over what `inputs` of the same T, S and N, and tables no wider, contain."""
        self.block_tables[:, : inputs.block_tables.shape[1]] = inputs.block_tables
        for name in _UNPADDED:
            getattr(self, name).copy_(getattr(inputs, name))
        if self.wanted is not None:
            assert inputs.wanted is not None, "they have the same N"
            self.wanted.places.copy_(inputs.wanted.places)
            self.wanted.query_start_loc.copy_(inputs.wanted.query_start_loc)
