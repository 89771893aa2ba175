"""Examples of beam search: beams that continue, hypotheses that are done, and a search's end."""

from dataclasses import replace

import numpy as np
import pytest

from contract.sampling import EarlyStopping
from scheduler_svc.core.beams.search import BeamCandidates, BeamSearcher, num_common
from scheduler_svc.core.interface.request import BeamParams

END = 9


def make_search(max_tokens=8, min_tokens=0, **params) -> BeamSearcher:
    settings = {"width": 2, "end_token_ids": (END,)} | params
    prompt = np.array([5, 6], np.int32)
    return BeamSearcher(
        BeamParams(**settings), prompt, max_tokens=max_tokens, min_tokens=min_tokens
    )


def candidates(**likely: float) -> BeamCandidates:
    """`t3=-0.5`: token 3 has that log-probability."""
    tokens = [int(name.removeprefix("t")) for name in likely]
    return BeamCandidates(np.array(tokens, np.int32), np.array(list(likely.values()), np.float32))


def outputs(search: BeamSearcher) -> list[list[int]]:
    return [beam.token_ids[2:].tolist() for beam in search.beams]


def found(search: BeamSearcher) -> list[tuple[int, ...]]:
    return [tuple(hypothesis.token_ids.tolist()) for hypothesis in search.hypotheses]


def test_the_likeliest_continuations_of_all_beams_go_on():
    search = make_search()
    assert search.advance([candidates(t1=-1.0, t2=-2.0, t3=-3.0, t4=-4.0)]) == (0, 0)
    assert outputs(search) == [[1], [2]]
    # -1 and -2 so far: with 7 the second has -2.5, and overtakes the first with 3
    parents = search.advance([candidates(t4=-1.0, t3=-2.0), candidates(t7=-0.5, t8=-5.0)])
    assert parents == (0, 1)
    assert outputs(search) == [[1, 4], [2, 7]]
    assert search.advance([candidates(t1=-3.0, t2=-4.0), candidates(t1=-0.1, t2=-0.2)]) == (1, 1)
    assert outputs(search) == [[2, 7, 1], [2, 7, 2]]


def test_equally_likely_ones_keep_their_order():
    search = make_search()
    search.advance([candidates(t8=-1.0, t3=-1.0, t5=-1.0, t4=-1.0)])
    assert outputs(search) == [[8], [3]]
    search.advance([candidates(t2=-1.0, t1=-1.0), candidates(t7=-1.0, t6=-1.0)])
    assert outputs(search) == [[8, 2], [8, 1]]


def test_one_that_ends_makes_room_for_the_next():
    search = make_search()
    assert search.advance([candidates(t9=-1.0, t1=-2.0, t2=-3.0, t3=-4.0)]) == (0, 0)
    assert (found(search), outputs(search)) == ([(END,)], [[1], [2]])
    (hypothesis,) = search.hypotheses
    assert (hypothesis.logprob, hypothesis.score, hypothesis.end_token_id) == (-1.0, -1.0, END)


def test_an_end_that_is_not_among_the_best_is_forgotten():
    search = make_search()
    search.advance([candidates(t1=-1.0, t2=-2.0, t9=-3.0, t3=-4.0)])
    assert (found(search), outputs(search)) == ([], [[1], [2]])


def test_ends_do_not_come_before_min_tokens():
    search = make_search(min_tokens=1)
    search.advance([candidates(t9=-0.1, t1=-2.0, t2=-3.0, t3=-4.0, t4=-5.0)])
    assert (found(search), outputs(search)) == ([], [[1], [2]])
    search.advance([candidates(t9=-0.1, t1=-2.0), candidates(t9=-0.1, t3=-9.0)])
    assert found(search) == [(1, END), (2, END)]


def test_at_the_length_the_best_are_done():
    search = make_search(max_tokens=2)
    search.advance([candidates(t1=-1.0, t2=-2.0, t3=-3.0, t4=-4.0)])
    assert search.advance([candidates(t4=-1.0, t3=-9.0), candidates(t9=-0.5, t8=-9.0)]) == ()
    assert search.beams == ()
    assert found(search) == [(1, 4), (2, END)]
    assert [h.end_token_id for h in search.hypotheses] == [None, END]


@pytest.mark.parametrize(("penalty", "best"), [(0.0, (END,)), (1.0, (1, END)), (-1.0, (END,))])
def test_the_penalty_favours_the_longer_or_the_shorter(penalty, best):
    search = make_search(length_penalty=penalty)
    search.advance([candidates(t9=-1.0, t1=-1.0, t2=-3.0, t3=-4.0)])
    search.advance([candidates(t9=-0.5, t4=-9.0), candidates(t5=-9.0, t6=-9.0)])
    assert found(search)[0] == best


@pytest.mark.parametrize("stopping", EarlyStopping)
def test_when_it_stops(stopping):
    """Two are done, with -0.6 and -1.05; the best live beam has -1.1 ÷ 2 tokens so far."""
    search = make_search(early_stopping=stopping)
    search.advance([candidates(t9=-0.6, t1=-1.0, t2=-1.2, t3=-4.0)])
    search.advance([candidates(t5=-0.1, t9=-1.1, t6=-8.0), candidates(t7=-8.0)])
    assert found(search) == [(END,), (1, END)]
    if stopping is EarlyStopping.WHEN_FULL:
        assert search.beams == ()
        return
    assert search.beams  # -0.55 would be better than -1.05
    search.advance([candidates(t5=-2.3, t6=-2.4), candidates(t7=-8.0)])
    # -3.4 ÷ 3 is worse than -1.05; -3.4 ÷ 8 would be better
    assert bool(search.beams) is (stopping is EarlyStopping.NEVER)


