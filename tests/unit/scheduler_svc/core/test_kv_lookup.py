"""The blocks that a sequence finds in each tier, after tests have put copies into some tiers."""

from dataclasses import replace

import numpy as np
import pytest
from core_driver import make_core, submit

from contract.hashing import extend_chain, root_hash
from scheduler_svc.core.prefix import Publisher
from scheduler_svc.core.sequence import SeqStatus

PROMPT = range(16)  # four blocks; three can be found, because the last token must be computed


class Place:
    """A core with a waiting sequence, and tiers with given blocks."""

    def __init__(self, kv_windows=(None,), **request):
        self.core = make_core(num_host_blocks=8, num_disk_blocks=8, kv_windows=kv_windows)
        submit(self.core, 0, PROMPT, **request)
        (self.seq,) = self.core.live
        self.hashes = []
        extend_chain(self.hashes, root_hash(""), self.seq.token_ids, 4)
        tier = self.core.tier
        self.pools = {"device": self.core.pool, "host": tier.pool, "disk": tier.disk.pool}
        self.lookup = self.core.lookup

    def put(self, tier, *places):
        """Cache these blocks of the prompt in a tier, and return them."""
        pool = self.pools[tier]
        blocks = pool.allocate(len(places))
        for block, place in zip(blocks, places, strict=True):
            pool.publish([block], self.core.groups.names(self.hashes, [place]))
        pool.drop(blocks)
        return blocks

    def found(self):
        found = self.lookup.find(self.seq)
        return found.ready, found.loading, found.sources, found.num_tokens


def test_what_the_device_has_is_not_taken_from_the_host():
    place = Place()
    device, host = place.put("device", 0), place.put("host", 0, 1, 2, 3)
    assert place.found() == (device, [], host[1:3], 12)


def test_blocks_being_swapped_in_are_shared():
    place = Place()
    device, host = place.put("device", 0), place.put("host", 1, 2)
    place.pools["host"].share(host[:1])
    place.core.tier.swap_in(host[:1], [9])
    assert place.found() == (device, [9], host[1:], 12)


def test_a_request_for_prompt_logprobs_ignores_the_prefix_cache():
    place = Place(reads_prefix_cache=False)
    place.put("device", 0, 1)
    place.put("disk", 0, 1, 2)
    assert place.found() == ([], [], [], 0)
    assert place.lookup.past_device(place.seq) == []
    assert place.lookup.num_cached_tokens(place.seq.request) == 0


def test_a_swapped_one_has_its_own_kv_from_where_it_is_nearest():
    # because the request wants its prompt's log-probabilities
    place = Place(reads_prefix_cache=False)
    place.seq.status, place.seq.num_computed_tokens = SeqStatus.SWAPPED, 10
    place.seq.host_block_ids = (5, 6, 7)
    device = place.put("device", 0, 1, 2)
    assert place.found() == (device[:2], [], [7], 10)


def test_without_a_prefix_cache_nothing_is_found():
    core = make_core(enable_prefix_caching=False)
    submit(core, 0, PROMPT)
    (seq,) = core.live
    assert core.lookup.past_device(seq) == []
    assert core.lookup.num_cached_tokens(seq.request) == 0
    assert seq.block_hashes == [], "they are not even named"


@pytest.mark.parametrize(("on_device", "missing"), [((), [0, 1, 2]), ((0,), [1, 2])])
def test_past_the_device_is_all_but_the_last_token(on_device, missing):
    place = Place()
    place.put("device", *on_device)
    assert place.lookup.past_device(place.seq) == [place.hashes[index] for index in missing]


def test_after_what_is_shared_in_any_case_the_lookup_goes_on():
    place = Place()
    host = place.put("host", 1, 2)
    shared = place.put("device", 0)
    found = place.lookup.find_beyond(place.seq, shared)
    assert (found.ready, found.sources, found.num_tokens) == (shared, host, 12)
    assert place.lookup.find_beyond(place.seq, [5]).ready == [5], "its own, of the same content"


def test_what_is_shared_need_not_be_findable():
    place = Place()
    place.put("device", 0)
    place.put("host", 1, 2)
    found = place.lookup.find_beyond(place.seq, [5, 6])
    assert (found.ready, found.sources, found.num_tokens) == ([5, 6], [], 8)


@pytest.mark.parametrize(
    ("tiers", "num_tokens"),
    [
        ({"device": (0,), "host": (0, 1), "disk": (0, 1, 2, 3)}, 12),
        ({"device": (0,), "host": (1,), "disk": (0, 1)}, 8),
        ({"host": (0,), "disk": (2,)}, 4),
        ({"disk": (0, 1, 2)}, 12),
        ({"device": (1, 2)}, 0),
    ],
)
def test_a_prompts_cached_tokens_are_those_before_the_first_that_no_tier_has(tiers, num_tokens):
    place = Place()
    for tier, indices in tiers.items():
        place.put(tier, *indices)
    assert place.lookup.num_cached_tokens(place.seq.request) == num_tokens


