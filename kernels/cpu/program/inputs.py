"""The inputs of a step of `NativeDecoder`, and their names in the calls of the decoder's programs.

Symbols: `T` tokens, `N` of them whose final hidden states are wanted, `S` sequences, `E` hidden
size, `P` block size, `M` blocks of the longest block table.
"""

from dataclasses import dataclass
from enum import StrEnum, auto

import torch

from kernels.checks import check_tensor
from kernels.cpu.program.low_rank import RowAdapters


class StepField(StrEnum):
    """The names by which a program's calls refer to the numbers that change with each step."""

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
    """The address of `NativeWanted.places`."""
    WANTED_START_LOC = auto()
    """The address of `NativeWanted.query_start_loc`."""
    ADAPTERS = auto()
    """The address of the `RowAdapters` of all tokens."""
    WANTED_ADAPTERS = auto()
    """The address of the `RowAdapters` of the wanted tokens."""
    OUT = auto()
    """The address to which the final hidden states are written."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeWanted:
    """The tokens whose final hidden states are wanted: the last tokens of some sequences."""

    places: torch.Tensor
    """int64[N]: the indices of the wanted tokens among the step's tokens, ascending."""
    query_start_loc: torch.Tensor
    """int32[S + 1]: where each sequence's tokens start among the wanted tokens."""
    adapters: RowAdapters | None = None
    """The adapters of the wanted tokens; None if the step has no adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeInputs:
    """The batch of one step, in contiguous tensors on the CPU."""

    hidden: torch.Tensor
    """bfloat16[T, E]: the tokens' embeddings."""
    positions: torch.Tensor
    """int64[T]: the position of each token in its sequence."""
    slot_mapping: torch.Tensor
    """int64[T]: the slot of each token's KV, or PAD_SLOT (`kernels`)."""
    block_tables: torch.Tensor
    """int32[S, M]: the blocks of each sequence."""
    seq_lens: torch.Tensor
    """int32[S]: the length of each sequence."""
    query_start_loc: torch.Tensor
    """int32[S + 1]: where each sequence's tokens start in the batch."""
    wanted: NativeWanted | None = None
    """The tokens whose final hidden states are wanted; None: all tokens."""
    adapters: RowAdapters | None = None
    """The adapters of the step's tokens; None: no token has an adapter."""

    @property
    def num_wanted(self) -> int | None:
        """N, the number of wanted tokens; None: all tokens are wanted."""
        return None if self.wanted is None else len(self.wanted.places)

    @property
    def max_ranks(self) -> int:
        """The highest rank of the step's adapters; 0: the step has no adapters."""
        return 0 if self.adapters is None else self.adapters.max_ranks

    @property
    def numbers(self) -> dict[str, int]:
        """The step's value of each `StepField` that it uses, except OUT."""
        numbers: dict[str, int] = {
            StepField.NUM_TOKENS: len(self.hidden),
            StepField.NUM_SEQS: len(self.seq_lens),
            StepField.TABLE_STRIDE: self.block_tables.stride(0),
            StepField.HIDDEN: self.hidden.data_ptr(),
            StepField.POSITIONS: self.positions.data_ptr(),
            StepField.SLOT_MAPPING: self.slot_mapping.data_ptr(),
            StepField.BLOCK_TABLES: self.block_tables.data_ptr(),
            StepField.SEQ_LENS: self.seq_lens.data_ptr(),
            StepField.QUERY_START_LOC: self.query_start_loc.data_ptr(),
        }
        if self.adapters is not None:
            numbers[StepField.ADAPTERS] = self.adapters.address
        if (wanted := self.wanted) is not None:
            numbers[StepField.NUM_WANTED] = len(wanted.places)
            numbers[StepField.PLACES] = wanted.places.data_ptr()
            numbers[StepField.WANTED_START_LOC] = wanted.query_start_loc.data_ptr()
            if wanted.adapters is not None:
                numbers[StepField.WANTED_ADAPTERS] = wanted.adapters.address
        return numbers

    def check(self, hidden_size: int) -> None:
        """Raise ValueError if a tensor does not have the documented shape, dtype or strides."""
        num_tokens, (num_seqs, width) = len(self.hidden), self.block_tables.shape
        tensors = [
            ("hidden", self.hidden, torch.bfloat16, (num_tokens, hidden_size)),
            ("positions", self.positions, torch.int64, (num_tokens,)),
            ("slot_mapping", self.slot_mapping, torch.int64, (num_tokens,)),
            ("block_tables", self.block_tables, torch.int32, (num_seqs, width)),
            ("seq_lens", self.seq_lens, torch.int32, (num_seqs,)),
            ("query_start_loc", self.query_start_loc, torch.int32, (num_seqs + 1,)),
        ]
        adapters = [("adapters", self.adapters, num_tokens)]
        if (wanted := self.wanted) is not None:
            starts, num_wanted = wanted.query_start_loc, len(wanted.places)
            tensors += [
                ("wanted.places", wanted.places, torch.int64, (num_wanted,)),
                ("wanted.query_start_loc", starts, torch.int32, (num_seqs + 1,)),
            ]
            adapters.append(("wanted.adapters", wanted.adapters, num_wanted))
        for name, tensor, dtype, shape in tensors:
            check_tensor(name, tensor, shape, dtype, self.hidden)
        for name, given, num_rows in adapters if self.adapters is not None else ():
            if given is None or given.num_tokens != num_rows:
                of = "none" if given is None else f"those of {given.num_tokens}"
                raise ValueError(f"{name} is {of}, required are those of {num_rows} tokens")
