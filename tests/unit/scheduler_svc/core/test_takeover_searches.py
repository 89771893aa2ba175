"""Beam searches, when a scheduler core is replaced."""

from dataclasses import replace

import pytest
from takeover_driver import CONFIG, PROMPT, SEARCHES, Pair, make_request

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


def test_a_search_whose_note_does_not_fit_starts_over():
    pair, request = Pair(), make_request(n=2, **SEARCHES)
    expected = search(Pair())
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    wide = replace(row.search, beams=row.search.beams * 2)
    pair.core = Scheduler(pair.config)
    pair.core.inherit(replace(held, rows=(replace(row, search=wide),)), 0.0)
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
