"""The right hashes of a block: of its whole content, or of its first slots. A hash of first slots
labels a swapped sequence's last block, so that another scheduler finds it.
"""

from functools import lru_cache

import numpy as np

from contract.hashing import extend_chain, group_hash, root_hash, tail_hash
from tests.property.disk import Content


@lru_cache(maxsize=100_000)
def is_name_of(name: bytes, content: Content, root: bytes | None = None) -> bool:
    """Whether a hash is right for a block's content, with its salt or as the child of `root`."""
    return any(_name_of_first(content, end, root) == name for end in range(len(content), 0, -1))


def _name_of_first(content: Content, end: int, root: bytes | None) -> bytes | None:
    """Return the hash of a block's first `end` slots, if they are consecutive."""
    size, last = len(content), content[end - 1] or (None,)
    salt, *tokens = last
    is_its_place = len(tokens) >= end and len(tokens) % size == end % size
    if not is_its_place or content[:end] != tuple(last[: len(last) - n] for n in range(end)[::-1]):
        return None
    chain, ids = [], np.array(tokens, np.int32)
    salt, group = salt if isinstance(salt, tuple) else (salt, 0)
    root = root or root_hash(str(salt))
    extend_chain(chain, root, ids, size)
    name = chain[-1] if end == size else tail_hash(chain, root, ids, len(ids), size)
    return group_hash(name, group)


def in_group(salt: str, group: int) -> object:
    """Return the mark of a salt in the contents of a KV group."""
    return (salt, group) if group else salt
