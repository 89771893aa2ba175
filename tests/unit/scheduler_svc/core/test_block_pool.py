"""The methods of a pool that defragmentation uses, by example."""

import pytest

from scheduler_svc.core.interface.config import Eviction
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.labels import NewLabels


def make_pool(num_blocks=6, eviction=Eviction.LRU, evicted=None):
    on_evict = None if evicted is None else lambda block, name: evicted.append((block, name))
    return BlockPool(num_blocks, DeviceBlockId, on_evict, eviction)


def test_a_held_block_and_a_taken_one_exchange_numbers():
    pool = make_pool()
    pool.allocate(5)
    pool.publish([4], [b"p"])
    pool.share([4])
    pool.drop([1])
    assert pool.allocate_before(4) == 1
    pool.exchange(4, 1)
    assert (pool.ref_count(1), pool.ref_count(4)) == (2, 1)
    assert pool.find([b"p"]) == [1]
    pool.drop([4])
    assert pool.allocate(1) == [4], "the old place is free: its content has gone"


@pytest.mark.parametrize("eviction", list(Eviction))
def test_a_cached_block_keeps_its_place_in_the_order_of_eviction(eviction):
    evicted = []
    pool = make_pool(4, eviction, evicted)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.publish([block], [b"%d" % block])
        pool.drop([block])
    pool.exchange(3, 1)
    assert (pool.ref_count(1), pool.is_cached(3)) == (1, True)
    assert pool.find([b"1"]) == [3]
    pool.allocate(3)
    assert evicted == [(0, b"0"), (3, b"1"), (2, b"2")]


def test_a_free_block_has_nothing_to_exchange():
    pool = make_pool()
    pool.allocate(1)
    with pytest.raises(BrokenInvariantError, match="exchange of free block 5"):
        pool.exchange(0, 5)


def test_blocks_beyond_the_border_are_given_last_and_low_numbers_first():
    pool = make_pool()
    pool.drop(pool.allocate(6))
    pool.set_border(3)
    assert pool.allocate(2) == [0, 1]
    pool.drop([0])
    assert pool.allocate(4) == [0, 2, 3, 4]
    pool.drop([3, 2])
    assert pool.num_available == 3
    assert pool.allocate_before(2) is None, "2 is next"
    assert pool.allocate_before(3) == 2
    assert pool.allocate_before(3) is None, "3 is next"
    assert pool.allocate_before(4) == 3