def test_it_goes_on_while_a_beam_is_better_than_the_worst_of_the_done():
    search = make_search(width=3)
    search.advance([candidates(t9=-0.4, t1=-0.5, t2=-0.6, t3=-3.0)])
    search.advance(
        [candidates(t9=-0.5, t4=-1.5, t5=-9.0), candidates(t9=-1.9, t6=-9.0), candidates(t7=-9.0)]
    )
    assert [float(h.score) for h in search.hypotheses] == pytest.approx([-0.4, -0.5, -1.25])
    assert search.beams  # -2.0 ÷ 2


def test_it_stops_when_the_best_beam_is_as_good_as_the_worst_of_the_done():
    search = make_search()
    search.advance([candidates(t9=-1.0, t1=-1.0, t2=-3.0)])
    search.advance([candidates(t9=-1.0, t5=-1.0), candidates(t6=-9.0)])
    assert found(search) == [(END,), (1, END)]
    assert search.beams == ()


def test_if_length_is_penalized_a_beam_is_never_better_than_it_is_now():
    search = make_search(length_penalty=-1.0, early_stopping=EarlyStopping.NEVER)
    search.advance([candidates(t9=-0.1, t1=-0.2, t2=-0.3)])
    search.advance([candidates(t5=-0.1, t9=-0.5), candidates(t6=-9.0)])
    assert [float(h.score) for h in search.hypotheses] == pytest.approx([-0.1, -1.4])
    assert search.beams  # -0.3 · 2; with eight tokens it would be -2.4


def test_no_more_than_the_width_are_done():
    search = make_search(early_stopping=EarlyStopping.NEVER)
    search.advance([candidates(t9=-1.0, t1=-1.1, t2=-1.2)])
    search.advance([candidates(t9=-0.1, t3=-0.5), candidates(t9=-0.2, t4=-0.6)])
    assert found(search) == [(1, END), (2, END)]


def test_candidates_that_are_too_few_leave_fewer_beams():
    search = make_search(width=3)
    assert search.advance([candidates(t1=-1.0, t9=-2.0)]) == (0,)
    assert (found(search), outputs(search)) == ([(END,)], [[1]])
    assert search.advance([candidates(t9=-1.0)]) == ()
    assert found(search) == [(1, END), (END,)]


@pytest.mark.parametrize(
    ("one", "other", "num_both"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2], [1, 3, 2], 1)],
)
def test_what_two_outputs_have_in_common(one, other, num_both):
    one, other = np.array(one, np.int32), np.array(other, np.int32)
    assert num_common(one, other) == num_common(other, one) == num_both


def noted_search() -> BeamSearcher:
    """Two beams, which share 5 6 2 7, and two hypotheses, which share 5 6 and 5 6 2 7."""
    search = make_search(early_stopping=EarlyStopping.NEVER)
    search.advance([candidates(t9=-1.0, t2=-2.0, t1=-3.0, t3=-4.0)])
    search.advance([candidates(t7=-0.5, t4=-9.0), candidates(t8=-5.0, t4=-9.0)])
    search.advance([candidates(t9=-0.5, t1=-1.0, t2=-2.0), candidates(t8=-5.0, t4=-9.0)])
    assert outputs(search) == [[2, 7, 1], [2, 7, 2]]
    assert found(search) == [(END,), (2, 7, END)]
    return search


def test_a_state_has_only_what_differs_from_the_best_beam():
    state = noted_search().state
    assert [(o.num_shared_tokens, o.token_ids.tolist()) for o in state.beams] == [(5, []), (4, [2])]
    hypotheses = [(o.num_shared_tokens, o.token_ids.tolist()) for o in state.hypotheses]
    assert hypotheses == [(2, [END]), (4, [END])]


def test_a_search_that_resumes_is_where_it_was():
    search, resumed = noted_search(), make_search(early_stopping=EarlyStopping.NEVER)
    best = search.beams[0].token_ids
    # The worker may have sampled one more.
    assert resumed.resume(search.state, np.append(best, np.int32(3)))
    assert (outputs(resumed), found(resumed)) == (outputs(search), found(search))
    assert [b.logprob for b in resumed.beams] == [b.logprob for b in search.beams]
    assert [h.end_token_id for h in resumed.hypotheses] == [END, END]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # more than the best beam has
        ("beams", {"num_shared_tokens": 6, "token_ids": np.empty(0, np.int32)}),
        # another prompt
        ("beams", {"num_shared_tokens": 1, "token_ids": np.ones(4, np.int32)}),
        ("beams", {"num_shared_tokens": 3}),  # another length
        ("hypotheses", {"num_shared_tokens": 1, "token_ids": np.ones(3, np.int32)}),
        ("hypotheses", {"num_shared_tokens": 2, "token_ids": np.empty(0, np.int32)}),
        ("hypotheses", {"token_ids": np.ones(7, np.int32)}),
    ],
)
def test_a_state_that_does_not_fit_is_not_taken(kind, changes):
    search, resumed = noted_search(), make_search()
    first, last = getattr(search.state, kind)
    state = replace(search.state, **{kind: (first, replace(last, **changes))})
    assert not resumed.resume(state, search.beams[0].token_ids)
    assert (outputs(resumed), found(resumed)) == ([[]], [])


def test_a_state_of_beams_without_tokens_left_is_not_taken():
    search, resumed = noted_search(), make_search(max_tokens=3)
    assert not resumed.resume(search.state, search.beams[0].token_ids)
    assert make_search(max_tokens=4).resume(search.state, search.beams[0].token_ids)