def test_of_a_prompt_whose_last_token_begins_a_block_all_before_it_counts():
    place = Place()
    place.put("device", 0, 1, 2, 3)
    assert place.lookup.num_cached_tokens(place.seq.request) == 12
    request = replace(place.seq.request, prompt_token_ids=np.arange(17, dtype=np.int32))
    assert place.lookup.num_cached_tokens(request) == 16


WITH_WINDOW = {"kv_windows": (None, 8)}
"""Even places are of the group without a window. After 12 tokens the window sees 3 and 5."""


def test_with_a_window_each_block_is_found_in_the_nearest_tier_that_has_it():
    place = Place(**WITH_WINDOW)
    device, host = place.put("device", 0, 3), place.put("host", 0, 2, 4, 5)
    place.pools["host"].share(host[2:3])
    place.core.tier.swap_in(host[2:3], [9])
    assert place.found() == (device, [9], [host[1], host[3]], 12)
    found = place.lookup.find(place.seq)
    assert (found.places, found.num_indices) == ([0, 3, 4, 2, 5], 3)


def test_with_a_window_what_only_the_disk_has_counts_and_is_past_the_device():
    place = Place(**WITH_WINDOW)
    place.put("device", 0, 3)
    place.put("host", 2)
    place.put("disk", 4)
    assert place.lookup.num_cached_tokens(place.seq.request) == 0, "the window lacks a block"
    place.put("disk", 5)
    names = place.core.groups.names(place.hashes, [2, 4, 5])
    assert place.lookup.past_device(place.seq) == names
    assert place.lookup.num_cached_tokens(place.seq.request) == 12


def test_with_a_window_a_swapped_one_has_its_own_kv_from_where_it_is_nearest():
    place = Place(**WITH_WINDOW)
    place.seq.status, place.seq.num_computed_tokens = SeqStatus.SWAPPED, 10
    place.seq.host_block_ids = tuple(range(10, 16))
    device = place.put("device", 0, 3, 5)
    place.put("host", 1)
    assert place.found() == (device[:2], [], [11, 12, 14, 15], 10)
    assert place.lookup.find(place.seq).places == [0, 3, 1, 2, 4, 5]


def test_with_a_window_what_is_shared_is_found_if_no_block_of_it_is_gone():
    place = Place(**WITH_WINDOW)
    shared = place.lookup.find_beyond(place.seq, [5, 0, 6, 7, 8, 9])
    assert (shared.ready, shared.places) == ([5, 6, 7, 8, 9], [0, 2, 3, 4, 5])
    assert (shared.num_tokens, shared.num_indices) == (12, 3)
    own = place.put("device", 0, 1)
    found = place.lookup.find_beyond(place.seq, [5, 0, 6, 0, 8, 9])
    assert (found.ready, found.num_tokens) == (own, 4), (
        "its window would see the block that is gone"
    )
    place.put("device", 2, 3, 4, 5)
    own = place.lookup.find(place.seq)
    assert place.lookup.find_beyond(place.seq, [5, 0, 6, 7, 8, 9]) == own


class FakeRows:
    """One row, with the prompt."""

    def read_blocks(self, _, indices):
        return [np.array(PROMPT[4 * index :][:4], "<i4").tobytes() for index in indices]

    def tokens(self, _):
        return np.array(PROMPT, np.int32)


def make_running(num_blocks):
    """A place whose sequence has so many full blocks, none of them published, and a publisher."""
    place = Place()
    core = place.core
    place.seq.row, place.seq.block_ids = 0, core.pool.allocate(num_blocks)
    place.seq.block_hashes.clear()
    return place, Publisher(core.config, core.groups, core.pool, FakeRows())


def test_a_block_is_published_when_it_is_full_and_no_other_is_on_its_way():
    place, publisher = make_running(num_blocks=1)
    (block,) = place.seq.block_ids
    place.seq.loading_block_ids = (block,)
    publisher.publish_last([place.seq], [0])
    assert place.core.pool.find(place.hashes) == []
    place.seq.loading_block_ids = ()
    publisher.publish_last([place.seq], [0])
    assert place.core.pool.find(place.hashes) == [block]
    assert place.seq.block_hashes == place.hashes[:1]


def test_with_its_last_block_a_sequence_publishes_all_that_it_has_not_yet():
    place, publisher = make_running(num_blocks=3)
    publisher.publish_last([place.seq], [0])
    assert place.core.pool.find(place.hashes) == place.seq.block_ids
