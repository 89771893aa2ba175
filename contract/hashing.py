"""Names the content of a full block so that equal prefixes are found again.

The hash of a block is chained: it names the block's tokens and all tokens before them. The encoding
is canonical, so that any process in any language computes the same:

    root       = sha256("quire.v1.prefix" 0x00 salt)              salt in UTF-8
    hash(b)    = sha256(hash(b - 1) tokens(b))                    tokens as int32, little-endian

with `hash(-1) = root`. A partial block has a name of the same form, over the tokens that it has: no
full block can have that, since it has more. Every hash is the full 32 bytes: a collision would show
one client another's text, so there is no shorter form.
"""

from functools import lru_cache
from hashlib import sha256
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 32


@lru_cache(maxsize=1024)
def root_hash(salt: str) -> BlockHash:
    """Return the parent of every first block under `salt`."""
    return BlockHash(sha256(b"quire.v1.prefix\0" + salt.encode()).digest())


def next_hash(parent: BlockHash, token_bytes: bytes) -> BlockHash:
    """Return the hash of the block after `parent`, whose tokens are little-endian int32."""
    return BlockHash(sha256(parent + token_bytes).digest())


def tail_hash(
    chain: list[BlockHash],
    root: BlockHash,
    token_ids: npt.NDArray[np.int32],
    end: int,
    block_size: int,
) -> BlockHash:
    """Return the name of the partial block that holds the last of the first `end` tokens.

    `chain` has the hashes of the full blocks before it, at least.
    """
    num_full = end // block_size
    tail = token_ids[num_full * block_size : end].astype("<i4", copy=False).tobytes()
    return next_hash(chain[num_full - 1] if num_full else root, tail)


def extend_chain(
    chain: list[BlockHash], root: BlockHash, token_ids: npt.NDArray[np.int32], block_size: int
) -> None:
    """Append to `chain` the hashes of the full blocks of `token_ids` that it lacks.

    Args:
        chain: Hashes of the first `len(chain)` blocks; extended in place.
        root: The salt's root, parent of block 0.
        token_ids: int32[N], the sequence's tokens from its beginning.
        block_size: Tokens of one block.
    """
    first, end = len(chain), len(token_ids) // block_size
    if first >= end:
        return
    data = token_ids[first * block_size : end * block_size].astype("<i4", copy=False).tobytes()
    parent: bytes = chain[-1] if chain else root
    stride = 4 * block_size
    for start in range(0, len(data), stride):
        parent = sha256(parent + data[start : start + stride]).digest()
        chain.append(BlockHash(parent))
