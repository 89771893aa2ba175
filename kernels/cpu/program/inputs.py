"""What a native decoder computes in one step, and what its program's calls name of that.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `E` hidden
size, `P` block size, `M` blocks of the longest block table.
"""

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

import torch

from kernels.checks import check_tensor
from kernels.cpu.program.low_rank import RowAdapters

_DTYPE: Final = torch.bfloat16


class StepField(StrEnum):
    """Names of what differs from step to step in a program's calls."""

    NUM_TOKENS = auto()
    NUM_WANTED = auto()
    NUM_SEQS = auto()
    TABLE_STRIDE = auto()
    # Addresses:
    HIDDEN = auto()
    POSITIONS = auto()
    SLOT_MAPPING = auto()
    BLOCK_TABLES = auto()
    SEQ_LENS = auto()
    QUERY_START_LOC = auto()
    PLACES = auto()
    """Of the wanted tokens."""
    WANTED_START_LOC = auto()
    """As `QUERY_START_LOC`, among the wanted tokens."""
    ADAPTERS = auto()
    """Of the tokens."""
    WANTED_ADAPTERS = auto()
    """Of the wanted tokens."""
    OUT = auto()
    """Where the final hidden states go."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeWanted:
    """The tokens whose final hidden states are wanted: the last of each sequence, or none."""

    places: torch.Tensor
    """int64[N]: among the step's tokens, ascending."""
    query_start_loc: torch.Tensor
    """int32[S + 1]: where each sequence's start among these."""
    adapters: RowAdapters | None = None
    """Of these; None if the step has none."""


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
    adapters: RowAdapters | None = None
    """None: no token has one."""

    @property
    def num_wanted(self) -> int | None:
        """N; None: all."""
        return None if self.wanted is None else len(self.wanted.places)

    @property
    def max_ranks(self) -> int:
        """The most ranks of the adapters; 0: there are none."""
        return 0 if self.adapters is None else self.adapters.max_ranks

    @property
    def numbers(self) -> dict[str, int]:
        """What `StepField` names: counts, and where the tensors are."""
        wanted = self.wanted
        numbers: dict[str, int] = {
            StepField.NUM_TOKENS: self.hidden.shape[0],
            StepField.NUM_SEQS: len(self.seq_lens),
            StepField.HIDDEN: self.hidden.data_ptr(),
            StepField.POSITIONS: self.positions.data_ptr(),
            StepField.SLOT_MAPPING: self.slot_mapping.data_ptr(),
            StepField.BLOCK_TABLES: self.block_tables.data_ptr(),
            StepField.TABLE_STRIDE: self.block_tables.stride(0),
            StepField.SEQ_LENS: self.seq_lens.data_ptr(),
            StepField.QUERY_START_LOC: self.query_start_loc.data_ptr(),
        }
        if wanted is not None:
            numbers |= {
                StepField.NUM_WANTED: len(wanted.places),
                StepField.PLACES: wanted.places.data_ptr(),
                StepField.WANTED_START_LOC: wanted.query_start_loc.data_ptr(),
            }
            if wanted.adapters is not None:
                numbers[StepField.WANTED_ADAPTERS] = wanted.adapters.address
        if self.adapters is not None:
            numbers[StepField.ADAPTERS] = self.adapters.address
        return numbers

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
            _check_adapters("wanted.adapters", self.adapters, self.wanted.adapters, len(places))
        _check_adapters("adapters", self.adapters, self.adapters, num_tokens)


def _check_adapters(
    name: str, of_step: RowAdapters | None, adapters: RowAdapters | None, num_tokens: int
) -> None:
    if of_step is not None and (adapters is None or adapters.num_tokens != num_tokens):
        of = "none" if adapters is None else f"those of {adapters.num_tokens}"
        raise ValueError(f"{name} is {of}, required are those of {num_tokens} tokens")
