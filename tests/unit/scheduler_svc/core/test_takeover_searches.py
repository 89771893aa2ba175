"""Beam searches, when a scheduler core is replaced."""

from dataclasses import replace

import pytest
from takeover_driver import CONFIG, PROMPT, SEARCHES, Pair, make_request, prompt_charges

from scheduler_svc.core.interface.request import BeamParams
from scheduler_svc.core.scheduler import Scheduler
from tests.property.beams import expected_search


def search(pair, num_kills=0, every=7):
    """Run a search to its end, with deaths of the scheduler; return its result."""
    request = make_request(n=2, **SEARCHES)
    pair.submit(request)
    for _ in range(num_kills):
        pair.step(every)
        assert not pair.ends, "it has not ended yet"
        pair.replace_core()
        assert pair.core.takeover.num_held_tokens(request) >= len(PROMPT)
        pair.submit(pair.again(request))
    pair.run()
    return [(end.seq_key, end.reason, end.token_ids, end.cumulative_logprob) for end in pair.ends]


@pytest.mark.parametrize("every", [5, 6])
def test_a_search_goes_on_where_it_was(every):
    unfailed, failed = Pair(), Pair()
    expected = search(unfailed)
    assert expected[0][2] == expected_search("", PROMPT, SEARCHES["beam"], 24, 0)[0].tokens
    assert search(failed, 3, every) == expected
    num_more = failed.worker.num_computed_tokens - unfailed.worker.num_computed_tokens
    assert 0 <= num_more <= 3 * 3 * CONFIG.block_size, "of each beam a block that has no name yet"
    load = failed.core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks


def test_a_search_that_had_begun_has_not_waited_and_computes_all_again_without_a_cache():
    pair, request = Pair(enable_prefix_caching=False, policy="fair"), make_request(n=2, **SEARCHES)
    pair.submit(request)
    pair.step(4)
    pair.admitted.clear()
    pair.replace_core()
    pair.submit(request, now=100.0)
    charged = prompt_charges(pair)
    pair.step(now=101.0)
    assert [(each.seq_key, each.queue_s) for each in pair.admitted] == [(0, 0.0), (1, 0.0)]
    assert {each.num_cached_tokens for each in pair.admitted} == {0}
    assert pair.core.load().num_recomputed_tokens == len(PROMPT) + 2, "of 3 outputs in the note"
    assert not any(charged)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_search_whose_note_does_not_fit_or_is_lost_starts_over(is_lost):
    pair, request = Pair(), make_request(n=2, **SEARCHES)
    expected = search(Pair())
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    note = None if is_lost else replace(row.search, beams=row.search.beams * 2)
    pair.core = Scheduler(pair.config)
    pair.core.inherit(replace(held, rows=(replace(row, search=note),)), 0.0)
    pair.submit(request)
    pair.run()
    assert [end.token_ids for end in pair.ends] == [found[2] for found in expected]


@pytest.mark.parametrize(
    "changes", [{"beam": BeamParams(3, (), 2.0)}, {"min_tokens": 1}, {"max_tokens": 23}]
)
def test_another_search_of_that_name_does_not_go_on_with_its_beams(changes):
    pair, request = Pair(), make_request(n=2, **SEARCHES)
    pair.submit(request)
    pair.step(6)
    pair.replace_core()
    assert pair.core.takeover.num_held_tokens(request)
    assert not pair.core.takeover.num_held_tokens(replace(request, **changes))
