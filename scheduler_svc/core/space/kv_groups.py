"""The KV groups of a model: at which places of its block table a sequence holds blocks.

A model's layers form groups of equal size; a block holds the KV of `block_size` tokens in the
layers of one group. A token's *block index* is its position divided by `block_size`, rounded down.
For each block index, the block table has one entry per group. An entry's *place* is
`index * num + group`, where `num` is the number of groups.

The layers of a group see all earlier tokens, or only a *window*: the last tokens or, with chunked
attention, the tokens since the last multiple of a fixed length. A group with a window holds blocks
at these block indices::

    [0, first)      given back, because no later token reads them
    [first, end)    held; `end` leaves room for the tokens that a prefilling sequence computes next
    [end, ..)       not allocated yet

A place without a block has the null block, which is block 0. No token reads the null block. The
core holds the null block forever, so that no sequence can allocate it.

All groups allocate from one pool, because their blocks have the same size. The hash of a block
covers both the tokens and the group, so pools, tiers and labels need not know about groups.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from contract.hashing import BlockHash, group_hash
from contract.worker_limits import STATE_WINDOW, KvWindow, first_seen, window_length
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.space.blocks import DeviceBlockId

NULL_BLOCK = DeviceBlockId(0)


class KvGroups:
    """Computes from the windows at which places of its block table a sequence holds blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num = len(config.kv_windows)
        self.is_plain = not config.has_windows
        """Whether there is only one group and it has no window; then no table has a null block."""
        self.num_null = 0 if self.is_plain else 1
        """Number of null blocks in the pool: 0 or 1."""
        self._windows = config.kv_windows
        self._with_window = [g for g, w in enumerate(self._windows) if w is not None]
        self._groups_by_window: dict[KvWindow, list[int]] = defaultdict(list)
        for group in self._with_window:
            self._groups_by_window[self._windows[group]].append(group)
        self.has_states = STATE_WINDOW in self._windows
        """Whether the model has recurrent layers. A recurrent state cannot be rolled back to an
        earlier token. So to compute a token again, a sequence must start at an earlier full block
        or at its beginning."""
        self.published = [g for g, w in enumerate(self._windows) if w in {None, STATE_WINDOW}]
        """The groups whose blocks a decoding sequence publishes as soon as the blocks are full."""
        self._block_size = size = config.block_size
        chunk = config.max_chunk or config.max_num_batched_tokens
        # With drafts, decodes hold blocks for all tokens that the steps in flight may bring.
        ahead = max(chunk, 3 * (config.num_draft_tokens + 1))
        lengths = map(window_length, self._windows)
        self._most = [None if n is None else -(-(n + ahead) // size) + 1 for n in lengths]

    def num_needed(self, num_tokens: int) -> int:
        """Return an upper bound on how many blocks a sequence of `num_tokens` tokens holds."""
        num_blocks = -(-num_tokens // self._block_size)
        if self.is_plain:
            return num_blocks
        return sum(num_blocks if most is None else min(num_blocks, most) for most in self._most)

    def kept(self, num_computed: int) -> list[int]:
        """Return the places that later tokens read, if the first `num_computed` tokens have KV."""
        indices = range(-(-num_computed // self._block_size))
        if self.is_plain:
            return list(indices)
        firsts = [self._first(group, num_computed) for group in range(self.num)]
        return [
            index * self.num + group
            for index in indices[min(firsts) :]
            for group, first in enumerate(firsts)
            if index >= first
        ]

    def ahead(self, first: int, num_computed: int, num_blocks: int) -> list[int]:
        """Return the places, from block index `first` on, where a starting sequence needs blocks.

        Args:
            first: How many block indices the reused prefix covers.
            num_computed: How many of the sequence's tokens already have KV.
            num_blocks: The number of block indices of the sequence's known tokens.
        """
        ends = [self._end(group, num_computed, num_blocks) for group in range(self.num)]
        return [
            index * self.num + group
            for index in range(first, max(ends))
            for group, end in enumerate(ends)
            if index < end
        ]

    def take_passed(
        self, tables: list[list[DeviceBlockId]], num_computed: list[int]
    ) -> list[DeviceBlockId]:
        """Remove from each table the blocks that no token from `num_computed` on reads.

        Return these blocks.
        """
        passed = []
        for window, groups in self._groups_by_window.items():
            for table, position in zip(tables, num_computed, strict=True):
                last = first_seen(window, position) // self._block_size - 1
                for group in groups:
                    place = last * self.num + group
                    while place >= 0 and (block := table[place]) != NULL_BLOCK:
                        table[place] = NULL_BLOCK
                        passed.append(block)
                        place -= self.num
        passed.reverse()
        return passed

    def held(self, table: list[DeviceBlockId]) -> list[DeviceBlockId]:
        """Return the blocks of a table without the null block; the result may be `table` itself."""
        return table if self.is_plain else [block for block in table if block != NULL_BLOCK]

    def missing(self, table: Sequence[DeviceBlockId], num_computed: int) -> list[int]:
        """Return the places at which a prefilling sequence lacks blocks for its next chunk."""
        places = []
        for group in self._with_window:
            end = self._end(group, num_computed, len(table) // self.num)
            place = (end - 1) * self.num + group
            # The loop ends, because each earlier chunk left room for the first token of the next.
            while table[place] == NULL_BLOCK:
                places.append(place)
                place -= self.num
        places.sort()
        return places

    def names(self, chain: Sequence[BlockHash], places: Iterable[int]) -> list[BlockHash]:
        """Return the hashes of the blocks at `places`.

        `chain` has one hash for each block index; each hash covers the tokens, but not the group.
        """
        if self.is_plain:
            return [chain[place] for place in places]
        return [group_hash(chain[place // self.num], place % self.num) for place in places]

    def longest_prefix(self, chain: Sequence[BlockHash], has: Callable[[BlockHash], bool]) -> int:
        """Return the length, in blocks, of the longest prefix of `chain` that can be reused.

        A prefix can be reused if `has` is true for all its blocks that later tokens read.

        Args:
            chain: The hashes of a sequence's full blocks.
            has: Tells whether a block with the given hash exists.
        """
        end, checked = len(chain), 0
        group = 0
        while checked < self.num:  # until all groups agree
            found = self._longest_of(group, chain[:end], has)
            checked = checked + 1 if found == end else 1
            end, group = found, (group + 1) % self.num
        return end

    def _longest_of(
        self, group: int, chain: Sequence[BlockHash], has: Callable[[BlockHash], bool]
    ) -> int:
        if self._windows[group] is None:
            for index, name in enumerate(chain):
                if not has(group_hash(name, group)):
                    return index
            return len(chain)
        end = index = len(chain)
        while index > self._first(group, end * self._block_size):
            index -= 1
            if not has(group_hash(chain[index], group)):
                end = index
        return end

    def _first(self, group: int, num_computed: int) -> int:
        return first_seen(self._windows[group], num_computed) // self._block_size

    def _end(self, group: int, num_computed: int, num_blocks: int) -> int:
        most = self._most[group]
        if most is None:
            return num_blocks
        return min(num_blocks, self._first(group, num_computed) + most)
