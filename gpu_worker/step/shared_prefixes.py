"""Finds sequences of a decode step that begin with the same blocks.

Symbols: `S` sequences, `M` blocks of the longest block table, `P` block size.
"""

from typing import Final

import numpy as np

from contract.arrays import Int32Array, Int64Array
from kernels.sequences import MAX_SHARED

LEAST_TOKENS: Final = 512
"""A shorter shared prefix is not worth another kernel launch. Not measured."""


def find_shared(
    tables: Int32Array, seq_lens: Int32Array, block_size: int
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Return the fields of `kernels.sequences.SharedPrefixes`, as arrays.

    A group is a set of sequences that begin with the same blocks, for at least `LEAST_TOKENS`
    tokens. The shared prefix ends before the first block in which the group's sequences differ. If
    there are more than `MAX_SHARED` groups, the groups that save the most reads are kept.

    Args:
        tables: int32[S, M]; entries beyond a sequence's end may have any value.
        seq_lens: int32[S]: the number of tokens of each sequence, including this step's; 0 for
            padding.
        block_size: P.
    """
    num_seqs, width = tables.shape
    seqs, len_of_seq = np.zeros(num_seqs, np.int32), np.zeros(num_seqs, np.int32)
    starts, lens = np.zeros(MAX_SHARED + 1, np.int32), np.zeros(MAX_SHARED, np.int32)
    least = -(-LEAST_TOKENS // block_size)
    # A sequence never shares its newest token.
    long = np.flatnonzero(seq_lens > least * block_size)
    if len(long) > 1 and width > least:
        found = _groups(tables, seq_lens, long, least, block_size)
        found.sort(key=lambda group: -(len(group[0]) - 1) * group[1])
        end = 0
        for number, (members, num_tokens) in enumerate(found[:MAX_SHARED]):
            seqs[end : end + len(members)] = members
            end += len(members)
            starts[number + 1 :] = end
            lens[number] = len_of_seq[members] = num_tokens
    return seqs, starts, lens, len_of_seq


def _groups(
    tables: Int32Array, seq_lens: Int32Array, long: Int64Array, least: int, block_size: int
) -> list[tuple[Int64Array, int]]:
    """Return groups of sequences, each with the number of tokens that its sequences share."""
    last = tables[long, least - 1]
    order = np.argsort(last, kind="stable")
    cuts = np.flatnonzero(np.diff(last[order])) + 1
    groups = []
    for members in np.split(long[order], cuts):
        if len(members) == 1:
            continue
        most = int(seq_lens[members].min() - 1) // block_size
        differs = (tables[members, :most] != tables[members[0], :most]).any(0)
        num_blocks = int(differs.argmax()) if differs.any() else most
        if num_blocks >= least:
            groups.append((members, num_blocks * block_size))
    return groups
