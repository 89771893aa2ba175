"""Programs run all shares of their calls, in the order of the calls, even if a thread is late."""

import ctypes
import struct
import threading
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from kernels.cpu.library import KernelCall, Program, native

pytestmark = pytest.mark.skipif(native() is None, reason="needs native code")

_SHARE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_COUNT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
_PATIENCE_S = 60


@dataclass(frozen=True)
class FakeKernel:
    """A kernel whose shares are Python's."""

    share: object
    count: object
    fields: str = ""

    @property
    def share_address(self):
        return ctypes.cast(self.share, ctypes.c_void_p).value

    @property
    def count_address(self):
        return ctypes.cast(self.count, ctypes.c_void_p).value

    def pack(self, *fields):
        return struct.pack(f"@{self.fields}", *fields)


def call(num_shares, do_share, joins=False):
    """A call of so many shares; `do_share(share, num_shares)` does one."""
    share = _SHARE(lambda _args, share, num_shares: do_share(share, num_shares))
    return KernelCall(FakeKernel(share, _COUNT(lambda _args: num_shares)), (), joins)


def run(calls, num_threads, num_apart=1000):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        Program(native(), calls, num_apart)()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("counts", [(1,), (2, 7), (3, 1, 256, 1), (1, 1, 1, 1)])
def test_all_shares_of_a_call_are_done_before_the_next_call_begins(counts, num_threads):
    expected = [{0} if num_threads == 1 else set(range(count)) for count in counts]
    done, too_early = [set() for _ in counts], []

    def share_of(index):
        def do_share(share, _num_shares):
            if done[:index] != expected[:index]:
                too_early.append((index, share))
            done[index].add(share)

        return do_share

    run([call(count, share_of(i)) for i, count in enumerate(counts)], num_threads)
    assert not too_early
    assert done == expected


def test_what_joins_a_call_is_done_share_by_share_with_it():
    order = {}

    def note(name):
        return lambda share, num_shares: order.setdefault(share, []).append((name, num_shares))

    run([call(3, note("a")), call(9, note("b"), joins=True), call(1, note("c"))], 2)
    # A share may be done twice, but then as a whole.
    assert all(names[0] == ("a", 3) and ("b", 3) in names for names in order.values())
    assert sorted(order) == [0, 1, 2]


@pytest.mark.parametrize("num_threads", [2, 4])
def test_a_share_whose_worker_is_stuck_is_done_by_another_and_later_calls_too(num_threads):
    is_taken, last_call_ran = threading.Lock(), threading.Event()
    was_awaited = []

    def stuck_once(share, _num_shares):
        if share == 0 and is_taken.acquire(blocking=False):
            was_awaited.append(last_call_ran.wait(_PATIENCE_S))

    calls = [call(3, stuck_once), call(2, lambda *_: None), call(1, lambda *_: last_call_ran.set())]
    run(calls, num_threads)
    assert was_awaited == [True]


@pytest.mark.parametrize("joins", [False, True])
def test_memory_is_not_used_again_while_a_late_worker_may_be_at_it(joins):
    is_taken, next_ran, reuse_began = threading.Lock(), threading.Event(), threading.Event()
    events = []

    def late(share, _num_shares):
        if share == 0 and is_taken.acquire(blocking=False):
            assert next_ran.wait(_PATIENCE_S)
            events.append(("too early", reuse_began.wait(0.1)))
            events.append("left")

    def use_again(_share, _num_shares):
        reuse_began.set()
        events.append("reuse")

    calls = [call(2, late), call(1, lambda *_: next_ran.set())]
    calls += [call(1, lambda *_: None)] if joins else []
    calls.append(call(1, use_again, joins))
    run(calls, 2, num_apart=len(calls) - 1)
    assert events[:3] == [("too early", False), "left", "reuse"]


def test_a_program_runs_again():
    count = Counter()
    calls = [call(4, lambda share, _: count.update([share])) for _ in range(3)]
    program = Program(native(), calls, 1)
    for _ in range(20):
        program()
    assert all(times >= 20 for times in count.values())


def test_a_field_that_is_a_call_is_the_address_of_that_calls_structure():
    seen = {}

    def kernel(name):
        def note(args, _share, _num_shares):
            seen[name] = args, ctypes.cast(args, ctypes.POINTER(ctypes.c_void_p))[0]

        return FakeKernel(_SHARE(note), _COUNT(lambda _args: 1), "P")

    pointed_at = KernelCall(kernel("pointed at"), (7,))
    calls = [KernelCall(kernel("before"), (pointed_at,)), pointed_at]
    Program(native(), [*calls, KernelCall(kernel("after"), (pointed_at,))], 1)()
    address, number = seen["pointed at"]
    assert number == 7
    assert seen["before"][1] == seen["after"][1] == address
    with pytest.raises(KeyError):
        Program(native(), calls[:1], 1)


def test_more_joined_calls_than_are_apart_are_refused():
    calls = [call(1, lambda *_: None), call(1, lambda *_: None, joins=True)]
    Program(native(), calls, 2)
    with pytest.raises(ValueError, match="num_apart is 1; 2 calls join"):
        Program(native(), calls, 1)
