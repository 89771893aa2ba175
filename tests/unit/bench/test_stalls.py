"""A stall in chaos runs: a stream's longest pause after each fault that it survived."""

from faults.streams import Stall, Stream, stalls


def test_a_pause_counts_from_the_fault_and_for_the_last_fault_before_its_end():
    stream = Stream("a", times_s=[0.0, 1.0, 4.0, 4.5, 8.0])
    faults = [(2.0, "one"), (4.2, "other"), (9.0, "too late")]
    assert list(stalls([stream], faults)) == [
        Stall("one", 2.0, 4.0, "a"),
        Stall("other", 3.5, 8.0, "a"),
    ]


def test_a_pause_that_outlasts_the_next_fault_counts_for_both():
    stream = Stream("a", times_s=[0.0, 10.0])
    assert [each.stalled_s for each in stalls([stream], [(1.0, "one"), (4.0, "other")])] == [
        9.0,
        6.0,
    ]


def test_a_stream_that_began_later_or_had_ended_has_none():
    assert not list(stalls([Stream("a", times_s=[3.0, 4.0])], [(2.0, "one"), (5.0, "other")]))
