"""What a worker holds for the next scheduler: sequences, and blocks whose content is named."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array
from contract.hashing import HASH_BYTES
from contract.step import TokenLogprob

Labels = npt.NDArray[np.uint8]
"""uint8[N, 32]: the labels of N blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldRow:
    """A sequence that had a row when the scheduler was gone."""

    identity: bytes
    token_ids: Int32Array
    """All of its tokens, sampled ones included."""
    num_computed_tokens: int
    """How many of them have their KV in the blocks; less than all."""
    block_ids: Int32Array
    has_stopped: bool
    """Whether its last token is a stop token."""
    had_logprobs: bool
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of its last tokens, in order."""
    note: bytes = b""
    """What the scheduler wanted to be told with it."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """The labelled blocks of one tier, oldest label first."""

    block_ids: Int32Array
    labels: Labels
    """Parallel to it."""


NO_BLOCKS = HeldBlocks(np.empty(0, np.int32), np.empty((0, HASH_BYTES), np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """All of it."""

    rows: tuple[HeldRow, ...] = ()
    device: HeldBlocks = NO_BLOCKS
    host: HeldBlocks = NO_BLOCKS
    disk: HeldBlocks = NO_BLOCKS
    pins: tuple[tuple[bytes, float], ...] = ()
    """Labels that the scheduler keeps, and for how many seconds more, in the order of naming."""
