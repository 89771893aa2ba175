"""The prefix cache and its pins, when a scheduler core is replaced."""

import numpy as np
from takeover_driver import PROMPT, SEARCHES, Pair, long_request, make_request

from contract.hashing import extend_chain, root_hash
from scheduler_svc.core.handover.takeover import REUNION_S


def test_the_prefix_cache_is_as_it_was():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.run()
    pair.replace_core()
    assert pair.core.load().num_cached_blocks > 0
    pair.submit(make_request(1, [*request.prompt_token_ids.tolist(), 0, 1]))
    pair.step(2)
    assert pair.core.load().prefix_cache_hits == 16


def test_pins_stay_for_the_rest_of_their_time_and_outlive_newer_prompts():
    pair, request = Pair(num_blocks=12), make_request(max_tokens=1, cache_pin_s=20.0)
    pair.submit(request, now=100.0)
    pair.run(now=100.0)
    pair.worker.pins = {name: left_s - 5.0 for name, left_s in pair.worker.pins.items()}
    pair.replace_core(now=1005.0)
    assert pair.core.load().num_pinned_blocks == len(PROMPT) // 4
    pair.submit(make_request(1, [1] * 40, max_tokens=1))
    pair.run(now=1006.0)
    pair.submit(make_request(2, [*PROMPT, 1], max_tokens=1))
    pair.step(now=1019.0)
    assert pair.core.load().prefix_cache_hits == 8
    pair.step(now=1020.0)
    assert pair.core.load().num_pinned_blocks == 0


def test_unclaimed_rows_give_way_to_a_search_and_pins_do_not():
    pair, pinned = Pair(max_num_seqs=3), make_request(max_tokens=1, cache_pin_s=20.0)
    pair.submit(pinned)
    pair.run()
    pair.submit(long_request(1))
    pair.step(2)
    pair.replace_core()
    assert len(pair.core.takeover.unclaimed) == 1
    pair.submit(make_request(2, **SEARCHES))
    pair.step(now=REUNION_S)
    assert not pair.core.takeover.unclaimed
    assert pair.core.load().num_pinned_blocks == 2


def test_above_the_quota_the_pins_that_end_last_stay_beginning_with_their_first_blocks():
    pair, prompts = Pair(max_pinned_share=1.0), ([0] * 8, [1] * 8)
    for key, (prompt, pin_s) in enumerate(zip(prompts, (30.0, 20.0), strict=True)):
        pair.submit(make_request(key, prompt, max_tokens=1, cache_pin_s=pin_s))
        pair.run()
    pair.replace_core(max_pinned_share=3 / 32)
    pinned = {pair.core.pool._hashes[block] for block in pair.core.pins._ends}
    chains = [[], []]
    for chain, prompt in zip(chains, prompts, strict=True):
        extend_chain(chain, root_hash(""), np.array(prompt, np.int32), 4)
    assert pinned == {*chains[0], chains[1][0]}


def test_a_prompt_that_is_pinned_again_is_reported_again():
    pair = Pair()
    for key, pin_s in enumerate([10.0, 5.0, 30.0]):
        pair.submit(make_request(key, max_tokens=1, cache_pin_s=pin_s))
        pair.run()
    assert [*pair.worker.pins.values()] == [30.0, 30.0]
