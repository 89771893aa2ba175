"""Which hashes name what a block holds: that of its content, and those of its first slots.

The latter are names of a swapped sequence's last block, by which another scheduler finds it.
"""

from functools import lru_cache

import numpy as np

from contract.hashing import extend_chain, root_hash, tail_hash
from tests.property.disk import Content


@lru_cache(maxsize=100_000)
def is_name_of(name: bytes, content: Content, root: bytes | None = None) -> bool:
    """Whether a hash names a block's content, for all of its salt or as the child of `root`."""
    return any(_name_of_first(content, end, root) == name for end in range(len(content), 0, -1))


def _name_of_first(content: Content, end: int, root: bytes | None) -> bytes | None:
    """Return the name of a block of which the first `end` slots count, if they are a run."""
    size, last = len(content), content[end - 1] or (None,)
    salt, *tokens = last
    is_its_place = len(tokens) >= end and len(tokens) % size == end % size
    if not is_its_place or content[:end] != tuple(last[: len(last) - n] for n in range(end)[::-1]):
        return None
    chain, ids = [], np.array(tokens, np.int32)
    root = root or root_hash(str(salt))
    extend_chain(chain, root, ids, size)
    return chain[-1] if end == size else tail_hash(chain, root, ids, len(ids), size)