def test_an_untrusted_block_beyond_the_border_is_given_in_its_turn():
    pool = make_pool()
    blocks = pool.allocate(6)
    pool.set_border(3)
    pool.publish([5], [b"5"])
    pool.publish([3], [b"3"])
    pool.drop(blocks)
    pool.forget([5, 3])
    assert pool.find([b"5"]) == pool.find([b"3"]) == []
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_reference_counts_can_be_watched_but_not_changed():
    pool = make_pool()
    counts = pool.ref_counts
    pool.share(pool.allocate(2))
    assert counts.tolist() == [2, 2, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        counts[0] = 0


def test_of_two_labels_for_a_block_the_first_counts():
    pool = make_pool()
    pool.restore([], [3, 3, 4], [b"p", b"q", b"p"])
    assert pool.find([b"p"]) == [3]
    assert pool.find([b"q"]) == []
    assert (pool.num_cached, pool.num_free) == (1, 5)


def test_of_inherited_blocks_the_youngest_label_is_evicted_first():
    evicted = []
    pool = make_pool(4, evicted=evicted)
    pool.restore([[2]], [3, 2, 0], [b"prefix", b"held", b"what continues it"])
    pool.allocate(3)
    assert evicted == [(0, b"what continues it"), (3, b"prefix")]


def test_only_a_block_with_one_holder_and_no_name_is_written():
    pool = make_pool()
    shared, named, _ = pool.allocate(3)
    pool.share([shared])
    pool.publish([named], [b"p"])
    assert [pool.is_writable(block) for block in range(4)] == [False, False, True, False]


def test_of_blocks_published_together_each_is_named_once_and_the_first_is_found():
    one, other = b"1" * 32, b"2" * 32
    labels = NewLabels()
    pool = BlockPool(4, DeviceBlockId, labels=labels)
    first, same, new, _ = pool.allocate(4)
    pool.publish([first], [one])
    pool.publish([first, same, new], [one, one, other])
    assert pool.find([one, other]) == [first, new]
    assert [pool.is_writable(block) for block in (first, same, new)] == [False, True, False]
    labels.begin_step()
    blocks, names = labels.take()
    assert blocks.tolist() == [first, same, new]
    assert names.tobytes() == one + one + other


def test_labels_follow_moved_blocks_and_those_of_distrusted_blocks_are_dropped():
    labels = NewLabels()
    pool = BlockPool(4, DeviceBlockId, labels=labels)
    pool.allocate(4)
    labels.begin_step()
    pool.publish([1, 2], [b"1" * 32, b"2" * 32])
    pool.exchange(1, 3)
    pool.forget([2, 0])  # no hash finds block 0
    labels.begin_step()
    blocks, names = labels.take()
    assert blocks.tolist() == [3]
    assert names.tobytes() == b"1" * 32


def test_a_block_is_cached_if_nobody_holds_it_and_it_can_be_found():
    pool = make_pool()
    blocks = pool.allocate(4)
    for block in blocks[:2]:
        pool.publish([block], [b"%d" % block])
    pool.drop([blocks[1], blocks[2]])
    assert [pool.is_cached(block) for block in range(5)] == [False, True, False, False, False]


def test_a_pool_may_be_empty():
    pool = make_pool(0)
    assert (pool.num_available, pool.allocate(0), pool.ref_counts.tolist()) == (0, [], [])


def test_of_restored_blocks_the_last_published_is_evicted_first():
    pool = BlockPool(4, DeviceBlockId)
    pool.restore([[1]], [2, 1, 3], [b"a", b"b", b"c"])
    assert (pool.num_free, pool.num_cached, pool.ref_count(1)) == (1, 2, 1)
    assert pool.find([b"a", b"b", b"c"]) == [2, 1, 3]
    assert pool.allocate(3) == [0, 3, 2]


def test_of_two_restored_blocks_with_one_content_the_older_is_kept():
    pool = BlockPool(4, DeviceBlockId)
    pool.restore([], [2, 1], [b"a", b"a"])
    assert pool.find([b"a"]) == [2]
    assert pool.num_free == 3


@pytest.mark.parametrize("num_blocks", [3, 6, 9])
def test_a_resized_pool_knows_as_many_blocks_as_it_has(num_blocks):
    pool = make_pool()
    pool.retire_from(min(num_blocks, 6))
    pool.resize(num_blocks)
    assert len(pool.ref_counts) == pool.num_blocks == num_blocks
    assert pool.allocate(num_blocks) == list(range(num_blocks))


@pytest.mark.parametrize(
    ("border", "num_blocks", "expected"), [(6, 9, 9), (6, 3, 3), (2, 9, 2), (4, 3, 3)]
)
def test_a_resized_pool_keeps_the_range_that_is_to_stay_empty(border, num_blocks, expected):
    pool = make_pool()
    pool.set_border(border)
    pool.retire_from(min(num_blocks, 6))
    pool.resize(num_blocks)
    assert pool.books.border == expected


def test_a_pool_that_shrinks_gives_none_of_the_blocks_that_leave():
    pool = make_pool()
    pool.set_border(3)
    pool.retire_from(4)
    assert pool.allocate(pool.num_available) == [0, 1, 2, 3]


def test_a_pool_that_shrinks_evicts_what_would_be_evicted_last_first():
    evicted = []
    pool = make_pool(4, evicted=evicted)
    for block in pool.allocate(4):
        pool.publish([block], [b"%d" % block])
        pool.drop([block])
    pool.retire_from(2)
    assert evicted == [(3, b"3"), (2, b"2")]


def test_a_cached_block_that_changes_places_with_one_that_leaves_is_lost():
    pool = make_pool()
    pool.allocate(6)
    pool.publish([1], [b"p"])
    pool.drop([1])
    pool.retire_from(4)
    pool.exchange(4, 1)
    assert pool.find([b"p"]) == []
    assert (pool.ref_count(1), pool.num_cached, pool.num_leaving) == (1, 0, 1)


def test_a_pool_loses_no_block_in_use_with_its_size():
    pool = make_pool()
    with pytest.raises(BrokenInvariantError, match=r"resize\(3\) with blocks in use beyond"):
        pool.resize(3)
