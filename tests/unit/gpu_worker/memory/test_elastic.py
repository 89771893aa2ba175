"""Memory that grows and shrinks at fixed addresses, on a CPU and by CUDA's driver calls."""

import mmap
import sys
from pathlib import Path

import pytest
import torch
from fake_cuda_driver import GRANULARITY, POISON, Budget, FakeCudaDriver, HostChunks

from gpu_worker.memory.elastic import (
    CpuChunks,
    CudaChunks,
    ElasticMemory,
    OutOfMemoryError,
    VirtualMemoryError,
    load_driver,
)

CHUNK = 2 * GRANULARITY
MAX = 16 * CHUNK


def cuda_memory(num_bytes, budget=None, **kwargs):
    driver = FakeCudaDriver(budget or Budget(MAX), **kwargs)
    return driver, ElasticMemory(HostChunks(driver, MAX), num_bytes)


@pytest.fixture(params=["cpu", "cuda"])
def memory(request):
    if request.param == "cpu":
        return ElasticMemory(CpuChunks(MAX, lambda: MAX), 3 * CHUNK)
    return cuda_memory(3 * CHUNK)[1]


def test_it_begins_zeroed_and_as_long_as_it_may_ever_be(memory):
    assert (memory.num_bytes, len(memory.bytes)) == (3 * CHUNK, MAX)
    assert not memory.bytes[: 3 * CHUNK].any()


def test_what_stays_is_left_as_it_is_at_its_address(memory):
    address, whole = memory.bytes.data_ptr(), memory.bytes
    whole[: 3 * CHUNK] = 7
    for num_bytes in (9 * CHUNK, 5 * CHUNK + 1, MAX, 3 * CHUNK):
        memory.resize(num_bytes)
    assert whole.data_ptr() == address
    assert (whole[: 3 * CHUNK] == 7).all()
    assert memory.bytes is whole


@pytest.mark.parametrize("num_kept", [CHUNK, CHUNK + 1, 2 * CHUNK - 1])
def test_new_blocks_are_zero_even_if_their_memory_was_used(memory, num_kept):
    memory.bytes[: 3 * CHUNK] = 7
    memory.resize(num_kept)
    memory.resize(5 * CHUNK)
    assert (memory.bytes[:num_kept] == 7).all()
    assert not memory.bytes[num_kept : 5 * CHUNK].any()


def test_a_cpus_chunks_that_go_are_the_systems_again():
    memory = ElasticMemory(CpuChunks(MAX, lambda: MAX), MAX)
    memory.bytes[:] = 7
    memory.resize(CHUNK)
    assert not memory.bytes[CHUNK:].any()


def test_a_gpus_chunks_that_go_are_the_devices_again():
    budget = Budget(MAX)
    driver, memory = cuda_memory(5 * CHUNK, budget)
    assert budget.used_bytes == 5 * CHUNK
    memory.resize(2 * CHUNK + 1)
    assert budget.used_bytes == 3 * CHUNK
    assert (memory.bytes[3 * CHUNK :] == POISON).all()
    memory.close()
    assert budget.used_bytes == 0
    assert [*driver.ranges, *driver.mapped, *driver.handles] == []


def test_a_chunk_is_created_mapped_released_made_accessible_and_zeroed():
    driver, memory = cuda_memory(CHUNK)
    begin = ["cuMemGetAllocationGranularity", "cuMemAddressReserve"]
    one = ["cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemsetD8"]
    assert driver.calls == begin + one
    memory.resize(3 * CHUNK)
    assert driver.calls == begin + 3 * one


def test_a_chunk_is_a_multiple_of_what_the_driver_maps_at_once():
    driver = FakeCudaDriver(Budget(MAX))
    assert HostChunks(driver, MAX, GRANULARITY + 1).chunk_bytes == 2 * GRANULARITY


