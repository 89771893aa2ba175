"""When tokens go to clients: at once, or merged while the router is busy."""

import math
import time
from collections.abc import Callable

import pytest

from contract.outputs import FinishReason
from router.metrics import of_model
from router.schedulers import delivery as module
from router.schedulers.delivery import Delivery, wanted_s
from router.schedulers.live_table import LiveTable
from router.schedulers.messages import Ending, StepEvents

NUM_STREAMS = 100


class Clocks:
    """An event loop's clock and timer, and the processor time of its thread."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy = 7.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def call_later(self, delay: float, call: Callable[[], None]) -> object:
        assert self.due is None, "one timer at a time"
        self.due = self.now + delay, call
        return call

    def call_soon(self, call: Callable[[], None]) -> object:
        return self.call_later(0.0, call)

    def advance(self, seconds: float, busy: float = 0.0) -> None:
        """Let time pass, of it `busy` seconds on the processor."""
        end = self.now + seconds
        self.busy += busy
        while self.due is not None and self.due[0] <= end:
            (self.now, call), self.due = self.due, None
            call()
        self.now = end


class Live:
    """Counts its flushes."""

    def __init__(self) -> None:
        self.num_flushes = 0
        self.is_waiting = False

    def finish(self, *end: object) -> None:
        pass

    def flush(self) -> None:
        self.num_flushes += 1


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def delivery(clocks) -> Delivery:
    return Delivery(clocks, lambda: clocks.now, lambda: clocks.busy)


def counts(lives) -> set[int]:
    return {live.num_flushes for live in lives}


def test_a_router_with_time_passes_each_step_on_at_once(clocks, delivery):
    lives = [Live() for _ in range(NUM_STREAMS)]
    for step in range(1, 6):
        clocks.advance(0.010, busy=0.006)
        delivery.add(lives)
        assert counts(lives) == {step}
    assert clocks.due is None


def test_a_busy_router_merges_steps_until_it_has_been_idle(clocks, delivery):
    lives = [Live() for _ in range(NUM_STREAMS)]
    clocks.advance(1.0)
    delivery.add(lives)
    clocks.advance(0.010, busy=0.010)  # the duration of the first wave
    delivery.add(lives)
    assert counts(lives) == {1}
    clocks.advance(0.003)
    delivery.add(lives[:50])
    assert counts(lives) == {1}
    clocks.advance(0.002)  # 15 ms, and 10 ms of them busy: less than 70 %
    assert counts(lives) == {2}
    assert clocks.due is None
    clocks.advance(0.010)
    delivery.add(lives)
    assert counts(lives) == {3}


def test_no_token_waits_longer_than_50_ms(clocks, delivery):
    lives = [Live() for _ in range(NUM_STREAMS)]
    clocks.advance(1.0)
    delivery.add(lives)
    clocks.advance(0.040, busy=0.040)
    delivery.add(lives)
    clocks.advance(0.009, busy=0.009)
    assert counts(lives) == {1}
    clocks.advance(0.002, busy=0.002)
    assert counts(lives) == {2}


def test_few_streams_do_not_wait(clocks, delivery):
    lives = [Live() for _ in range(8)]
    for step in range(1, 4):
        clocks.advance(0.010, busy=0.010)
        delivery.add(lives)
        assert counts(lives) == {step}


def test_streams_that_come_later_go_with_the_wave_that_waits(clocks, delivery):
    lives = [Live() for _ in range(NUM_STREAMS)]
    clocks.advance(1.0)
    delivery.add(lives)
    clocks.advance(0.010, busy=0.010)
    delivery.add(lives)
    delivery.add([late := Live()])
    assert late.num_flushes == 0
    clocks.advance(0.005)
    assert (counts(lives), late.num_flushes) == ({2}, 1)


def test_a_long_wave_lets_other_callbacks_run_in_between(clocks, delivery):
    class Slow(Live):
        def flush(self) -> None:
            super().flush()
            clocks.now += 0.001

    lives = [Slow() for _ in range(NUM_STREAMS)]
    clocks.advance(1.0)
    num_turns = []
    delivery.add(lives)
    while clocks.due is not None:
        num_turns.append(sum(live.num_flushes for live in lives))
        delivery.add([late := Live()])
        assert late.num_flushes == 0, "it waits for those before it"
        _, call = clocks.due
        clocks.due = None
        call()
    assert num_turns == list(range(5, NUM_STREAMS, 5))
    assert counts(lives) == {1}
    assert late.num_flushes == 1


def test_a_step_may_flush_for_as_long_as_a_wave_holds_the_loop(clocks, delivery):
    lives = [Live() for _ in range(NUM_STREAMS)]
    clocks.advance(1.0)
    assert delivery.begin(NUM_STREAMS) == pytest.approx(clocks.now + 0.005)
    clocks.advance(0.004, busy=0.004)
    delivery.add(lives)  # of the same wave: they do not wait, though the router was busy
    assert counts(lives) == {1}
    assert clocks.due is None


def test_a_step_flushes_nothing_while_the_next_wave_waits(clocks, delivery):
    lives = [Live() for _ in range(NUM_STREAMS)]
    clocks.advance(1.0)
    delivery.begin(NUM_STREAMS)
    delivery.add([])
    clocks.advance(0.010, busy=0.010)
    assert delivery.begin(NUM_STREAMS) == -math.inf  # it has been busy
    delivery.add(lives)
    assert delivery.begin(1) == -math.inf, "a wave waits, and goes first"
    assert counts(lives) == {0}
    clocks.advance(0.005)
    assert counts(lives) == {1}


async def test_sequences_that_end_without_a_token_are_streams_of_a_step(clocks, delivery):
    lives = [Live() for _ in range(NUM_STREAMS)]
    table = LiveTable(of_model("m"))
    table._delivery, table._seq_key_to_live = delivery, dict(enumerate(lives))
    delivery.begin(NUM_STREAMS)
    delivery.add([])
    clocks.advance(0.010, busy=0.010)
    ends = tuple(Ending(key, FinishReason.CANCELLED, None, None) for key in range(NUM_STREAMS))
    table.deliver(StepEvents([], [], {}, (), (), (), {}, ends))
    assert counts(lives) == {0}, "the router has been busy"
    clocks.advance(0.005)
    assert counts(lives) == {1}


@pytest.mark.parametrize("has_schedstat", [True, False])
def test_time_on_the_processor_counts_with_and_without_schedstat(
    has_schedstat, tmp_path, monkeypatch
):
    if not has_schedstat:
        monkeypatch.setattr(module, "_SCHEDSTAT", str(tmp_path / "none"))
    before, ran = wanted_s(), time.thread_time()
    while time.thread_time() < ran + 0.02:
        pass
    assert wanted_s() - before > 0.01


def test_time_that_the_thread_waited_for_a_processor_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SCHEDSTAT", str(tmp_path / "schedstat"))
    (tmp_path / "schedstat").write_text("2000000000 500000000 7\n")
    assert wanted_s() == 2.5
