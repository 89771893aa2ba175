"""Which scheduler gets a request."""

from router.schedulers.placement import Candidate, choose

IDLE = tuple(Candidate(name, 0) for name in "abc")


def test_all_routers_choose_alike_in_whatever_order_they_list():
    for first in range(20):
        chosen = IDLE[choose([first], "", 1, IDLE)].name
        turned = IDLE[::-1]
        assert turned[choose([first], "", 1, turned)].name == chosen


def test_only_the_beginning_and_the_salt_count():
    prompts = [list(range(64)), [*range(64), 7], [*range(64), 8, 9]]
    assert len({choose(prompt, "s", 1, IDLE) for prompt in prompts}) == 1
    assert len({choose(prompts[0], str(salt), 1, IDLE) for salt in range(20)}) == 3


def test_one_without_room_is_left_out_unless_all_are():
    full = [Candidate(name, 0, room=1) for name in "abc"]
    for first in range(20):
        index = choose([first], "", 2, IDLE)
        assert choose([first], "", 2, full) == index
        one_full = [*IDLE[:index], full[index], *IDLE[index + 1 :]]
        assert choose([first], "", 2, one_full) != index
        assert choose([first], "", 1, one_full) == index


def test_the_requests_of_one_that_goes_move_and_no_others():
    for first in range(20):
        before = IDLE[choose([first], "", 1, IDLE)].name
        after = IDLE[:2][choose([first], "", 1, IDLE[:2])].name
        assert before in (after, "c")


def test_one_that_has_more_than_its_share_is_passed_over():
    first = choose([1], "", 1, IDLE)
    loads = [30, 30, 30]
    loads[first] = 60
    busy = [Candidate(c.name, n) for c, n in zip(IDLE, loads, strict=True)]
    assert choose([1], "", 1, busy) != first
    wide = [Candidate(c.name, n, 1 + (n == 60)) for c, n in zip(IDLE, loads, strict=True)]
    assert choose([1], "", 1, wide) == first  # it has two workers


def test_a_request_too_wide_for_all_goes_where_least_is():
    loads = [Candidate("a", 9), Candidate("b", 8), Candidate("c", 9)]
    assert choose([1], "", 100, loads) == 1