def test_out_of_memory_half_way_leaves_it_as_it_was():
    budget = Budget(5 * CHUNK)
    driver, memory = cuda_memory(3 * CHUNK, budget)
    memory.bytes[: 3 * CHUNK] = 7
    with pytest.raises(OutOfMemoryError, match=f"a chunk needs {CHUNK} bytes"):
        memory.resize(6 * CHUNK)
    assert memory.num_bytes == budget.used_bytes == 3 * CHUNK
    assert len(driver.mapped) == 3
    assert not driver.handles
    assert (memory.bytes[: 3 * CHUNK] == 7).all()
    memory.resize(5 * CHUNK)
    assert budget.used_bytes == 5 * CHUNK


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"])
def test_a_call_that_fails_half_way_leaves_nothing_behind(call):
    budget = Budget(MAX)
    driver, memory = cuda_memory(2 * CHUNK, budget, refuses=call, nth=5)  # of the third new chunk
    with pytest.raises(VirtualMemoryError, match=f"{call} of cuda:0 failed"):
        memory.resize(6 * CHUNK)
    assert budget.used_bytes == memory.num_bytes == 2 * CHUNK
    assert len(driver.mapped) == 2
    assert not driver.handles
    memory.resize(6 * CHUNK)
    assert not memory.bytes[: 6 * CHUNK].any()


def test_a_pool_that_finds_no_room_at_first_keeps_no_addresses():
    driver = FakeCudaDriver(Budget(2 * CHUNK))
    with pytest.raises(OutOfMemoryError):
        ElasticMemory(HostChunks(driver, MAX), 3 * CHUNK)
    assert [*driver.ranges, *driver.mapped, *driver.handles] == []


def test_a_gpu_that_does_not_give_memory_back_has_failed():
    _, memory = cuda_memory(4 * CHUNK, refuses="cuMemUnmap")
    with pytest.raises(torch.AcceleratorError, match="cuMemUnmap of cuda:0 failed"):
        memory.resize(2 * CHUNK)


def test_what_a_cpus_pool_grows_by_is_taken_at_once():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = 2**26
    memory = ElasticMemory(CpuChunks(2 * size, lambda: size), mmap.PAGESIZE)
    before = resident_bytes()
    memory.resize(size)
    assert resident_bytes() - before > 0.9 * size


def test_a_refused_reservation_of_addresses_is_an_error():
    with pytest.raises(OutOfMemoryError, match=f"{2**62} bytes of addresses cannot be reserved"):
        CpuChunks(2**62, lambda: 0)


def test_a_cpu_maps_no_more_than_there_is():
    memory = ElasticMemory(CpuChunks(MAX, lambda: 2 * CHUNK), 3 * CHUNK)
    with pytest.raises(OutOfMemoryError, match=f"{3 * CHUNK} bytes more .* has {2 * CHUNK} left"):
        memory.resize(6 * CHUNK)
    assert memory.num_bytes == 3 * CHUNK
    memory.resize(5 * CHUNK)


def test_torch_gives_back_what_it_keeps_before_the_device_counts_as_full(monkeypatch):
    budget = Budget(4 * CHUNK)
    _, memory = cuda_memory(2 * CHUNK, budget)
    assert budget.take(2 * CHUNK), "torch's"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(budget, "used_bytes", 2 * CHUNK))
    memory.resize(4 * CHUNK)
    assert budget.used_bytes == 4 * CHUNK


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(VirtualMemoryError, match="the package cuda-bindings"):
        load_driver()


def test_the_fake_driver_has_every_name_that_is_used():
    """The real driver has them too, if cuda-bindings is installed."""
    names = ["CUmemAllocationProp", "CUmemAccessDesc", "CUresult", "CUmemAllocationType"]
    names += ["CUmemLocationType", "CUmemAccess_flags", "CUmemAllocationGranularity_flags"]
    names += [name for name in vars(FakeCudaDriver) if name.startswith("cuMem")]
    real = pytest.importorskip("cuda.bindings.driver")
    assert not [name for name in names if not hasattr(real, name)]
    assert load_driver() is real


@pytest.mark.gpu
def test_a_gpus_own_driver_maps_keeps_zeroes_and_gives_back():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)  # the driver's calls need a context
    chunks = CudaChunks(load_driver(), device, 2**36)
    chunk = chunks.chunk_bytes
    memory = ElasticMemory(chunks, 2 * chunk)
    before, _ = torch.cuda.mem_get_info()
    memory.bytes[: 2 * chunk] = 7
    memory.resize(8 * chunk)
    grown, _ = torch.cuda.mem_get_info()
    assert before - grown >= 6 * chunk
    assert int(memory.bytes[: 2 * chunk].min()) == 7
    assert not memory.bytes[2 * chunk : 8 * chunk].any()
    torch.cuda.synchronize()
    memory.resize(chunk)
    assert torch.cuda.mem_get_info()[0] - grown >= 7 * chunk
    assert int(memory.bytes[:chunk].min()) == 7
    memory.close()
