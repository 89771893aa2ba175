"""Block hashes equal their definition, which any language can implement."""

from hashlib import sha256

import numpy as np

from contract.hashing import (
    extend_chain,
    group_hash,
    next_hash,
    root_hash,
    split_hashes,
    tail_hash,
)

ROOT = sha256(b"quire.v1.prefix\0" + "sälz".encode()).digest()
TOKENS = np.arange(11, dtype=np.int32)


def name(parent: bytes, *tokens: int) -> bytes:
    return sha256(parent + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()


FIRST = name(ROOT, 0, 1, 2)
SECOND = name(FIRST, 3, 4, 5)
THIRD = name(SECOND, 6, 7, 8)


def test_a_chain_has_the_full_blocks_and_each_names_all_before_it():
    chain = []
    extend_chain(chain, root_hash("sälz"), TOKENS, block_size=3)
    assert chain == [FIRST, SECOND, THIRD]
    assert next_hash(FIRST, TOKENS[3:6].tobytes()) == SECOND


def test_a_chain_goes_on_from_where_it_is():
    chain = []
    for end in (2, 4, 4, 11):
        extend_chain(chain, root_hash("sälz"), TOKENS[:end], block_size=3)
        assert len(chain) == end // 3
    assert chain == [FIRST, SECOND, THIRD]


def test_a_partial_block_is_named_by_the_tokens_that_it_has():
    for chain in ([FIRST, SECOND], [FIRST, SECOND, THIRD]):  # more are known than are computed
        assert tail_hash(chain, ROOT, TOKENS, 7, block_size=3) == name(SECOND, 6)
        assert tail_hash(chain, ROOT, TOKENS, 2, block_size=3) == name(ROOT, 0, 1)
    assert tail_hash([], ROOT, TOKENS, 2, block_size=3) == name(ROOT, 0, 1)


def test_the_blocks_of_kv_groups_have_hashes_of_their_own():
    assert group_hash(FIRST, 0) == FIRST
    assert group_hash(FIRST, 2) == sha256(FIRST + bytes([2])).digest()


def test_joined_hashes_are_split():
    assert split_hashes(b"") == []
    assert split_hashes(FIRST + SECOND + THIRD) == [FIRST, SECOND, THIRD]
