"""The interface of a watcher of the prefix cache; see `Scheduler.watch_cache`.

A watcher provides the dicts in which the pools find blocks by hash, so it sees each change of these
dicts. Without a watcher the pools use plain dicts, and do no extra work.
"""

from enum import Enum
from typing import Any, Protocol

from contract.arrays import Int32Array
from contract.hashing import BlockHash
from scheduler_svc.core.sequence import Sequence


class CacheTier(Enum):
    """The tier of a pool; names and values are as in `quire.v1.KvTier`."""

    DEVICE = 1
    HOST = 2
    DISK = 3


class CacheWatch(Protocol):
    """Watches, from the start of a core, which blocks can be found by hash."""

    def table(self, tier: CacheTier) -> dict[BlockHash, Any]:
        """Return an empty dict; from now on the pool of `tier` uses it to find blocks by hash."""

    def on_named(self, seq: Sequence, first: int, end: int, token_ids: Int32Array) -> None:
        """Called before a running sequence's blocks at indices [first, end) are published.

        `seq.block_hashes` has the hashes of these blocks; `token_ids` is a view of all known tokens
        of the sequence.
        """
