import mmap
from pathlib import Path

import pytest
import torch

from kernels.cpu.weight_memory import WeightMemory

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(address):
    """The bytes on huge pages in the mapping at an address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_here = start <= address < end
        elif is_here and first == "AnonHugePages:":
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def test_held_tensors_are_contiguous_copies():
    memory = WeightMemory()
    weights = [torch.randn(7, 5).t(), torch.randn(3).bfloat16(), torch.randint(0, 9, (2, 2, 2))]
    held = [memory.hold(weight) for weight in weights]
    for weight, copy in zip(weights, held, strict=True):
        assert torch.equal(copy, weight)
        assert copy.dtype is weight.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0


def test_small_weights_share_a_region_and_large_ones_get_their_own():
    memory = WeightMemory()
    first, second = memory.hold(torch.zeros(100)), memory.hold(torch.zeros(100))
    assert second.data_ptr() - first.data_ptr() == 448  # 400 bytes, in whole cache lines
    large = memory.hold(torch.ones(30 << 20))
    assert large.sum() == 30 << 20
    assert memory.hold(torch.zeros(100)).data_ptr() != second.data_ptr() + 448


def test_a_tensor_outlives_its_memory_s_owner():
    held = WeightMemory().hold(torch.arange(1000))
    assert torch.equal(held, torch.arange(1000))


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not THP.is_file() or "[never]" in THP.read_text(),
    reason="this system has no huge pages",
)
def test_it_is_on_huge_pages_where_there_are_some():
    held = WeightMemory().hold(torch.ones(8 << 20, dtype=torch.uint8))
    if not huge_bytes(held.data_ptr()):
        pytest.skip("the system has none left")
    assert huge_bytes(held.data_ptr()) >= 4 << 20
