"""The order of a GPU's copies, with fake streams that record their waits."""

import ctypes
import gc
from contextlib import contextmanager

import numpy as np
import pytest
import structlog
import torch

from gpu_worker.kv import host_pool
from gpu_worker.kv import host_pool as pinned_memory
from gpu_worker.kv.host_pool import HostPool, pinned_bytes


def ints(*values):
    return np.array(values, np.int32)


class FakeStreams:
    def __init__(self):
        self.log = []

    def begin_staging(self):
        self.log.append("computing waits for staging")

    @contextmanager
    def storing_staged(self):
        self.log.append("store staging")
        yield

    @contextmanager
    def storing(self):
        self.log.append("store")
        yield
        self.log.append("computing waits for the store")

    @contextmanager
    def loading(self):
        self.log.append("load")
        yield

    def end_loading(self):
        self.log.append("computing waits for the load")

    def await_stores(self):
        self.log.append("the host waits for stores")

    def synchronize(self):
        self.log.append("the host waits for all")


@pytest.fixture
def device():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (9, 1000), dtype=torch.uint8, generator=generator)


def test_a_few_blocks_are_staged_and_nothing_waits_for_the_link(device, monkeypatch):
    monkeypatch.setattr(host_pool, "STAGING_BYTES", 4000)
    streams = FakeStreams()
    pool = HostPool(device, 8, streams=streams)
    before = device.clone()
    pool.begin_step()
    pool.swap_out(ints(8, 0, 3, 4), ints(6, 1, 7, 2))
    assert streams.log == ["computing waits for staging", "store staging"]
    device.zero_()
    pool.begin_step()
    pool.swap_in(ints(7, 6, 2, 1), ints(0, 1, 2, 3))
    assert streams.log[2:] == ["load"]
    pool.begin_step()
    pool.begin_step()
    assert streams.log[3:] == ["computing waits for the load"]
    assert torch.equal(device[:4], before[[3, 8, 4, 0]])


def test_more_than_fit_the_staging_are_waited_for(device, monkeypatch):
    monkeypatch.setattr(host_pool, "STAGING_BYTES", 3999)
    streams = FakeStreams()
    pool = HostPool(device, 8, streams=streams)
    pool.swap_out(ints(8, 0, 3, 4), ints(6, 1, 7, 2))
    assert streams.log == ["store", "computing waits for the store"]
    assert np.array_equal(pool.blocks[[6, 1, 7, 2]], device[[8, 0, 3, 4]].numpy())


def test_checksums_are_taken_of_what_has_arrived(device):
    streams = FakeStreams()
    pool = HostPool(device, 8, has_checksums=True, streams=streams)
    pool.swap_out(ints(2), ints(5))
    assert streams.log[-1] == "the host waits for stores"
    assert not pool.swap_in(ints(5), ints(0)).size


class FakeRegistry:
    def __init__(self, error=0):
        self.error, self.pinned = error, {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's
        assert flags == 0
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's
        ctypes.string_at(address, self.pinned[address])  # faults if it is unmapped
        del self.pinned[address]
        return 0


def test_memory_is_pinned_as_large_as_it_is_and_as_long_as_it_is_used():
    registry = FakeRegistry()
    memory = pinned_bytes(5000, registry)
    assert registry.pinned == {memory.data_ptr(): 5000}
    assert not memory.any()
    view = memory[4000:].view(10, 100)
    del memory
    gc.collect()
    assert registry.pinned, "a view needs it"
    view[9] = 7
    del view
    gc.collect()
    assert not registry.pinned


def test_memory_that_cannot_be_registered_is_torchs(monkeypatch):
    zeros = torch.zeros
    launched = []

    def raise_last_error(*_, device):
        launched.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(pinned_memory.torch, "ones", raise_last_error)

    def zeros_of_a_gpu(*shape, dtype, pin_memory):
        assert pin_memory
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(pinned_memory.torch, "zeros", zeros_of_a_gpu)
    with structlog.testing.capture_logs() as logs:
        memory = pinned_bytes(100, FakeRegistry(error=2))
    assert memory.shape == (100,)
    assert logs[0]["error"] == 2
    assert launched == ["cuda"], "the error is no later step's"
