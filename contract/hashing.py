"""Hashes the content of blocks, so that the prefix cache can find equal prefixes.

Hashes are chained: the hash of a block covers its tokens and all tokens before them. The encoding
is canonical, so any process in any language computes the same hash:

    root       = sha256("quire.v1.prefix" 0x00 salt)              salt in UTF-8
    hash(b)    = sha256(hash(b - 1) tokens(b))                    tokens as int32, little-endian

with `hash(-1) = root`. Only requests with equal salts share blocks. A block's *parent* is the block
before it.

A model with several KV groups has one block per group for the same tokens. hash(b) is the hash of
the block of group 0. The hash of the block of group g > 0 is sha256(hash(b) g), with g in one byte.

The hash of a partial block is computed like hash(b), from the tokens that the block has. This hash
differs from the hash of every full block, because a full block has more tokens.

Hashes are never shortened, since a collision would show one client the text of another client.
"""

from functools import lru_cache
from hashlib import sha256
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 32
NO_HASH = BlockHash(bytes(HASH_BYTES))
"""In KV events, the parent hash of a prompt's first block, and of a block with an unknown parent.
"""
_GROUPS: Final = [bytes((group,)) for group in range(2**8)]


def split_hashes(packed: bytes) -> list[BlockHash]:
    """Split a message's field that contains several hashes, one after another."""
    starts = range(0, len(packed), HASH_BYTES)
    return [BlockHash(packed[start : start + HASH_BYTES]) for start in starts]


@lru_cache(maxsize=1024)
def root_hash(salt: str) -> BlockHash:
    """Return the parent hash of the first block of each sequence with this `salt`."""
    return BlockHash(sha256(b"quire.v1.prefix\0" + salt.encode()).digest())


def next_hash(parent: BlockHash, token_bytes: bytes) -> BlockHash:
    """Return the hash of a block from its parent's hash and its tokens, as little-endian int32."""
    # The digest is not wrapped in `BlockHash(...)`: the call would take a tenth of this function's
    # time.
    return sha256(parent + token_bytes).digest()  # type: ignore[return-value]


def group_hash(name: BlockHash, group: int) -> BlockHash:
    """Return the hash of a block of KV group `group`; `name` is the hash(b) of the same tokens."""
    # Not wrapped in `BlockHash(...)`, as in `next_hash`.
    return sha256(name + _GROUPS[group]).digest() if group else name  # type: ignore[return-value]


def tail_hash(
    chain: list[BlockHash],
    root: BlockHash,
    token_ids: npt.NDArray[np.int32],
    end: int,
    block_size: int,
) -> BlockHash:
    """Return the hash of the partial block that ends with token `end` - 1.

    `chain` has at least the hashes of the full blocks before the partial block.
    """
    num_full = end // block_size
    tail = token_ids[num_full * block_size : end].astype("<i4", copy=False).tobytes()
    return next_hash(chain[num_full - 1] if num_full else root, tail)


def extend_chain(
    chain: list[BlockHash], root: BlockHash, token_ids: npt.NDArray[np.int32], block_size: int
) -> None:
    """Extend `chain` to the hashes of all full blocks of `token_ids`.

    Args:
        chain: Hashes of the first `len(chain)` blocks; extended in place.
        root: The root hash of the salt, which is the parent hash of block 0.
        token_ids: int32[N], the sequence's tokens from the first one.
        block_size: Tokens of one block.
    """
    first, end = len(chain), len(token_ids) // block_size
    if first >= end:
        return
    data = token_ids[first * block_size : end * block_size].astype("<i4", copy=False).tobytes()
    parent = chain[-1] if chain else root
    stride = 4 * block_size
    for start in range(0, len(data), stride):
        parent = next_hash(parent, data[start : start + stride])
        chain.append(parent)
