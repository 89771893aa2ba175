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

    def __init__(self, **request):
        self.core = make_core(num_host_blocks=8, num_disk_blocks=8)
        submit(self.core, 0, PROMPT, **request)
        (self.seq,) = self.core.live
        self.hashes = []
        extend_chain(self.hashes, root_hash(""), self.seq.token_ids, 4)
        tier = self.core.tier
        self.pools = {"device": self.core.pool, "host": tier.pool, "disk": tier.disk.pool}
        self.lookup = self.core.lookup

    def put(self, tier, *indices):
        """Cache these blocks of the prompt in a tier, and return them."""
        pool = self.pools[tier]
        blocks = pool.allocate(len(indices))
        for block, index in zip(blocks, indices, strict=True):
            pool.publish([block], [self.hashes[index]])
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


class FakeRows:
    """One row, with the prompt."""

    def read_blocks(self, _, indices):
        return [np.array(PROMPT[4 * index :][:4], "<i4").tobytes() for index in indices]

    def tokens(self, _):
        return np.array(PROMPT, np.int32)


def test_a_block_is_published_when_it_is_full_and_no_other_is_on_its_way():
    place = Place()
    (block,) = place.core.pool.allocate(1)
    core = place.core
    publisher = Publisher(core.config, core.groups, core.pool, FakeRows())
    place.seq.row, place.seq.block_ids = 0, [block]
    place.seq.block_hashes.clear()
    place.seq.loading_block_ids = (block,)
    publisher.publish_last([place.seq], [0])
    assert place.core.pool.find(place.hashes) == []
    place.seq.loading_block_ids = ()
    publisher.publish_last([place.seq], [0])
    assert place.core.pool.find(place.hashes) == [block]
    assert place.seq.block_hashes == place.hashes[:1]
