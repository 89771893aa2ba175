"""Threads of native programs stay on CPUs of their own, and first write the weights they read.

In processes of their own, because threads of a pool stay pinned.
"""

import os
import subprocess
import sys

import pytest

from kernels.cpu.library import native

needs_native = pytest.mark.skipif(native() is None, reason="needs native code")
needs_two_cpus = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two CPUs",
)
BEGIN = """
import os, pathlib, threading
import torch
from kernels.cpu.library import Program, native
from kernels.cpu.linear import pack
from tests.kernels.test_native_program import call, run

def affinity_of_all():
    tasks = pathlib.Path("/proc/self/task").iterdir()
    return [os.sched_getaffinity(int(task.name)) for task in tasks]

free = os.sched_getaffinity(0)
first, second, *_ = sorted(free)
torch.set_num_threads(2)
"""


def run_apart(program):
    subprocess.run([sys.executable, "-c", BEGIN + program], check=True, timeout=120)


@needs_native
@needs_two_cpus
def test_each_thread_of_a_program_is_on_its_cpu_and_the_caller_only_meanwhile():
    run_apart("""
def places(num_threads):
    seen, begun = {}, [threading.Event() for _ in range(num_threads)]
    def do_share(share, num_shares):  # a thread takes one, since each waits for all
        seen[threading.get_native_id()] = os.sched_getaffinity(0)
        begun[share].set()
        assert all(each.wait(60) for each in begun)
    run([call(num_threads, do_share)], num_threads)
    caller = seen.pop(threading.get_native_id())
    assert os.sched_getaffinity(0) == free
    return caller, list(seen.values())

assert places(2) == (free, [free])
assert native().pin_threads([second, first])
assert places(3) == (free, [free, free]), "more threads than CPUs"
assert places(2) == ({second}, [{first}])
assert native().pin_threads([first, second])
assert places(2) == ({first}, [{second}])
assert native().pin_threads([])
assert places(2)[0] == free
""")


@needs_native
@needs_two_cpus
def test_weights_are_first_written_by_the_pinned_threads():
    run_apart("""
weight, x = torch.randn(4096, 128).bfloat16(), torch.randn(3, 128).bfloat16()
expected = pack(weight, None)(x)
threads = {}
def again():
    torch.set_num_threads(2)  # each thread has a number, and a pool, of its own
    pack(weight, None)
    threads["pinned"] = affinity_of_all()
assert native().pin_threads([first, second])
loading = threading.Thread(target=again)
loading.start(); loading.join()
assert threads["pinned"].count({second}) == 1, threads
assert {first} not in threads["pinned"], "the caller is back"
assert torch.equal(pack(weight, None)(x), expected)
""")


@needs_native
@needs_two_cpus
def test_memory_is_cleared_only_if_threads_are_pinned():
    run_apart("""
memory = torch.ones(1000, 37)
touch = native().first_touch
touch(memory.data_ptr(), 1000, 4 * 37)
assert memory.eq(1).all()
native().pin_threads([first, second])
touch(memory[1:].data_ptr(), 998, 4 * 37)
assert memory[[0, -1]].eq(1).all() and memory[1:-1].eq(0).all()
touch(memory.data_ptr(), 0, 0)
""")


@needs_native
def test_what_no_set_of_cpus_holds_is_refused():
    assert not native().pin_threads([-1])
    assert not native().pin_threads([1 << 20])
    assert not native().pin_threads([0] * 257)
