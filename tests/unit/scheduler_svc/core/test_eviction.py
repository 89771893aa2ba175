"""Examples of the eviction orders, with exact blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.interface.config import Eviction
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId

ALL = pytest.mark.parametrize("eviction", list(Eviction))


class Cache:
    """A pool whose blocks have names, such as "a0" for the first block of prompt a."""

    def __init__(self, eviction: Eviction, num_blocks: int = 8) -> None:
        self.evicted: list[str] = []
        self.pool = BlockPool(num_blocks, DeviceBlockId, self._record, eviction)

    def _record(self, _block, block_hash):
        self.evicted.append(block_hash.decode())

    def use(self, *names: str) -> list[DeviceBlockId]:
        """Find a table's first blocks, compute the others, and return the held table."""
        found = self.pool.find([name.encode() for name in names])
        self.pool.share(found)
        new = self.pool.allocate(len(names) - len(found))
        for block, name in zip(new, names[len(found) :], strict=True):
            self.pool.publish([block], [name.encode()])
        return found + new

    def run(self, *names: str) -> None:
        self.pool.drop(self.use(*names))

    def evict_all(self) -> str:
        self.pool.drop(self.pool.allocate(self.pool.num_available))
        return " ".join(self.evicted)


def test_lru_evicts_what_was_used_longest_ago():
    cache = Cache(Eviction.LRU)
    cache.run("a0", "a1")
    cache.run("b0", "b1")
    cache.run("c0")
    cache.run("a0")
    assert cache.evict_all() == "a1 b1 b0 c0 a0"


def test_lfu_evicts_what_was_hit_least_and_among_equals_what_was_used_longest_ago():
    cache = Cache(Eviction.LFU)
    cache.run("a0", "a1")
    cache.run("b0", "b1")
    cache.run("c0")
    for _ in range(2):
        cache.run("a0")
    cache.run("c0")
    cache.run("b0", "b1")
    # hits: a0 2, c0 1 and then b1 b0 1, a1 0
    assert cache.evict_all() == "a1 c0 b1 b0 a0"


def test_fifo_evicts_what_was_cached_first_whatever_has_hit_it_since():
    cache = Cache(Eviction.FIFO)
    cache.run("a0", "a1")
    cache.run("b0", "b1")
    cache.run("c0")
    cache.run("a0", "a1")
    assert cache.evict_all() == "a1 a0 b1 b0 c0"


def test_fifo_does_not_mind_blocks_without_a_name():
    """Such as a table's last block, if it is not full, and copies of another block."""
    cache = Cache(Eviction.FIFO)
    cache.run("a0")
    table = [*cache.use("b0"), *cache.pool.allocate(1), *cache.use("b1")]
    cache.pool.drop(table)
    cache.pool.drop([*cache.use("a0"), *cache.pool.allocate(1)])
    assert cache.evict_all() == "a0 b1 b0"


@ALL
def test_an_old_prefix_outlives_what_was_computed_after_it_just_now(eviction):
    cache = Cache(eviction)
    cache.run("a0", "a1")
    cache.run("b0")
    cache.run("a0", "a1", "x2", "x3")
    order = cache.evict_all().split()
    assert [name for name in order if name != "b0"] == ["x3", "x2", "a1", "a0"]


@ALL
def test_a_prefix_that_others_hold_meanwhile_outlives_what_continues_it(eviction):
    cache = Cache(eviction)
    cache.run("a0")
    others = cache.use("a0")
    cache.run("a0", "x1")
    cache.pool.drop(others)
    assert cache.evict_all() == "x1 a0"


def shrink_and_grow(cache):
    cache.pool.retire_from(0)
    cache.pool.resize(2)


@ALL
@pytest.mark.parametrize("lose", [Cache.evict_all, shrink_and_grow])
def test_what_is_lost_is_new_when_it_comes_again(eviction, lose):
    cache = Cache(eviction, num_blocks=2)
    cache.run("a0")
    cache.run("b0")
    cache.run("b0")
    lose(cache)
    cache.evicted.clear()
    cache.run("b0")
    cache.run("a0")
    assert cache.evict_all() == "b0 a0"


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.FIFO])
@pytest.mark.parametrize("is_held", [False, True])
def test_distrusted_contents_are_new_when_computed_again(eviction, is_held):
    cache = Cache(eviction)
    cache.run("a0")
    cache.run("a0")  # hit once
    cache.run("b0")
    cache.run("b0")
    held = cache.use("a0") if is_held else []
    cache.pool.forget(cache.pool.find([b"a0"]))
    cache.pool.drop(held)
    cache.run("a0")
    expected = {Eviction.LFU: "a0 b0", Eviction.FIFO: "b0 a0"}
    assert cache.evict_all() == expected[eviction]


@ALL
def test_a_block_that_is_not_to_be_trusted_is_free_at_once(eviction):
    cache = Cache(eviction, num_blocks=2)
    held = cache.use("a0")
    cache.run("b0")
    cache.pool.forget([held[0], *cache.pool.find([b"b0"])])
    assert (cache.pool.num_free, cache.pool.num_cached) == (1, 0)
    cache.pool.drop(held)
    assert (cache.evict_all(), cache.pool.num_free) == ("", 2)


@ALL
@given(
    num_blocks=st.integers(4, 10),
    uses=st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), st.integers(0, 2)), max_size=40),
)
def test_if_a_block_is_found_its_prefix_is_found_too(eviction, num_blocks, uses):
    """Prompts are words, and their blocks are prefixes of words; some blocks are held for a
    while."""
    cache = Cache(eviction, num_blocks)
    held: list[list[DeviceBlockId]] = []
    for word, num_kept in uses:
        while len(held) > num_kept or (held and cache.pool.num_available < len(word)):
            cache.pool.drop(held.pop(0))
        held.append(cache.use(*(word[: length + 1] for length in range(len(word)))))
        names = {name.decode() for name in cache.pool._hash_to_block}
        assert all(name[:-1] in names for name in names if len(name) > 1)
