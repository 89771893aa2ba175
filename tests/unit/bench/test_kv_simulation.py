"""The simulation behind `bench/fragmentation.py`: its allocator, and its engines."""

from itertools import repeat
from random import Random

import pytest

from sim_worker.time_model import TimeModel

ONE_SECOND = TimeModel(num_params=0.5, kv_bytes_per_token=0, bytes_per_s=1, operations_per_s=1e9)


@pytest.mark.parametrize("seed", range(20))
def test_first_fit_is_as_a_search_slot_by_slot(seed):
    from kv.reservations import FirstFit  # noqa: PLC0415

    dice, memory, slots, held = Random(seed), FirstFit(40), "." * 40, []
    for _ in range(300):
        if dice.random() < 0.5:
            count = dice.randint(1, 9)
            start = memory.take(count)
            assert start == (None if (at := slots.find("." * count)) < 0 else at)
            if start is not None:
                slots = slots[:start] + "#" * count + slots[start + count :]
                held.append((start, count))
        elif held:
            start, count = held.pop(dice.randrange(len(held)))
            memory.give_back(start, count)
            slots = slots[:start] + "." * count + slots[start + count :]
        assert memory.num_free == slots.count(".")
        assert memory.longest_free == max(map(len, slots.split("#")))


def test_paging_has_room_for_what_is_there_and_a_reservation_for_what_may_come():
    from kv.paged import PagedEngine  # noqa: PLC0415
    from kv.replay import Job, replay  # noqa: PLC0415
    from kv.reservations import ReservingEngine  # noqa: PLC0415

    jobs = Job(prompt_len=15, max_len=256, output_len=16)  # ends in its second block
    paged, reserving = PagedEngine(repeat(jobs), 8, 512), ReservingEngine(repeat(jobs), 8, 512)
    one, other = (replay([engine], ONE_SECOND, 20, 160) for engine in (paged, reserving))
    assert (one.num_running, other.num_running) == (8, 2)
    assert (one.tokens_per_s, other.tokens_per_s) == (8, 2)
    assert not paged.no_run | paged.no_room | reserving.no_run
    assert reserving.no_room


def test_a_reservation_needs_a_run():
    from kv.replay import Job  # noqa: PLC0415
    from kv.reservations import ReservingEngine  # noqa: PLC0415

    short, long = Job(1, 10, 2), Job(1, 10, 9)
    big = Job(1, 20, 2)
    engine = ReservingEngine(iter([short, long, short, big, big, big, big, big]), 4, 30)
    engine.step(0)
    engine.step(0)  # the short sequences have ended, and the long one lies between their blocks
    step = engine.step(0)
    assert (step.num_running, step.fragmentation) == (1, 0.5)
    assert (engine.no_run, engine.no_room) == ({3}, {3})


def test_blocks_that_are_preempted_are_seen():
    from kv.paged import PagedEngine  # noqa: PLC0415
    from kv.replay import Job, replay  # noqa: PLC0415

    engine = PagedEngine(repeat(Job(16, 128, 100)), 4, 192)
    result = replay([engine], ONE_SECOND, 0, 500)
    assert engine.no_room
    assert not engine.no_run
    assert 1 < result.num_running < 4
